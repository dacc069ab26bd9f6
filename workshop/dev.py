"""For contributors: check that the parts of each lesson fit together.

    python -m workshop dev check              every stage, in seconds
    python -m workshop dev check ddp          one stage
    python -m workshop dev check ddp --mistakes   and each planted mistake is
                                              named: minutes
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from backstage import ROOT
from backstage.errors import UserError, require
from workshop.diff import documents
from workshop.diff.diff import Diff, load_lesson
from workshop.stages import STAGES, Stage, find_stage


@dataclass(frozen=True)
class Problem:
    """Something that does not fit, and its fix."""

    text: str
    fix: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["check"])
    parser.add_argument("stages", nargs="*", metavar="STAGE",
                        help="which stages (all)")
    parser.add_argument("--mistakes", action="store_true",
                        help="also run the check on each planted mistake "
                        "(minutes a stage)")


def main(args: argparse.Namespace) -> int:
    """Print what does not fit; return the exit status, 1 if anything."""
    unknown = [name for name in args.stages if name not in STAGES]
    require(not unknown, f"no such stage: {', '.join(unknown)}; fix: add an "
            "entry to STAGES in workshop/stages.py, or choose from "
            f"{', '.join(STAGES)}")
    stages = [STAGES[name] for name in args.stages] or [*STAGES.values()]
    failed = 0
    if not args.stages:
        for path in find_unregistered():
            failed += 1
            print(f"FAIL  {path} belongs to no stage\n      fix: add an entry "
                  "to STAGES in workshop/stages.py")
    for stage in stages:
        problems = [*check_stage(stage)]
        failed += bool(problems)
        if not problems:
            print(f"ok    {stage.name}: {describe_stage(stage)}")
        for problem in problems:
            print(f"FAIL  {stage.name}: {problem.text}\n"
                  f"      fix: {problem.fix}")
    if args.mistakes and not failed:
        return try_mistakes(stages)
    return int(failed > 0)


def find_unregistered() -> Iterator[Path]:
    """Yield the solutions of stages that the registry does not have."""
    for path in sorted((ROOT / "solutions").glob("train_gpt2_*.py")):
        if path.stem.removeprefix("train_gpt2_") not in STAGES:
            yield path.relative_to(ROOT)


def describe_stage(stage: Stage) -> str:
    """Describe the files of a stage that fit together."""
    if not stage.after:
        return "solution and batch file"
    count = len(documents.load_changes(stage.name))
    return (f"solution, {count} changes, notebook, batch file, pages and "
            "planted mistakes")


def check_stage(stage: Stage) -> Iterator[Problem]:
    """Yield what does not fit in a stage's files and its registry entry."""
    problems = [*check_solution(stage)]
    yield from problems
    yield from check_batch_file(stage)
    if stage.after and not problems:  # the others need the solution
        yield from check_lesson(stage)
        yield from check_notebook(stage)
        yield from check_pages(stage)
        yield from check_planted(stage)


def check_solution(stage: Stage) -> Iterator[Problem]:
    """Yield a problem unless the solution is a script that names its stage."""
    path = stage.solution.relative_to(ROOT)
    if not stage.solution.is_file():
        yield Problem(f"{path} is missing", "write the stage's script there, "
                      "or correct the name in workshop/stages.py")
        return
    text = stage.solution.read_text()
    try:
        ast.parse(text)
    except SyntaxError as error:
        yield Problem(f"{path}, line {error.lineno}: {error.msg}",
                      "correct the script")
        return
    if not re.search(rf'\w*Run\w*\("{stage.name}"', text):
        yield Problem(f'{path} opens no run named "{stage.name}"',
                      f'call Run("{stage.name}", ...) in main()')


def check_batch_file(stage: Stage) -> Iterator[Problem]:
    """Yield a problem unless SLURM can be given the stage."""
    paths = [path for path in sorted((ROOT / "batchfiles").glob("batch-*.sh"))
             if re.fullmatch(rf"batch-{stage.name}(-\d+n\d+g)?\.sh",
                             path.name)]
    if not paths:
        yield Problem(f"batchfiles/ has no batch-{stage.name}.sh",
                      "copy the batch file of a stage with the same launcher")
    for path in paths:
        if f"$(stage {stage.name})" not in path.read_text():
            yield Problem(f"{path.relative_to(ROOT)} starts another stage",
                          f"let it start $(stage {stage.name}), and correct "
                          "its job's name and its comments")


