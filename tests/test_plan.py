"""The plan of the session, and what INSTRUCTOR.md tells to do."""

import json
import re
import shlex
import subprocess
import sys

import pytest
from PIL import Image

from backstage import ROOT
from rankcheck.errors import UserError
from slides import text as slides
from workshop import __main__ as workshop
from workshop.lesson import answers
from workshop.lesson.diff import Diff, Script, differences, load_lesson
from workshop.stages import STAGES

README = (ROOT / "README.md").read_text()
MEASURED = (ROOT / "docs" / "measured.md").read_text()


def table(text, heading):
    """The rows of the table with that heading: lists of cells."""
    begin = text.index(f"\n| {heading} |") + 1
    lines = text[begin:].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")]
            for line in lines[2:]]


def test_the_notebook_has_the_same_plan():
    links = re.sub(r"\]\(", "](notebooks/", "\n" + "\n".join(
        slides.cells("start_here"))).replace("notebooks/../", "")
    for heading in ("60 min | 90 min | 120 min", "path"):
        assert table(links, heading) == table(README, heading)


def test_the_pictures_of_lessons_are_of_those_that_there_are():
    """`pytest tests/test_lab.py -k to_ddp` draws them: see `keep` there."""
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
    with pytest.raises(UserError):
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
    name, minutes = deck.split("-")
    spans = (slide.search(page) for page in slides.pages(slides.write(
        name, int(minutes))) if not re.search("_class: .*task", page))
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


def test_the_answer_key_is_whole(capsys):
    """Each answer of the lessons and notebooks, none of them folded."""
    answers.show()
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
    answers.show("ddp")
    of_one = capsys.readouterr().out.removeprefix("# The answers, for the "
                                                  "instructor\n")
    assert "\n# ddp\n" in of_one and of_one in key and "# lit" not in of_one
    with pytest.raises(workshop.UserError, match=r"is called dpd: .*ddp"):
        answers.show("dpd")


def test_the_site_file_is_handed_out_to_all_clones(tmp_path):
    line, = (line for line in commands((
        ROOT / "docs" / "INSTRUCTOR.md").read_text())
             if line.startswith("for clone"))
    homes = [tmp_path / "home" / name / "gpt2-workshop" for name in "abc"]
    for home in homes:
        home.mkdir(parents=True)
    (tmp_path / "site.sh").write_text("export SBATCH_ACCOUNT=us\n")
    subprocess.run(["bash", "-c", line.replace("/home/", f"{tmp_path}/home/")],
                   check=True, cwd=tmp_path)
    assert all((home / "site.sh").read_text() == "export SBATCH_ACCOUNT=us\n"
               for home in homes)
