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
from workshop.lesson.diff import Diff, differences, load_lesson
from workshop.stages import LESSONS, STAGES

INSTRUCTOR = (ROOT / "docs" / "INSTRUCTOR.md").read_text()
MEASURED = (ROOT / "docs" / "measured.md").read_text()


def table(text, heading):
    """The rows of the table with that heading: lists of cells."""
    begin = text.index(f"\n| {heading} |") + 1
    lines = text[begin:].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")]
            for line in lines[2:]]


def test_the_pictures_of_lessons_are_of_those_that_there_are():
    """test_lab.py draws them: see `keep` there."""
    for name, shown in (("lesson", repr(load_lesson("ddp").changes[4])),
                        ("portal-3", repr(slides.cells("start_here")[:2]))):
        with Image.open(ROOT / "docs" / f"{name}.png") as drawn:
            assert drawn.info["lesson"] == shown


def test_every_lesson_is_in_the_plan():
    named = re.findall(r"/notebooks/(\w+)\.ipynb\)", str(
        table(INSTRUCTOR, "60 min | 90 min | 120 min")))
    lessons = [path.stem for path in (ROOT / "notebooks").glob("*.ipynb")
               if ".20" not in path.name]
    assert sorted(named) == sorted(lessons)
    paths = re.findall(r"\((\w+)\.ipynb", str(
        table("\n\n".join(slides.cells("start_here")), "path")))
    session = [name for name in lessons if "start_here" != name not in paths]
    assert len(paths) == len({*paths})
    assert sorted(session) == ["diff_lit", "results"]  # of each session


def test_the_readme_has_the_lines_of_each_stage():
    rows = {row[0]: row[1::2] for row in table(
        (ROOT / "README.md").read_text(), "stage | after")}
    assert rows.pop("std") == ["", ""]
    for name in LESSONS:
        removed, added = slides.changed_lines(name)
        assert rows.pop(name) == [STAGES[name].after, f"-{removed} +{added}"]
    assert not rows


def test_the_run_sheet_has_the_plans_minutes():
    plan = slides.read_plan()
    rows = table((ROOT / "docs" / "run-sheet.md").read_text(),
                 "60 min | 90 min")
    for number, length in enumerate((60, 90, 120)):
        spans = [row.minutes.get(length, 0) for row in plan.values()
                 if slides.MORE not in row.minutes]
        begins = [str(sum(spans[:k])) if span else ""
                  for k, span in enumerate(spans)]
        assert [row[number] for row in rows] == begins
        assert sum(spans) == length


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


WORDS, LINES = 130, 3  # a minute, read in a foreign language; typed
# A step of the course: its section, its notebook, and the parts of it that are
# read in 60, 90 and 120 minutes, each from these words to those.
RUN = "# Results", "## Tokens"
STEPS = (
    ("start_here end", "start_here", [("## Data", "## What can follow")]),
    ("diff_ddp", "diff_ddp", [("# From", "## Is it right?")]),
    ("diff_ddp end", "diff_ddp", [("## Is it right?", "## Submit it")]),
    ("batchfiles", "diff_ddp", [("## Submit it", "## Break it")],
     [("## Submit it", "### 2.")]),
    ("diff_lit", "diff_lit", [("# From", "## Is it right?")]),
    ("diff_lit end", "diff_lit", [("## Is it right?", "## Break it")]),
    ("results", "results", [RUN, ("## What to", "## Take it")],
     [("# Results", "## Where the time"), ("## What to", None)],
     [("# Results", None)]))
TYPED = {"ddp": {60: range(5, 9), 90: range(5, 10), 120: range(5, 13)},
         "lit": {60: (2, 4), 90: (2, 4), 120: range(1, 5)}}
HOUR = "gradient_clip_val=1.0"  # where an hour ends to type lit's change 4


def words_between(name, parts):
    """How many words of a notebook are read, without what is folded."""
    text = "\n\n".join("".join(cell["source"]) for cell in json.loads((
        ROOT / "notebooks" / f"{name}.ipynb").read_text())["cells"]
        if cell["cell_type"] == "markdown")
    text = "\n".join(text[text.index(first):last and text.index(last)]
                     for first, last in parts)
    return len(re.sub(r"(?s)<details>.*?</details>", "", text).split())


def talk(deck, section):
    """The minutes of a section's slides on which the room does not work."""
    slide = re.compile(r"Minutes ([\d.]+) to ([\d.]+)\..* section: "
                       rf"{section}\.$", re.M)
    name, minutes = deck.split("-")
    spans = (slide.search(page) for page in slides.pages(slides.write(
        name, int(minutes))) if not re.search("_class: .*task", page))
    return sum(float(span[2]) - float(span[1]) for span in spans if span)


def typed(stage, length):
    """(words, lines) of a lesson's changes that are typed in a session."""
    lesson, numbers = load_lesson(stage), TYPED[stage][length]
    made = [lesson.changes[number - 1] for number in numbers]
    lines = [line for piece in lesson.pieces if piece.change + 1 in numbers
             for _, _, j1, j2 in differences(
                 lesson.start.code[piece.i1:piece.i2],
                 lesson.goal.code[piece.j1:piece.j2])
             for line in lesson.goal.code[piece.j1:piece.j2][j1:j2]]
    if (stage, length) == ("lit", 60):
        lines = lines[:1 + next(number for number, line in enumerate(lines)
                                if HOUR in line)]
    return sum(len(f"{change.why} {change.predict} {change.answer}".split())
               for change in made), len(lines)


@pytest.mark.parametrize("length", [60, 90, 120])
def test_talk_reading_typing_and_waiting_fit_the_plan(length):
    plan, deck = slides.read_plan(), f"course-{length}"
    rows = table(MEASURED, "step | talk")
    for row, (section, name, *parts) in zip(rows, STEPS, strict=True):
        said, words, lines = talk(deck, section), words_between(
            name, parts[min(length // 30 - 2, len(parts) - 1)]), 0
        stage = section.removeprefix("diff_")
        if stage in TYPED:
            more, lines = typed(stage, length)
            words += more
        seconds = int(row[4].rpartition("-")[2] or 0)  # the most
        needs = said + words / WORDS + lines / LINES + seconds / 60
        left = plan[section].minutes[length]
        assert needs <= left, (row, said, words, lines, needs)
        if length == 60:
            assert [float(cell or 0) for cell in row[1:4] + row[5:]] == [
                said, words, lines, round(needs), left], (
                row, said, words, lines, round(needs))


def test_every_session_ends_with_lightning_of_ones_own():
    """What is typed in an hour, and what `apply` makes of it."""
    plan = slides.read_plan()
    assert all({60, 90, 120} <= plan[name].minutes.keys() for name in (
        "diff_lit", "diff_lit end"))
    desk = Diff("lit", STAGES["ddp"].solution).apply([1, 3, 2]).splitlines()
    new = STAGES["lit"].solution.read_text().splitlines()
    begin, end = (next(i for i, line in enumerate(desk) if words in line)
                  for words in ("raw_model = GPT(", "dist.destroy_process"))
    typing = new[next(i for i, line in enumerate(new) if "model = GPT(" in
                      line):next(i for i, line in enumerate(new)
                                 if HOUR in line) + 1]
    typing[-1] = typing[-1].rstrip(",") + ")"
    assert len([line for line in typing if line.startswith(" " * 8)][1:]) == 5
    desk[begin:end + 1] = typing
    mine = Diff("lit", data="\n".join(desk).encode())
    assert not mine.yours.syntax_error
    made = Diff("lit", data=mine.apply(
        item.number for item in mine.left).encode())
    assert not made.left and not made.others


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
