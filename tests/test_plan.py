"""The plan of the session, and what INSTRUCTOR.md tells to do."""

import json
import re
import shlex
import subprocess
import sys
from itertools import accumulate

import pytest
from PIL import Image

from backstage import ROOT
from backstage.flops import num_parameters
from slides import text as slides
from workshop import __main__ as workshop
from workshop import answers, arithmetic
from workshop.lesson.diff import Diff, Script, differences, load_lesson
from workshop.stages import STAGES

README = (ROOT / "README.md").read_text()
GUIDE_FILE = ROOT / "docs" / "INSTRUCTOR.md"
GUIDE = GUIDE_FILE.read_text()
SHEET = (ROOT / "docs" / "run-sheet.md").read_text()
MEASURED = (ROOT / "docs" / "measured.md").read_text()


def table(text, heading):
    """The rows of the table with that heading: lists of cells."""
    begin = text.index(f"\n| {heading} |") + 1
    lines = text[begin:].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")]
            for line in lines[2:]]


def minutes(rows, column):
    return [int(row[column] or 0) for row in rows]


def test_the_notebook_has_the_same_plan():
    cells = json.loads((ROOT / "notebooks" / "start_here.ipynb").read_text())
    text = "\n".join("".join(cell["source"]) for cell in cells["cells"])
    links = re.sub(r"\]\(", "](notebooks/", "\n" + text).replace(
        "notebooks/../", "")
    for heading in ("60 min | 90 min | 120 min", "path"):
        assert table(links, heading) == table(README, heading)


def test_a_lesson_promises_the_minutes_of_the_plan():
    """In two hours, or later; with what is to be done in the same notebook."""
    planned, name = {}, None
    for row in table(README, "60 min | 90 min | 120 min"):
        if not row[5]:
            continue  # a break
        name, = re.findall(r"notebooks/(\w+)\.ipynb", row[5]) or [name]
        planned[name] = planned.get(name, 0) + int(row[2] or row[3] or 0)
    for lesson in (ROOT / "notebooks").glob("diff_*.ipynb"):
        goal = "".join(json.loads(lesson.read_text())["cells"][0]["source"])
        promised, = re.findall(r"In (\d+) minutes", goal)
        assert int(promised) == planned[lesson.stem], lesson.stem


@pytest.mark.parametrize(("column", "deck"), [(0, "course-60"),
                                              (1, "course-90"),
                                              (2, "course-120")])
def test_the_room_begins_each_part_when_the_plan_does(column, deck):
    """And with the slides that the deck has for it."""
    parts = [n for n in minutes(table(
        README, "60 min | 90 min | 120 min"), column) if n]
    rows = [row[2 * column:] for row in table(
        SHEET, "60 min | slides | 90 min") if row[2 * column]]
    assert [int(row[0]) for row in rows] == [0, *accumulate(parts)][:-1]
    numbers = {}  # of each section's slides
    for number, page in enumerate(slides.pages(slides.write(
            slides.DECKS[deck])), 1):
        for section in re.findall(r" section: (.*)\.$", page, re.M):
            numbers.setdefault(section, []).append(str(number))
    assert [row[1] for row in rows] == [
        "-".join(dict.fromkeys((first[0], first[-1])))
        for first in numbers.values()]


def test_the_pictures_of_lessons_are_of_those_that_there_are():
    """`pytest --whole tests/test_lab.py -k "saved or portal"` draws them."""
    for name, shown in (("lesson", repr(load_lesson("ddp").changes[4])),
                        ("portal-3", repr(slides.cells("start_here")[:2]))):
        with Image.open(ROOT / "docs" / f"{name}.png") as drawn:
            assert drawn.info["lesson"] == shown


def test_every_lesson_is_in_the_plan():
    named = re.findall(r"\(notebooks/(\w+)\.ipynb\)", str(
        table(README, "60 min | 90 min | 120 min")))
    lessons = [path.stem for path in (ROOT / "notebooks").glob("*.ipynb")
               if ".20" not in path.name]
    assert sorted(named) == sorted(lessons)
    paths = re.findall(r"notebooks/(\w+)\.ipynb", str(
        table(README, "path")))
    session = [name for name in lessons if "start_here" != name not in paths]
    assert len(paths) == len({*paths})
    assert sorted(session) == ["diff_lit", "results"]  # in two hours


