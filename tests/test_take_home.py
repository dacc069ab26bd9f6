"""A stage's script made whole: python -m workshop take-home."""

import ast
import os
import subprocess
import sys

import pytest
from pyflakes import api, messages, reporter
from stages import FOLDER, same_state, tiny, train
from test_contract import every_stage

from backstage import ROOT
from workshop.stages import STAGES

GOLDEN = FOLDER / "golden"


def take_home(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "workshop", "take-home", *arguments], cwd=ROOT,
        capture_output=True, text=True)


@pytest.fixture
def bag(tmp_path):
    """An empty folder."""
    folder = tmp_path / "bag"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("stage", every_stage()[:len(STAGES)])
def test_it_trains_as_the_stage_does(stage, bag, tmp_path):
    """Bit for bit, on two processes where the stage knows several."""
    file = bag / "my_train.py"
    assert take_home(stage, file).returncode == 0
    text = file.read_text()
    modules = {name.split(".")[0] for node in ast.walk(ast.parse(text))
               for name in (
                   [alias.name for alias in node.names]
                   if isinstance(node, ast.Import) else
                   [node.module] if isinstance(node, ast.ImportFrom) else [])}
    assert not modules & {"backstage", "workshop"}
    options = {"data": GOLDEN, "mesh": STAGES[stage].meshes[:2][-1]}
    mine, ours = (train(stage, tmp_path / name, "--max-steps", 6,
                        script=script, **options)
                  for name, script in (("mine", file), ("ours", None)))
    assert mine.status == 0, mine.err
    for column in ("step", "loss", "val_loss", "lr", "norm"):
        assert mine.column(column) == ours.column(column)
    assert same_state(mine.checkpoint()["model"], ours.checkpoint()["model"])


@pytest.mark.parametrize("stage", STAGES)
def test_every_name_is_there_and_is_needed(stage, bag):
    """Also on paths that no test takes."""
    file = bag / "my_train.py"
    assert take_home(stage, file).returncode == 0
    found = []

    class Reporter(reporter.Reporter):
        def flake(self, message):
            found.append(message)

    api.check(file.read_text(), "", Reporter(None, None))
    # what is a local variable in one module may be an import in another
    assert not [str(message) for message in found if not isinstance(
        message, messages.ImportShadowedByLoopVar)]
    tree = ast.parse(file.read_text())
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            assert node.name in used or node.decorator_list, node.name


def test_it_keeps_what_people_read(bag):
    file = bag / "my_train.py"
    assert take_home("ddp", file).returncode == 0
    text = file.read_text()
    script = STAGES["ddp"].solution.read_text()
    for part in script.split("\n\n\n"):
        if part.startswith("class ") and "RunFlags" not in part:
            assert part.strip() in text
    for line in script.splitlines():
        if "#" in line:
            assert line in text
    assert '"""Write all of the data to the file' in text
    assert "# NFS locks only what may be written" not in text  # nobody calls


def test_it_runs_without_the_course(bag):
    file = bag / "my_train.py"
    assert take_home("ddp", file).returncode == 0
    env = {name: value for name, value in os.environ.items()
           if name != "PYTHONPATH"}
    for flags in ([], ["--resume"]):
        result = subprocess.run(
            [sys.executable, "-P", file.name, *tiny(
                bag / "run", GOLDEN, "--max-steps", "3"), *flags],
            cwd=bag, env=env, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
    assert "already finished" in result.stdout
    assert {path.name for path in bag.iterdir()} == {"my_train.py", "run"}
    result = subprocess.run([sys.executable, file, "--max-stepz", "3"],
                            cwd=bag, env=env, capture_output=True, text=True)
    (line,) = result.stderr.splitlines()
    assert result.returncode == 1 and line.startswith("error: ")


def test_no_file_is_overwritten(bag):
    file = bag / "my_train.py"
    file.write_text("mine")
    for path, words in ((file, "name another"),
                        (bag / "no" / "file.py", "could not be written")):
        result = take_home("ddp", path)
        (line,) = result.stderr.splitlines()
        assert result.returncode == 1 and words in line
    assert file.read_text() == "mine"
