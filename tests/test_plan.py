"""The plan of the session, and what INSTRUCTOR.md tells to do."""

import json
import re
import shlex
import subprocess
import sys
from itertools import accumulate

import pytest

from backstage import ROOT
from backstage.flops import num_parameters
from slides import text as slides
from workshop import __main__ as workshop
from workshop import answers, arithmetic
from workshop.lesson.diff import load_lesson

README = (ROOT / "README.md").read_text()
GUIDE = (ROOT / "INSTRUCTOR.md").read_text()


def table(text, heading):
    """The rows of the table with that heading: lists of cells."""
    begin = text.index(f"\n| {heading} |") + 1
    lines = text[begin:].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")]
            for line in lines[2:]]


def minutes(rows, column):
    return [int(row[column] or 0) for row in rows]


def test_the_minutes_add_up():
    rows = table(README, "60 min | 120 min")
    assert sum(minutes(rows, 0)) == 60 and sum(minutes(rows, 1)) == 120
    for row in rows:
        assert any(row[:3]), row


def test_the_notebook_has_the_same_plan():
    cells = json.loads((ROOT / "notebooks" / "start_here.ipynb").read_text())
    text = "\n".join("".join(cell["source"]) for cell in cells["cells"])
    links = re.sub(r"\]\(", "](notebooks/", "\n" + text).replace(
        "notebooks/../", "")
    assert table(links, "60 min | 120 min") == table(
        README, "60 min | 120 min")


def test_a_lesson_promises_the_minutes_of_the_plan():
    """In two hours, or later; with what is to be done in the same notebook."""
    planned, name = {}, None
    for row in table(README, "60 min | 120 min"):
        if not row[4]:
            continue  # a break
        name, = re.findall(r"notebooks/(\w+)\.ipynb", row[4]) or [name]
        planned[name] = planned.get(name, 0) + int(row[1] or row[2])
    for lesson in (ROOT / "notebooks").glob("diff_*.ipynb"):
        goal = "".join(json.loads(lesson.read_text())["cells"][0]["source"])
        promised, = re.findall(r"In (\d+) minutes", goal)
        assert int(promised) == planned[lesson.stem], lesson.stem


@pytest.mark.parametrize("column", [0, 1])
def test_the_room_begins_each_part_when_the_plan_does(column):
    parts = [n for n in minutes(table(README, "60 min | 120 min"), column)
             if n]
    begins = [int(row[column]) for row in table(GUIDE, "60 min | 120 min")
              if row[column]]
    assert begins == [0, *accumulate(parts)][:-1]


def test_every_lesson_is_in_the_plan():
    named = re.findall(r"\(notebooks/(\w+)\.ipynb\)", str(
        table(README, "60 min | 120 min")))
    lessons = [path.stem for path in (ROOT / "notebooks").glob("*.ipynb")
               if ".20" not in path.name]
    assert sorted(named) == sorted(lessons)


def commands(text):
    """What stands in its blocks of bash and between its backticks."""
    blocks = re.findall(r"```bash\n(.*?)```", text, re.S)
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    return lines + re.findall(r"(?<!`)`([^`]+)`(?!`)", text)


@pytest.mark.parametrize("page", ["README.md", "INSTRUCTOR.md",
                                  "docs/launching.md", "docs/runs.md",
                                  "batchfiles/README.md"])
def test_the_commands_of_the_workshop_exist(page, monkeypatch):
    text = "\n".join(commands((ROOT / page).read_text()))
    found = re.findall(r"-m workshop ([a-z][^#|&\n]*)", text)
    for words in found:
        if words.strip() != "check":  # named without a stage
            monkeypatch.setattr(sys, "argv", ["workshop", *shlex.split(words)])
            workshop.parse()  # raises an error if it is wrong
    assert found
    monkeypatch.setattr(sys, "argv", ["workshop", "reset"])
    with pytest.raises(workshop.UserError):
        workshop.parse()


# A step of the hour: its notebook, and the headings where it begins and ends
HOUR = (("start_here", "# Start", "## The plan"),
        ("diff_ddp", "# From", "## Is it right?"),
        ("diff_ddp", "## Is it right?", "## Launch it"),
        ("diff_ddp", "## Launch it", "## Break it"),
        ("results", "# Results", None))


def words_between(name, first, last):
    """How many words of a notebook are read, without what is folded."""
    cells = json.loads((ROOT / "notebooks" / f"{name}.ipynb").read_text())
    text = "\n".join("".join(cell["source"]) for cell in cells["cells"]
                     if cell["cell_type"] == "markdown")
    text = text[text.index(first):text.index(last) if last else None]
    return len(re.sub(r"(?s)<details>.*?</details>", "", text).split())


def test_the_minutes_of_the_hour_are_computed():
    rows = table(GUIDE, "step | words")
    planned = [n for n in minutes(table(README, "60 min | 120 min"), 0) if n]
    for row, place, plan in zip(rows, HOUR, planned, strict=True):
        seconds = int(row.pop(3).rpartition("-")[2])  # the most of three
        _, words, lines, computed, left = (
            cell and (int(cell) if cell.isdigit() else cell) for cell in row)
        expected = words_between(*place)
        if lines:  # and its changes, with their questions and answers
            assert lines == slides.changed_lines("ddp")[1]
            expected += sum(
                len(f"{change.why} {change.predict} {change.answer}".split())
                for change in load_lesson("ddp").changes)
        assert words == expected, row
        assert computed == round(
            words / 200 + (lines or 0) / 3 + seconds / 60), row
        assert left == plan, row


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
            if path.suffix in (".md", ".ipynb"):
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