def commands(text):
    """What stands in its blocks of bash and between its backticks."""
    blocks = re.findall(r"```bash\n(.*?)```", text, re.S)
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    return lines + re.findall(r"(?<!`)`([^`]+)`(?!`)", text)


@pytest.mark.parametrize("page", ["README.md", "docs/INSTRUCTOR.md",
                                  "docs/launching.md", "docs/run-sheet.md",
                                  "docs/runs.md",
                                  "batchfiles/README.md"])
def test_the_commands_of_the_workshop_exist(page, monkeypatch):
    text = "\n".join(commands((ROOT / page).read_text()))
    found = re.findall(r"-m workshop ([a-z][^#|&>\n]*)", text)
    for words in found:
        if words.strip() != "check":  # named without a stage
            monkeypatch.setattr(sys, "argv", ["workshop", *shlex.split(words)])
            workshop.parse()  # raises an error if it is wrong
    assert found
    monkeypatch.setattr(sys, "argv", ["workshop", "reset"])
    with pytest.raises(workshop.UserError):
        workshop.parse()


# A step of the course: its section, its notebook, the headings where an hour
# begins and ends there. `apply` makes the changes of DDP that nobody types.
HOUR = (("start_here end", "start_here", "# Start", "## The plan"),
        ("diff_ddp", "diff_ddp", "# From", "## Is it right?"),
        ("diff_ddp end", "diff_ddp", "## Is it right?", "## Launch it"),
        ("batchfiles", "diff_ddp", "## Launch it", "### 2."),
        ("results", "results", "# Results", "## Where the time goes"))
APPLIED = {60: (1, 2, 3, 4, 10, 11, 12, 13), 90: (1, 2, 3, 4, 13),
           120: (1, 2, 3, 4, 13)}


def words_between(name, first, last):
    """How many words of a notebook are read, without what is folded."""
    cells = json.loads((ROOT / "notebooks" / f"{name}.ipynb").read_text())
    text = "\n".join("".join(cell["source"]) for cell in cells["cells"]
                     if cell["cell_type"] == "markdown")
    text = text[text.index(first):text.index(last) if last else None]
    return len(re.sub(r"(?s)<details>.*?</details>", "", text).split())


def talk(deck, section):
    """The minutes of a section's slides on which the room does not work."""
    slide = re.compile(r"Minutes ([\d.]+) to ([\d.]+)\..* section: "
                       rf"{section}\.$", re.M)
    spans = (slide.search(page) for page in slides.pages(slides.write(
        slides.DECKS[deck])) if not re.search("_class: .*task", page))
    return sum(float(span[2]) - float(span[1]) for span in spans if span)


def read(lesson, without=()):
    """The words of its changes, with their questions and answers."""
    return sum(len(f"{change.why} {change.predict} {change.answer}".split())
               for number, change in enumerate(lesson.changes, 1)
               if number not in without)


def typed(length):
    """(words, lines) of DDP's changes that nobody applies."""
    applied = APPLIED[length]
    lesson = load_lesson("ddp")
    std = STAGES["std"].solution
    desk = Diff("ddp", std).apply(applied).encode()
    return read(lesson, applied), sum(j2 - j1 for *_, j1, j2 in differences(
        Script(std, desk).code, lesson.goal.code))


@pytest.mark.parametrize("length", [*APPLIED])
def test_talk_reading_typing_and_waiting_fit_the_plan(length):
    plan, deck = slides.read_plan(), f"course-{length}"
    rows = table(MEASURED, "step | talk")
    for row, (section, name, first, last) in zip(rows, HOUR, strict=True):
        if length == 120 and name == "results":
            last = None  # there is time for all of it
        said, words, lines = talk(deck, section), words_between(
            name, first, last), 0
        if section == "diff_ddp":
            more, lines = typed(length)
            words += more
        seconds = int(row[4].rpartition("-")[2])  # the most of three
        needs = said + words / 200 + lines / 3 + seconds / 60
        left = plan[section].minutes[length]
        assert needs <= left, (row, needs)
        if length == 60:
            assert [float(cell or 0) for cell in row[1:4] + row[5:]] == [
                said, words, lines, round(needs), left], row


