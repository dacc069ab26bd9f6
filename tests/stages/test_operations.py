"""Each file operation fails, or is the last one before SIGKILL.

As SQLite's tests do it: the work is done in a fork whose n-th operation on the
disk fails, for each n until the work comes to its end. What is then in the
files is judged, and whether what was said is true of them.
"""

import errno
import io
import json
import os
import re
import runpy
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import demo
import pytest
import splitfineweb
import tiktoken
import torch
from stages import STARTER, same_state

import fineweb
from backstage import dataset, files
from backstage.checkpoint import (
    list_checkpoints,
    load_checkpoint,
    write_checkpoint,
)
from backstage.errors import explain
from backstage.record import COLUMNS, RECORD, Metrics
from backstage.run import Run
from workshop.diff import backups, passed_checks, working_copy
from workshop.diff.diff import Diff
from workshop.stages import STAGES
from workshop.vocabulary import save_vocabulary

import shards
import tokenise

AUDITED = ("open", "os.rename", "os.remove", "os.link", "os.mkdir",
           "os.rmdir", "os.chmod", "os.listdir", "os.scandir", "fcntl.flock")
FAULTS = {"kill": 0, "EIO": errno.EIO, "ENOSPC": errno.ENOSPC,
          "EIO after it": errno.EIO}
OLD, NEW = b"# what was there\n" * 50, b"# what comes\n" * 90


@dataclass(frozen=True)
class End:
    """How a fork ended."""

    reached: bool  # whether there was an n-th operation
    said: str = ""  # "" without an error, or if it was killed
    failed: bool = False  # by an error that was said
    printed: str = ""  # "" if it was killed
    warned: str = ""  # on stderr
    killed: bool = False


class Faults:
    """In a fork: lets its n-th operation below a folder fail."""

    def __init__(self, folder: Path, number: int, fault: str):
        self.folder, self.left, self.fault = str(folder), number, fault
        self.reached = False
        real_sync = os.fsync
        if fault == "EIO after it":  # what is audited comes before
            os.fsync = self.after(real_sync)
            os.replace = self.after(os.replace)
            os.rename = self.after(os.rename)
            return
        sys.addaudithook(self.hear)

        def sync(handle):
            self.strike("")
            real_sync(handle)

        os.fsync = sync

    def after(self, real: Callable) -> Callable:
        def call(*arguments):
            real(*arguments)
            name = arguments[0]  # fsync has an open file
            is_path = isinstance(name, (str, os.PathLike))
            self.strike(os.fspath(name) if is_path else "")

        return call

    def hear(self, event: str, arguments: tuple) -> None:
        if event not in AUDITED:
            return
        name = arguments[0]
        if event == "fcntl.flock":
            self.strike("")
        elif isinstance(name, (str, os.PathLike)) and (
                self.folder in os.fspath(name)):
            self.strike(os.fspath(name))

    def strike(self, name: str) -> None:
        self.left -= 1
        if self.left:
            return
        self.reached = True
        if self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        number = FAULTS[self.fault]
        raise OSError(number, os.strerror(number), *[name] * bool(name))


