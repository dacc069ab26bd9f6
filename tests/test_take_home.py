"""A stage's script made whole: python -m workshop take-home."""

import ast
from functools import partial

import pytest
from conftest import python
from pyflakes import api, messages, reporter
from stages import FOLDER, same_state, tiny, train
from test_contract import every_stage
from test_starter import packages

from backstage import ROOT
from workshop.stages import STAGES

GOLDEN = FOLDER / "golden"


def take_home(*arguments):
    return python(ROOT, "-m", "workshop", "take-home", *arguments)


@pytest.fixture
def bag(tmp_path):
    """A function that takes a stage home, into a folder of its own."""
    def take(stage):
        folder = tmp_path / "bag"
        folder.mkdir()
        file = folder / "my_train.py"
        assert take_home(stage, file).returncode == 0
        return file
    return take


@pytest.mark.parametrize("stage", every_stage())
def test_it_trains_as_the_stage_does(stage, bag, tmp_path):
    """Bit for bit, on two processes where the stage knows several."""
    file = bag(stage)
    assert not packages(file.read_text()) & {"backstage", "workshop"}
    options = {"data": GOLDEN, "mesh": STAGES[stage].meshes[:2][-1]}
    mine, ours = (train(stage, tmp_path / name, "--max-steps", 3,
                        script=script, **options)
                  for name, script in (("mine", file), ("ours", None)))
    assert mine.status == 0, mine.err
    for column in ("step", "loss", "val_loss", "lr", "norm"):
        assert mine.column(column) == ours.column(column)
    assert same_state(mine.checkpoint()["model"], ours.checkpoint()["model"])


@pytest.mark.parametrize("stage", STAGES)
def test_every_name_is_there_and_is_needed(stage, bag):
    """Also on paths that no test takes."""
    file = bag(stage)
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
    text = bag("ddp").read_text()
    script = STAGES["ddp"].solution.read_text()
    for part in script.split("\n\n\n"):
        if part.startswith("class ") and "RunFlags" not in part:
            assert part.strip() in text
    for line in script.splitlines():
        if "#" in line:
            assert line in text
    assert '"""Write all of the data to the file' in text
    assert "# NFS locks only what may be written" not in text  # nobody calls


@pytest.mark.whole
def test_it_runs_without_the_course(bag):
    file = bag("ddp")
    run = partial(python, file.parent, "-P", file.name)
    for flags in ([], ["--resume"]):
        result = run(*tiny("run", GOLDEN, "--max-steps", "3"), *flags)
        assert result.returncode == 0, result.stderr
    assert "already finished" in result.stdout
    assert {path.name for path in file.parent.iterdir()} == {
        "my_train.py", "run"}
    result = run("--max-stepz", "3")
    (line,) = result.stderr.splitlines()
    assert result.returncode == 1 and line.startswith("error: ")


def test_no_file_is_overwritten(tmp_path):
    file = tmp_path / "my_train.py"
    file.write_text("mine")
    for path, words in ((file, "name another"),
                        (tmp_path / "no" / "file.py", "could not be")):
        result = take_home("ddp", path)
        (line,) = result.stderr.splitlines()
        assert result.returncode == 1 and words in line
    assert file.read_text() == "mine"