def test_lightning_fits_the_second_hour():
    """All reasons are read, three changes typed; three cells, what is folded
    and the job are left out. A minute each for the other cells: with those
    three they took 45 s and 56 s on two busy cores (load 5 to 8). A minute is
    left over.
    """
    plan, lesson = slides.read_plan(), load_lesson("lit")
    cells = json.loads((ROOT / "notebooks" / "diff_lit.ipynb").read_text())
    text = " ".join("".join(cell["source"]) for cell in cells["cells"])
    assert "two hours, type changes 1 to 3." in text
    ddp = STAGES["ddp"].solution
    made = Diff("lit", ddp).apply([1, 2, 3]).encode()
    lines = sum(j2 - j1 for *_, j1, j2 in differences(
        Script(ddp).code, Script(ddp, made).code))
    assert "hours, go on with *Make the changes*" in " ".join(text.split())
    words = read(lesson) + sum(words_between("diff_lit", *span) for span in (
        ("# From", "**The log."), ("## Make", "## Is it right?")))
    needs = talk("course-120", "diff_lit") + words / 200 + lines / 3 + 2
    assert needs <= plan["diff_lit"].minutes[120]

    assert "two hours, go on with *Other strategies*" in text
    words = sum(words_between("diff_lit", *span) for span in (
        ("## Is it right?", "## Submit it"), ("## Other", "### 2.")))
    needs = talk("course-120", "diff_lit end") + words / 200 + 1
    assert needs <= plan["diff_lit end"].minutes[120]


def test_the_answer_key_is_whole(capsys):
    """Each answer of the lessons and notebooks, none of them folded."""
    answers.main()
    key = capsys.readouterr().out
    lessons = "".join(path.read_text() for path in (
        ROOT / "workshop" / "lessons").glob("*.md"))
    folded = "".join(path.read_text() for path in (
        ROOT / "notebooks").glob("*.ipynb") if ".20" not in path.name)
    asked = len(re.findall(r"^\*\*Answer\.\*\*", lessons, re.M))
    broken = folded.count("<summary>Answer</summary>")
    assert min(asked, broken) > 20
    assert key.count("\n**Answer.**") == asked + broken
    assert "<summary>Answer" not in key
    answers.main("ddp")
    of_one = capsys.readouterr().out.removeprefix("# The answers, for the "
                                                  "instructor\n")
    assert "\n# ddp\n" in of_one and of_one in key and "# lit" not in of_one
    with pytest.raises(workshop.UserError, match=r"is called dpd: .*ddp"):
        answers.main("dpd")


def test_the_files_that_the_guide_names_exist():
    ours = ("code/", "batchfiles/", "notebooks/", "site.example.sh",
            "activate.sh")
    names = {word for line in commands(GUIDE) for word in line.split()
             if word.startswith(ours)}
    assert len(names) > 5
    for name in names:
        assert (ROOT / name).exists(), name


def test_all_sizes_are_for_the_instructor_alone():
    """Forty people with six jobs each, and what these leave."""
    file = ROOT / "batchfiles" / "all-sizes.sh"
    sizes = re.search(r"for size in (.+);", file.read_text())[1].split()
    checkpoint = 12 * num_parameters(arithmetic.GPT2)  # weights and moments
    said = " ".join(GUIDE.split())
    assert f"a checkpoint of {checkpoint / 1e9:.1f} GB" in said
    assert (f"{40 * len(sizes)} jobs and "
            f"{40 * len(sizes) * round(checkpoint / 1e9, 1):.0f} GB") in said
    assert file.name in GUIDE
    for folder in ("notebooks", "slides", "workshop/lessons", "docs"):
        for path in (ROOT / folder).glob("*.*"):
            if path.suffix in (".md", ".ipynb") and path != GUIDE_FILE:
                assert file.name not in path.read_text(), path
    assert file.name not in README


def test_the_site_file_is_handed_out_to_all_clones(tmp_path):
    line, = (line for line in commands(GUIDE) if line.startswith("for clone"))
    homes = [tmp_path / "home" / name / "gpt2-workshop" for name in "abc"]
    for home in homes:
        home.mkdir(parents=True)
    (tmp_path / "site.sh").write_text("export SBATCH_ACCOUNT=us\n")
    subprocess.run(["bash", "-c", line.replace("/home/", f"{tmp_path}/home/")],
                   check=True, cwd=tmp_path)
    assert all((home / "site.sh").read_text() == "export SBATCH_ACCOUNT=us\n"
               for home in homes)