def in_a_fork(work: Callable[[], object], folder: Path, number: int,
              fault: str) -> End:
    """Do the work with this fault; how it ended."""
    reader, writer = os.pipe()
    if not (child := os.fork()):
        try:
            said, failed = "", False
            printed, warned = io.StringIO(), io.StringIO()
            faults = Faults(folder, number, fault)
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            try:
                with redirect_stdout(printed), redirect_stderr(warned):
                    work()
            except BaseException as error:
                said, failed = explain(error) or f"a bug: {error!r}", True
            end = End(faults.reached, said, failed, printed.getvalue(),
                      warned.getvalue())
            os.write(writer, json.dumps(vars(end)).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        text = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert fault == "kill"
        return End(reached=True, killed=True)
    return End(**json.loads(text))


def try_all(tmp_path: Path, prepare: Callable[[Path], Callable[[], object]],
            judge: Callable[[Path, End], None]) -> int:
    """Each fault at each operation; how many there were.

    prepare: fills a folder; returns the work. judge: fails if what is there is
    wrong, or not what was said.
    """
    total = 0
    for fault in FAULTS:
        for number in count(1):
            folder = tmp_path / f"{fault.replace(' ', '-')}-{number}"
            folder.mkdir()
            work = prepare(folder)
            end = in_a_fork(work, folder, number, fault)
            try:
                assert not end.said.startswith("a bug"), end
                judge(folder, end)
            except (AssertionError, OSError) as error:
                raise AssertionError(
                    f"{fault} at operation {number}: {end}") from error
            shutil.rmtree(folder)
            if not end.reached:
                assert not end.failed
                break
            total += 1
    print(f"{total} faults")
    return total


@pytest.fixture(autouse=True)
def dates(monkeypatch):
    """Names with a date do not wait for the next second."""
    seconds = count()
    monkeypatch.setattr(time, "strftime", lambda form: form.replace(
        "%Y%m%d-%H%M%S", f"20260101-{next(seconds):06d}"))


def agrees(end: End, done: bool, existed: bool = False) -> None:
    """What was said is true: done: whether the new file is there."""
    if "could not be written" in end.said:
        assert not done
    if "is unchanged" in end.said:
        assert existed and not done
    if "was written, but" in end.said:
        assert done
    if not end.reached:
        assert done


def state(step: int) -> dict[str, object]:
    return {"step": step, "model": {"a": torch.full((50,), float(step))}}


@pytest.mark.whole
def test_a_checkpoint(tmp_path):
    def prepare(folder):
        for step in 1, 2:
            write_checkpoint(folder, state(step))
        return lambda: write_checkpoint(folder, state(3))

    def judge(folder, end):
        done = (folder / "step_00000003.pt").exists()
        agrees(end, done)
        found = list_checkpoints(folder)
        steps = [load_checkpoint(file)["step"] for file in found]
        assert 2 in steps and len(steps) >= 2  # one more, if one is damaged
        for file, step in zip(found, steps, strict=True):
            assert file.name == f"step_{step:08d}.pt"
            assert same_state(load_checkpoint(file)["model"],
                              state(step)["model"])
        files.remove_parts(folder)
        assert not [*folder.glob(".*")]
        if "earlier checkpoint" in end.said:
            assert "step_00000002.pt" in end.said

    assert try_all(tmp_path, prepare, judge) > 15


@pytest.mark.whole
def test_a_run_begins(tmp_path):
    """Killed or failed at any point, --resume makes it."""
    def run(folder, resume):
        it = Run("std", SimpleNamespace(run_dir=folder / "run", resume=resume),
                 None, 3, torch.device("cpu"))
        it.record = {
            "world_size": 1, "nodes": 1, "hosts": ["a"], "device": "cpu",
            "backend": "no", "scheduler": "no", "launcher": "python",
            "command": "x"}
        return it

    def prepare(folder):
        return run(folder, resume=False)._make_folder

    def judge(folder, end):
        again = run(folder, resume=True)
        again._make_folder()
        again._write_record(folder / "run")  # as restore() does
        os.close(again.lock)
        assert files.read_json(folder / "run" / RECORD, {"nodes": int})
        assert not [*(folder / "run").glob(f".*{files.PART}")]

    assert try_all(tmp_path, prepare, judge) > 10


@pytest.mark.whole
def test_the_metrics_of_a_run_that_goes_on(tmp_path):
    header = ",".join(COLUMNS) + "\n"
    rows = [f"{step},5.5,,0.01,1.5,0.25,1000,,4,1000\n" for step in range(4)]

    def prepare(folder):
        file = folder / "metrics.csv"
        file.write_text(header + "".join(rows))

        def go_on():
            metrics = Metrics(file, 3)
            metrics.add(dict.fromkeys(COLUMNS, 1) | {"step": 3})
            metrics.sync()

        return go_on

    def judge(folder, end):
        text = "".join(file.read_text()
                       for file in folder.glob("metrics*.csv"))
        for row in rows:
            assert row.rstrip(",\n") in text
        again = Metrics(folder / "metrics.csv", 3)
        again.file.close()
        assert "".join(
            file.read_text() for file in folder.glob("metrics*.csv")
        ).count("\n") >= 4

    assert try_all(tmp_path, prepare, judge) > 10


@pytest.mark.whole
@pytest.mark.parametrize("linked", [False, True])
def test_the_working_copy(linked, tmp_path, monkeypatch):
    """What apply, reset and undo do; a second name is written through."""
    def prepare(folder):
        script = folder / "code" / "train_gpt2.py"
        script.parent.mkdir()
        script.write_bytes(OLD)
        if linked:
            os.link(script, folder / "mine.py")
        monkeypatch.setattr(backups, "WORKING_COPY", script)
        monkeypatch.setattr(backups, "BACKUPS", script.parent / "backups")

        def replace():
            with backups.lock_working_copy():
                backups.replace_working_copy(NEW, OLD)

        return replace

    def judge(folder, end):
        script = folder / "code" / "train_gpt2.py"
        there = script.read_bytes()
        kept = [file.read_bytes()
                for file in (folder / "code" / "backups").glob("*.py")]
        assert there in (OLD, NEW)
        assert there == OLD or OLD in kept
        agrees(end, there == NEW, existed=True)

    assert try_all(tmp_path, prepare, judge) > 15


@dataclass(frozen=True)
class Command:
    """What an attendee types, and what it makes of the working copy."""

    type: Callable[[], None]
    before: bytes
    after: bytes
    done: str  # what it prints first, once it is done


STD, DDP = (STAGES[name].solution.read_bytes() for name in ("std", "ddp"))
OLDER, EARLIER = b"# the oldest\n", b"# what was there before\n"
COMMANDS = {
    "apply": Command(
        lambda: working_copy.apply_changes("ddp"), STD, DDP, "made change 1"),
    "reset": Command(
        lambda: working_copy.reset_to("ddp"), STD, DDP, "is now ddp"),
    "undo": Command(
        working_copy.restore_previous, STD, EARLIER,
        "is now 20251231-000001-3"),
    "date": Command(
        lambda: working_copy.reset_to("20251231-000000-2"), STD, OLDER,
        "is now 20251231-000000-2"),
}


@pytest.fixture
def use_working_copy(monkeypatch):
    """A function: a folder has the working copy, and earlier ones."""
    def use_working_copy(folder: Path, data: bytes) -> Path:
        script = folder / "code" / "train_gpt2.py"
        kept = script.parent / "backups"
        kept.mkdir(parents=True)
        script.write_bytes(data)
        (kept.parent / "train_gpt2.20251230-000000.py").write_bytes(b"# 1\n")
        (kept / "20251231-000000-2.py").write_bytes(OLDER)
        (kept / "20251231-000001-3.py").write_bytes(EARLIER)
        for module in backups, working_copy:
            monkeypatch.setattr(module, "WORKING_COPY", script)
        monkeypatch.setattr(backups, "BACKUPS", kept)
        monkeypatch.setattr(Diff.__init__, "__defaults__", (script, None))
        return script

    return use_working_copy


def kept_in(script: Path) -> dict[str, bytes]:
    """The earlier versions of a working copy."""
    return {file.name: file.read_bytes()
            for file in script.parent.glob("**/*.py") if file != script}


@pytest.mark.whole
@pytest.mark.parametrize("name", COMMANDS)
def test_apply_reset_and_undo(name, tmp_path, use_working_copy):
    command = COMMANDS[name]
    Diff("ddp", data=STD)  # it reads the lesson once

    def prepare(folder):
        use_working_copy(folder, command.before)
        return command.type

    def judge(folder, end):
        script = folder / "code" / "train_gpt2.py"
        there, kept = script.read_bytes(), kept_in(script)
        assert there in (command.before, command.after)
        done = there == command.after
        assert not done or command.before in kept.values()
        assert {OLDER, EARLIER} < {*kept.values()}
        agrees(end, done, existed=True)
        if not end.killed:
            assert done == (command.done in end.printed
                            or "was written, but" in end.said)
        for named in re.findall("(?<=previous version: )[^ \n]+",
                                end.printed):
            assert Path(named).read_bytes() == command.before
        with redirect_stdout(None):
            working_copy.restore_previous()  # to what was there
        assert script.read_bytes() == command.before if done else (
            script.read_bytes() in (OLDER, EARLIER))
        if not end.reached:
            assert done

    assert try_all(tmp_path, prepare, judge) > 15


@pytest.mark.whole
def test_what_has_passed_the_check(tmp_path, use_working_copy, monkeypatch):
    """The record of other stages stays, or a warning says which is lost."""
    def prepare(folder):
        script = use_working_copy(folder, STD)
        monkeypatch.setattr(passed_checks, "PASSED_FILE",
                            script.parent / ".checked.json")
        passed_checks.record("mpi", OLD)
        return lambda: passed_checks.record("ddp", NEW)

    def judge(folder, end):
        assert not end.failed  # the check itself has passed
        assert passed_checks.has_passed("mpi", OLD)
        done = passed_checks.has_passed("ddp", NEW)
        if not end.killed:
            assert done != ("this check is not recorded" in end.warned)
        files.remove_parts(folder / "code")
        assert not [*(folder / "code").glob(f".*{files.PART}")]

    assert try_all(tmp_path, prepare, judge) > 10


@pytest.mark.whole
def test_the_starter(tmp_path):
    """One file without a word for each error: what is there counts."""
    starter = runpy.run_path(str(STARTER))
    fixed = {"minibatch_size": 1, "seed": 1}
    header = starter["COLUMNS"].encode() + b"\n"
    rows = [b"%d,1,,1,1,1,1\n" % step for step in range(3)]

    def write(folder, step):
        torch.save({**state(step), "fixed": fixed, "optimizer": {}},
                   folder / f"checkpoints/step_{step:08d}.pt")

    def prepare(folder):
        run = folder / "run"
        (run / "checkpoints").mkdir(parents=True)
        (run / "metrics.csv").write_bytes(header + b"".join(rows))
        for step in 1, 2:
            write(run, step)

        def go_on():
            try:
                found, problem = starter["open_run"](run, fixed, True)
                if problem:
                    raise OSError(errno.EIO, problem)
                starter["open_metrics"](run / "metrics.csv", 2).close()
                model = torch.nn.Linear(2, 2)
                starter["save"](run, 3, fixed, model, torch.optim.SGD(
                    model.parameters()), found)
            except OSError as error:  # a traceback, and status 1
                error.filename = error.filename or "it"
                raise

        return go_on

    def judge(folder, end):
        run = folder / "run"
        found, problem = starter["open_run"](run, fixed, True)
        assert not problem and found[-1].name >= "step_00000002.pt"
        if not end.reached:
            assert found[-1].name == "step_00000003.pt"
        text = b"".join(file.read_bytes() for file in run.glob("metrics*.csv"))
        assert all(row in text for row in rows)
        assert (run / "metrics.csv").read_bytes().startswith(
            header + b"".join(rows[:2]))

    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        (tmp_path / "first").mkdir()  # what torch imports late is there then
        prepare(tmp_path / "first")()
        assert try_all(tmp_path, prepare, judge) > 20
    finally:
        torch.distributed.destroy_process_group()


WORDS = ["Each shard is written whole. " * 4, "Or it is not there. " * 9]


def make_demo(folder: Path) -> None:
    """Write a vocabulary, two shards and a manifest, as demo.py does."""
    demo.write(folder / "out", {"files": "here"}, WORDS, WORDS[1:],
               demo.character_vocabulary("".join(sorted({*"".join(WORDS)}))))


def make_shards(folder: Path) -> None:
    """Write three shards, the manifest after each, as fineweb.py does."""
    with fineweb.alone(folder / "out"):
        files.remove_parts(folder / "out")
        flags = fineweb.Flags(
            str(folder / "text"), files="*.txt", shard_size=130,
            out=folder / "out", vocabulary=folder / "vocabulary")
        made = fineweb.begin(flags)
        if made["complete"]:
            return
        encoding = dataset.load_vocabulary(flags.out)
        encode = tokenise.Encoder(encoding)
        fineweb.build(flags.out, made, encoding, (
            (batch, encode(batch.texts)) for batch in fineweb.read_all(made)))


def split_shards(folder: Path) -> None:
    """Write each shard of a folder in two parts, as splitfineweb.py does."""
    sys.argv = ["splitfineweb.py", str(folder / "there"), "--parts", "2",
                "--out", str(folder / "out")]
    splitfineweb.main()


@dataclass(frozen=True)
class Builder:
    """A program that makes a dataset's folder."""

    make: Callable[[Path], None]
    appears_whole: bool  # else it grows by whole files


BUILDERS = {
    "demo": Builder(make_demo, True),
    "fineweb": Builder(make_shards, False),
    "split": Builder(split_shards, True),
}


@pytest.fixture
def sources(tmp_path):
    """A function that fills a folder with what the builders read."""
    first = tmp_path / "sources"
    (first / "text").mkdir(parents=True)
    (first / "text" / "all.txt").write_text("\n<|endoftext|>\n".join(WORDS))
    small = tiktoken.Encoding(
        "small", pat_str=tokenise.GPT2_SPLITS[0], mergeable_ranks={
            bytes([byte]): byte for byte in range(256)},
        special_tokens={dataset.END_OF_TEXT: 256})
    (first / "vocabulary").mkdir()
    save_vocabulary(small, first / "vocabulary")
    make_demo(first)
    (first / "out").rename(first / "there")
    return lambda folder: shutil.copytree(first, folder, dirs_exist_ok=True)


@pytest.mark.whole
@pytest.mark.parametrize("name", BUILDERS)
def test_a_dataset(name, tmp_path, sources, monkeypatch):
    """Made again after any fault, it is what an undisturbed one is."""
    builder = BUILDERS[name]
    monkeypatch.setattr(sys, "argv", sys.argv)  # to have it back

    def make(folder: Path) -> dict[str, bytes]:
        builder.make(folder)
        return {path.name: path.read_bytes().replace(bytes(folder), b"")
                for path in (folder / "out").iterdir()}

    sources(tmp_path / "whole")
    whole = make(tmp_path / "whole")
    assert len(whole) > 4

    def prepare(folder):
        sources(folder)
        return lambda: builder.make(folder)

    def judge(folder, end):
        out = folder / "out"
        there = {path.name for path in out.glob("[!.]*")}
        done = there == {*whole}
        for shard in out.glob("[!.]*.npy"):
            assert shard.read_bytes() == whole[shard.name]
        if builder.appears_whole:
            assert done or not out.exists()
        for line, right in (
                ("could not be written", False), ("was written, but", True)):
            for file in re.findall(f"^(\\S+) {line}", end.said):
                assert Path(file).exists() == (
                    right or "is unchanged" in end.said)
        if not end.killed:
            assert end.failed or done
            assert not (done and "could not be made" in end.said)
        if done and builder.appears_whole:
            shards.remove_abandoned(out)  # as the next one does
        else:
            with redirect_stdout(None):
                assert make(folder) == whole
        assert {*os.listdir(folder)} == {
            "text", "vocabulary", "there", "out"}, "a trace is left"

    assert try_all(tmp_path, prepare, judge) > 20
