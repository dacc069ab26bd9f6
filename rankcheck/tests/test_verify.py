"""`verify`: scripts in others' styles, right and with mistakes, each named.

`--tables` runs all of them; without it, those that differ in kind.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import rankcheck
from rankcheck.system.errors import UserError
from rankcheck.verification import program
from rankcheck.verification.command import verify
from rankcheck_testing.planted import load
from rankcheck_testing.support import HOUSE, edit, link_package, needs
from rankcheck_testing.verify_cases import (
    CASES,
    STYLES,
    TABLES,
    find_needs,
    make_params,
    outcome,
    problem,
    problem_in_first_line,
    read,
)

AT_ONCE = {  # by `pytest` alone: one of each kind of question
    "DDP: right", "by hand: summed", "FSDP2: right"}


@pytest.mark.parametrize("case", make_params(CASES, AT_ONCE))
def test_a_script(case, tmp_path):
    needs(*find_needs(case))
    found = outcome(case, tmp_path)
    assert not problem(case, found), found.out


def test_the_places_of_the_changes_are_there():
    assert CASES and all(case.script() for case in CASES)
    assert {*STYLES} <= {case.group for case in CASES}


def test_each_style_has_a_right_script_and_a_mistake():
    """Else nothing shows that a mistake is seen in scripts of this style."""
    styles = {}
    for case in CASES:
        styles.setdefault(case.path.parent.name, set()).add(case.right)
    assert not [style for style, kinds in styles.items()
                if kinds != {True, False}]


def test_what_is_found_instead_is_named_by_its_kind(tmp_path):
    """As the first line of a case has it."""
    case = load(TABLES / "verify" / "by-hand" / "summed.diff", TABLES)
    case = replace(case, says=("FAIL other-kind",))
    found = outcome(case, tmp_path)
    assert problem(case, found).startswith(
        "not found: FAIL other-kind; found: FAIL ")


def test_the_first_lines_of_the_cases_are_of_the_form(tmp_path):
    problems = filter(None, map(problem_in_first_line, CASES))
    assert not list(problems)
    for line, says in (("rihgt: ok batch-size", "`right` or `wrong` first"),
                       ("right hole: ok batch-size", "none but"),
                       ("wrong: ", "names no finding"),
                       ("wrong: FAIL", "'FAIL' is not of the form"),
                       ("right: perhaps warn rank 1", "'warn rank 1' is not")):
        (tmp_path / "case.diff").write_text(f"{line}\n--- x.py\t2026\n")
        case = load(tmp_path / "case.diff", tmp_path)
        assert says in problem_in_first_line(case) and case.base.name == "x.py"


@pytest.mark.parametrize("number", [-1, 1, 65, 100_000])
def test_a_number_of_processes_that_cannot_be_is_a_line(number):
    with pytest.raises(UserError, match="-n must be 2 to 64"):
        verify(["train.py"], number, 4)


@pytest.mark.parametrize("seconds", [-1, 0, float("nan")])
def test_a_patience_that_cannot_be_is_a_line(seconds):
    with pytest.raises(UserError, match="--patience must be"):
        verify(["train.py"], 2, 4, patience=seconds)


PACKAGE = {"theirs/__init__.py": "", "theirs/data.py": "WIDTH = 900\n",
           "theirs/train.py": edit(
               read("ddp"), ("import torch\n", "import torch\n"
                             "from .data import WIDTH\n"),
               ("nn.Linear(900", "nn.Linear(WIDTH"))}


@pytest.mark.whole
@pytest.mark.parametrize("words", [
    "-m theirs.train", "python -u -m theirs.train",
    "torchrun --nproc-per-node 2 -m theirs.train --flag",
    "accelerate launch --mixed_precision no -m theirs.train"])
def test_a_module_of_a_package(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "theirs").mkdir()
    for name, text in PACKAGE.items():
        (tmp_path / name).write_text(text)
    found = program.read_program(["--", *words.split()])
    assert (found.module, found.script) == (
        "theirs.train", tmp_path / "theirs/train.py")
    assert found.flags == ("--flag",) * ("--flag" in words)
    if words.startswith("torchrun"):
        assert verify(words.split(), 2, 2).ok


@pytest.mark.parametrize(("words", "says"), [
    ("", "no script is named"), ("nowhere.py", "nowhere.py does not exist"),
    ("fifo.py", "fifo.py is not a file"), ("-m nowhere.at", "module nowhere"),
    ("-c pass", "cannot run -c"), ("env -i python x.py", "env is a program"),
    ("/usr/bin/env python x.py", "env is a program"),
    ("./x.sh 1", "x.sh is a program"), ("env.py 1", "1"), ("ls 1", "1"),
    ("torchrun x", "found behind torchrun"),
    ("deepspeed x.py --x", "--local_rank={rank} --x"),
    ("python3.11 x.py 1", "1"), ("x.py --x", "--x"),
    ("torchrun x.py -- 1 -- 2", "1 -- 2"), ("-- x.py -- --x", "-- --x")])
def test_what_is_typed(words, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo.py")
    for name in "x.py", "env.py", "ls":  # which a program is called, too
        (tmp_path / name).touch()
    (tmp_path / "x.sh").write_text("#!/bin/sh\n")
    (tmp_path / "x.sh").chmod(0o755)
    if says.startswith(("1", "--")):
        assert program.read_program(words.split()).flags == tuple(says.split())
    else:
        with pytest.raises(UserError, match=re.escape(says)) as error:
            program.read_program(words.split())
        assert "\n" not in str(error.value)


@pytest.mark.whole
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
                       "but this machine has 2"):
        verify([str(script)], 3, 2, device="gpu")
    assert verify([str(script)], 2, 2, device="gpu").ok
    said = capsys.readouterr().out
    assert "on the GPU" in said and "NCCL" not in said


@pytest.mark.whole
def test_an_error_in_another_file_names_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("helper.py").write_text("def act():\n    raise OSError(1)\n")
    Path("train.py").write_text(edit(read("ddp"), (
        "g = torch.Gen", "import helper; helper.act()\ng = torch.Gen")))
    assert verify(["train.py"], 2, 4).status == 1
    assert "OSError: 1 (helper.py, line 2)" in capsys.readouterr().out


COURSE = re.compile(r"workshop|lesson|stage|course|activate\.sh|GPT-?2|"
                    "backstage|notebook", re.IGNORECASE)
README = (HOUSE / "README.md").read_text()


@pytest.fixture(scope="module")
def stranger(tmp_path_factory):
    """A function that runs a command where torch, pytest and the wheel are
    installed, and nothing else: its status, what it prints, its errors.
    """
    needs("pip", "setuptools")
    top = tmp_path_factory.mktemp("theirs")
    before = {*HOUSE.rglob("*")}
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-index", "--no-deps",
         "--no-build-isolation", "-w", top, HOUSE], check=True)
    assert {path for path in {*HOUSE.rglob("*")} - before
            if "__pycache__" not in str(path)} == set()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip",
                    top / "venv"], check=True)
    site, = top.glob("venv/lib/python*/site-packages")
    link_package("torch", site)
    link_package("pytest", site)
    wheel, = top.glob("*.whl")
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", top / "venv/bin/python",
         "install", "-q", "--no-index", wheel], check=True)
    (top / "work").mkdir()

    def run(*words):
        end = subprocess.run(
            words, cwd=top / "work", text=True, capture_output=True,
            check=False, env={"HOME": str(top), "OMP_NUM_THREADS": "1",
                              "PATH": f"{top}/venv/bin:/usr/bin:/bin"})
        assert not COURSE.search(end.stdout + end.stderr), end
        return end

    run.work = top / "work"
    return run


WRONG = edit(read("ddp"), ("sampler=sampler)", "shuffle=False)"),
             ("    sampler.set_epoch(epoch)\n", ""))
DIES = edit(read("ddp"), ("    for x, y in loader:\n", """\
    for number, (x, y) in enumerate(loader):
        if rank == 1 and number == 3:
            raise ValueError(f"no sample {number}")
