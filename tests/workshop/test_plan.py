"""The plan of the session, and what INSTRUCTOR.md tells to do."""

import re
import shlex
import subprocess
import sys
from argparse import Namespace

import pytest
from PIL import Image

from backstage import ROOT
from slides import text as slides
from workshop import __main__ as workshop
from workshop.diff.diff import Diff, load_lesson
from workshop.instructor import answers
from workshop.stages import LESSONS, STAGES

INSTRUCTOR = (ROOT / "docs" / "INSTRUCTOR.md").read_text()


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
        table(INSTRUCTOR, "60 min | 90 min | 120 min | 240 min | more")))
    lessons = [path.stem for path in (ROOT / "notebooks").glob("*.ipynb")
               if ".20" not in path.name]
    assert sorted(named) == sorted(lessons)


def test_the_readme_has_the_lines_of_each_stage():
    rows = {row[0]: row[1::2] for row in table(
        (ROOT / "README.md").read_text(), "stage | starts from")}
    assert rows.pop("std") == ["", ""]
    for name in LESSONS:
        removed, added = slides.changed_lines(name)
        assert rows.pop(name, "no row") == [
            STAGES[name].after, f"-{removed} +{added}"], f"README.md: {name}"
    assert not rows


def test_the_run_sheet_has_the_plans_minutes():
    plan = slides.read_plan()
    rows = table((ROOT / "docs" / "run-sheet.md").read_text(),
                 "60 min | 90 min")
    for number, length in enumerate(slides.LENGTHS):
        spans = [row.minutes.get(length, 0) for row in plan.values()
                 if row.minutes.keys() & {*slides.LENGTHS}]
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
            workshop.parse_command()  # raises an error if it is wrong
    assert found


def test_every_session_ends_with_lightning_of_ones_own():
    """What is typed in an hour, and what `apply` makes of it."""
    plan = slides.read_plan()
    assert all({*slides.LENGTHS} <= plan[name].minutes.keys() for name in (
        "diff_lit", "diff_lit end"))
    script = Diff("lit", STAGES["ddp"].solution).apply([1, 3, 2]).splitlines()
    new = STAGES["lit"].solution.read_text().splitlines()
    begin, end = (next(i for i, line in enumerate(script) if words in line)
                  for words in ("raw_model = GPT(", "dist.destroy_process"))
    typing = new[next(i for i, line in enumerate(new) if "model = GPT(" in
                      line):next(i for i, line in enumerate(new)
                                 if "gradient_clip_val=1.0" in line) + 1]
    typing[-1] = typing[-1].rstrip(",") + ")"
    script[begin:end + 1] = typing
    mine = Diff("lit", data="\n".join(script).encode())
    assert not mine.script.syntax_error
    made = Diff("lit", data=mine.apply(
        item.number for item in mine.remaining).encode())
    assert not made.remaining and not made.other_changes


def test_the_answer_key_is_whole(capsys):
    """Each answer of the lessons and notebooks, none of them folded."""
    answers.main(Namespace(lesson=None, minutes=None))
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
    answers.main(Namespace(lesson="ddp", minutes=None))
    of_one = capsys.readouterr().out.removeprefix("# The answers, for the "
                                                  "instructor\n")
    assert "\n# ddp\n" in of_one and of_one in key and "# lit" not in of_one
    with pytest.raises(workshop.UserError, match=r"no lesson dpd .*ddp"):
        answers.main(Namespace(lesson="dpd", minutes=None))


@pytest.mark.parametrize("minutes", [None, *slides.LENGTHS])
def test_the_answers_come_in_the_plans_order(minutes, capsys):
    answers.main(Namespace(lesson=None, minutes=minutes))
    found = re.findall("^# (\\w+)$", capsys.readouterr().out, re.M)
    plan = [name.removeprefix("diff_") for name, row in
            slides.read_plan().items() if " " not in name and (
                minutes is None or minutes in row.minutes)]
    assert found == [name for name in plan if name in found]
    assert {"ddp", "lit"} <= {*found}
    assert ("mpi" in found) == (minutes is None)


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
