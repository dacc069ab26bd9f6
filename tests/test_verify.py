"""`verify`: scripts in others' styles, right and with mistakes, each named.

`--tables` runs all of them; without it, those that differ in kind.
"""

import os
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import edit, link_package, needs
from verify_cases import CASES, SUITE, Case, outcome, problem, read

from backstage import ROOT
from rankcheck.errors import UserError
from rankcheck.verification.command import verify

NEEDS = {"HF Trainer": ("transformers", "accelerate")}


AT_ONCE = {  # by `pytest` alone: one of each kind of question
    "DDP: right", "by hand: summed",
    "FSDP2: right", "starter resume: no optimizer"}


@pytest.mark.parametrize("case", [
    pytest.param(case, id=case.name,
                 marks=() if case.name in AT_ONCE else
                 pytest.mark.whole if case in SUITE else pytest.mark.table)
    for case in CASES])
def test_a_script(case, tmp_path):
    needs(*NEEDS.get(case.style, ()))
    status, out = outcome(case, tmp_path)
    assert not problem(case, status, out), out


@pytest.mark.parametrize("number", [-1, 1, 65, 100_000])
def test_a_number_of_processes_that_cannot_be_is_a_line(number):
    with pytest.raises(UserError, match="-n is 2 to 64"):
        verify(["train.py"], number, 4)


def test_each_process_keeps_its_gpu(tmp_path, monkeypatch, capsys):
    """As far as that can be seen without one: what the ranks are told."""
    script = tmp_path / "train.py"
    script.write_text(edit(
        read("ddp"), ("import torch\n", """\
import os
assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,7"
assert {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} < os.environ.keys()
assert "ACCELERATE_USE_CPU" not in os.environ
import torch
""")))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    with pytest.raises(UserError, match="a GPU for each of the 3 processes, "
                       "and this machine has 2"):
        verify([str(script)], 3, 2, device="gpu")
    assert verify([str(script)], 2, 2, device="gpu")
    said = capsys.readouterr().out
    assert "2 updates on the GPU" in said and "NCCL" not in said


def test_an_error_in_another_file_names_it(tmp_path):
    (tmp_path / "helper.py").write_text("def act():\n    raise OSError(1)\n")
    case = Case("DDP", "an error", ("OSError: 1 (helper.py, line 2)",), (
        ("g = torch.Gen", "import helper; helper.act()\ng = torch.Gen"),))
    status, out = outcome(case, tmp_path)
    assert not problem(case, status, out), out


@pytest.mark.whole
def test_outside_the_course(tmp_path):
    """Installed from a clone, beside torch and what that needs alone."""
    for name in ("backstage", "rankcheck", "workshop"):
        shutil.copytree(ROOT / name, tmp_path / "clone" / name)
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / "clone")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-index",
         "--no-build-isolation", "--target", tmp_path / "ours",
         tmp_path / "clone"], check=True)
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    link_package("torch", theirs)
    (tmp_path / "work").mkdir()
    shutil.copy(ROOT / "tests" / "foreign" / "ddp.py", tmp_path / "work")
    for words, says in ((["verify", "--", "ddp.py"], "0 wrong"),
                        (["why", str(os.getpid())], "of test_verify.py"),
                        (["why", "run", "--", "true"],
                         f"why {tmp_path}/.cache/workshop-why/")):
        end = subprocess.run(
            [sys.executable, "-S", "-m", "workshop", *words],
            cwd=tmp_path / "work", text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, check=False, env=os.environ | {
                "HOME": str(tmp_path),
                "PYTHONPATH": f"{tmp_path / 'ours'}:{theirs}"})
        assert says in end.stdout, end.stdout