"""))
UNSEEDED = edit(read("ddp"), ("torch.Generator().manual_seed(0)", "None"))
IDLE = "import time\ntime.sleep(99)\n"


def readme_says(command):
    """The lines that it shows for a command, without those that are left out.
    """
    _, shown = README.split(f"$ rankcheck {command}\n")
    return [line for line in re.split(r"\n(?:```|\$)", shown)[0].split("\n")
            if line.strip() not in ("", "...")]


@pytest.mark.whole
def test_a_stranger_verifies(stranger):
    """As the README has it. Without NumPy, torch's warning of that is its own
    matter.
    """
    (stranger.work / "train.py").write_text(WRONG)
    end = stranger("rankcheck", "verify", "-n", "2", "--", "train.py")
    assert end.returncode == 1 and not end.stderr, end
    for line in readme_says("verify -n 2 -- train.py --its-flags"):
        assert f"{line}\n" in end.stdout, (line, end)
    for command in "verify", "why":
        assert not stranger("rankcheck", command, "--help").returncode
    assert stranger("rankcheck", "--version").stdout == (
        f"rankcheck {rankcheck.__version__}\n")


@pytest.mark.whole
def test_an_older_torch_is_named(stranger):
    """Before it is imported: nothing of it may work here."""
    (stranger.work / "train.py").touch()
    old = stranger.work / "torch-2.4.1+cu121.dist-info"
    old.mkdir()
    (old / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch\nVersion: 2.4.1+cu121\n")
    end = stranger("python", "-m", "rankcheck", "verify", "--", "train.py")
    shutil.rmtree(old)
    assert end.returncode == 2 and end.stderr == (
        "error: PyTorch 2.4.1+cu121 is older than 2.11, which rankcheck "
        "needs; fix: install a newer one\n"), end


@pytest.mark.whole
def test_a_stranger_asks_why(stranger):
    (stranger.work / "train.py").write_text(DIES)
    start = stranger(
        "rankcheck", "why", "run", "--", "python", "-m",
        "torch.distributed.run", "--nproc-per-node", "2", "train.py")
    assert start.returncode == 1, start
    begin, folder = start.stderr.splitlines()[0].rsplit(" ", 1)
    end = stranger("rankcheck", "why")
    assert end.returncode == 1, end
    shown = [begin + " ", *readme_says("why")]
    shown[1:2] = [f"last start: {folder}"]
    first = "was the first to end"  # unless rank 0 has lost it even earlier
    out = (start.stderr + end.stdout).replace(first, "ended")
    for line in shown:
        assert line.replace(first, "ended") in out, (line, start, end)
    none = stranger("rankcheck", "why", "nowhere")
    assert none.returncode == 2 and none.stderr.count("\n") == 1, none
    assert "no such folder" in none.stderr, none


@pytest.mark.whole
@pytest.mark.parametrize(("script", "status"), [
    (read("ddp"), 0), (DIES, 1), (WRONG, 1), ("", 1), (IDLE, 2), ("1 +", 2),
    (UNSEEDED, 2), (None, 2)], ids=[
        "right", "dies", "wrong", "does nothing", "waits", "no Python",
        "not compared", "not there"])
def test_a_stranger_reads_the_json_document(script, status, stranger):
    (file := stranger.work / "train.py").unlink(missing_ok=True)
    if script is not None:
        file.write_text(script)
    end = stranger("rankcheck", "verify", "--json", "--patience",
                   "4" if script == IDLE else "60", "--", "train.py", "-x")
    document = json.loads(end.stdout)
    assert end.returncode == document["status"] == status, end
    assert (document["schema"], document["script"], document["flags"]) == (
        4, "train.py", ["-x"])
    assert (document["error"] is None) == (status < 2), document
    assert f"error: {document['error']}\n" * (status == 2) == end.stderr
    failed = [finding for finding in document["findings"]
              if finding["verdict"] == "FAIL"]
    assert bool(failed) == (status == 1)
    pages = README.split("`rankcheck why --json`")[0]
    for table in pages.split("| field | what it is |")[1:]:
        names = re.findall(r"[a-z_]+", " ".join(re.findall(
            r"^\| ([a-z_, ]+) \|", table, re.MULTILINE)))
        for place in (document, *document["findings"]):
            if names[0] in place:
                assert sorted(names) == sorted(place)
    if script == DIES:
        assert failed[0]["ranks"] == [1]
        assert failed[0]["places"] == [{"file": "train.py", "line": 24}]
    if script == WRONG:
        assert failed[0]["kind"] == "same-samples"


@pytest.mark.whole
def test_a_strangers_tests(stranger):
    """The README's, of scripts that are right, wrong and not there."""
    code = re.search("```python\n(.*?)```", README, re.DOTALL)[1]
    for name, script in (("right", read("ddp")), ("wrong", WRONG),
                         ("unseeded", UNSEEDED), ("no", "")):
        if script:
            (stranger.work / f"{name}.py").write_text(script)
        (stranger.work / f"test_{name}.py").write_text(edit(
            code, ("train.py", f"{name}.py")))
    end = stranger("python", "-m", "pytest", "-q")
    assert {*re.findall(r"^FAILED test_(\w+)\.py", end.stdout, re.M)} == {
        "wrong", "unseeded", "no"} and "1 passed" in end.stdout, end.stdout