def check_lesson(stage: Stage) -> Iterator[Problem]:
    """Yield a problem unless the lesson leads from one solution to the next.
    """
    fix = ("each difference between the two solutions belongs to one change: "
           "correct the anchors, see workshop/diff/documents.py")
    path = stage.lesson.relative_to(ROOT)
    try:
        changes = documents.load_changes(stage.name)
        load_lesson(stage.name)
        begin = Diff(stage.name, find_stage(stage.after).solution)
        end = Diff(stage.name, stage.solution)
    except FileNotFoundError:
        yield Problem(f"{path} is missing", "write the lesson's document")
        return
    except (UserError, ValueError) as error:
        yield Problem(str(error), fix)
        return
    left = [change.number for change in begin.remaining]
    if left != [*range(1, len(changes) + 1)] or begin.other_changes:
        yield Problem(f"{path}: from the solution of {stage.after}, changes "
                      f"{left} are left, of {len(changes)}", fix)
    if end.remaining or end.other_changes:
        yield Problem(f"{path}: in its own solution changes are left", fix)
    if not any(change.predict for change in changes):
        yield Problem(f"{path}: no change asks a question", "let a change ask "
                      "one: '**Predict.** ...', and '**Answer.** ...'")
    if documents.ANCHORS_SHOWN not in stage.lesson.read_text("utf-8"):
        yield Problem(f"{path}: its introduction does not say "
                      f"'{documents.ANCHORS_SHOWN}'", "add this to a sentence "
                      "there: the lesson's page replaces it")


def check_notebook(stage: Stage) -> Iterator[Problem]:
    """Yield a problem unless a notebook shows the lesson's changes."""
    path = ROOT / "notebooks" / f"diff_{stage.name}.ipynb"
    name = path.relative_to(ROOT)
    try:
        book = json.loads(path.read_text())
        code = ["".join(cell["source"]) for cell in book["cells"]
                if cell["cell_type"] == "code"]
    except FileNotFoundError:
        yield Problem(f"{name} is missing", "copy the notebook of another "
                      "lesson, and change its text")
        return
    except (KeyError, TypeError, ValueError):
        yield Problem(f"{name} is not a notebook", "save it in JupyterLab")
        return
    if not any(f'diff("{stage.name}")' in source for source in code):
        yield Problem(f'{name} has no cell diff("{stage.name}")',
                      "add the cell: it shows what is left to change")


def check_pages(stage: Stage) -> Iterator[Problem]:
    """Yield a problem unless the pages that list the lessons have this one."""
    if f"| {stage.name} | {stage.after} | " not in (
            ROOT / "README.md").read_text("utf-8"):
        yield Problem("README.md has no row for the stage", "add one to the "
                      "table in 'The stages'; the last cell, as in '-9 +20', "
                      f"is also in the row of {stage.name} in "
                      "docs/lessons/README.md")
    if f"/notebooks/diff_{stage.name}.ipynb)" not in (
            ROOT / "docs" / "INSTRUCTOR.md").read_text("utf-8"):
        yield Problem("docs/INSTRUCTOR.md has no row for the notebook",
                      "add one to the table of minutes; the column 'more' is "
                      "for lessons that belong to no session")
    path = Path("docs", "lessons", f"{stage.name}.md")
    if not (ROOT / path).is_file():
        yield Problem(f"{path} is missing", "write it by `python -m slides "
                      "--markdown`, once all else fits")


def check_planted(stage: Stage) -> Iterator[Problem]:
    """Yield a problem unless mistakes are planted in the stage's script."""
    folder = Path("tests", "tables", "check", stage.name)
    if not any((ROOT / folder).glob("*.diff")):
        yield Problem(f"{folder} has no planted mistake", "add one that the "
                      "check must find, NAME.diff; "
                      "rankcheck/tests/rankcheck_testing/planted.py describes "
                      "its form")


def try_mistakes(stages: list[Stage]) -> int:
    """Run the check on the planted mistakes of stages; return the status."""
    planted = [stage.name for stage in stages if any(
        (ROOT / "tests" / "tables" / "check" / stage.name).glob("*.diff"))]
    require(planted, "no mistake is planted in these stages; fix: see "
            "tests/tables/check/")
    expression = " or ".join(f"{name}:" for name in planted)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "--tables",
         "tests/workshop/test_check.py", "-k", expression], cwd=ROOT,
        check=False).returncode
