"""Each file operation fails, or is the last one before SIGKILL.

As SQLite's tests do it: the work is done in a fork whose n-th operation on the
disk fails, for each n until the work comes to its end. What is then in the
files is judged, and whether what was said is true of them.
"""

import errno
import os
import runpy
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from stages import STARTER, same_state

from backstage import files
from backstage.checkpoint import (
    list_checkpoints,
    load_checkpoint,
    write_checkpoint,
)
from backstage.errors import explain
from backstage.record import COLUMNS, RECORD, Metrics
from backstage.run import Run
from workshop.diff import backups

AUDITED = ("open", "os.rename", "os.remove", "os.link", "os.mkdir",
           "os.chmod", "os.listdir", "os.scandir", "fcntl.flock")
FAULTS = {"kill": 0, "EIO": errno.EIO, "ENOSPC": errno.ENOSPC,
          "EIO after it": errno.EIO}
OLD, NEW = b"# what was there\n" * 50, b"# what comes\n" * 90


@dataclass(frozen=True)
class End:
    """How a fork ended."""

    reached: bool  # whether there was an n-th operation
    said: str  # "" without an error, or if it was killed
    failed: bool  # by an error that was said


class Faults:
    """In a fork: lets its n-th operation below a folder fail."""

    def __init__(self, folder: Path, number: int, fault: str):
        self.folder, self.left, self.fault = str(folder), number, fault
        self.reached = False
        real_sync, real_replace = os.fsync, os.replace
        if fault == "EIO after it":  # what is audited comes before
            os.fsync = self.after(real_sync)
            os.replace = self.after(real_replace)
            return
        sys.addaudithook(self.hear)

        def sync(handle):
            self.strike("")
            real_sync(handle)

        os.fsync = sync

    def after(self, real: Callable) -> Callable:
        def call(*arguments):
            real(*arguments)
            self.strike("")

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
            faults = Faults(folder, number, fault)
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            try:
                work()
            except BaseException as error:
                said, failed = explain(error) or f"a bug: {error!r}", True
            text = f"{int(faults.reached)}{int(failed)}{said}"
            os.write(writer, text.encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        text = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert fault == "kill"
        return End(reached=True, said="", failed=False)
    return End(text[0] == "1", text[2:], text[1] == "1")


def try_all(tmp_path: Path, prepare: Callable[[Path], Callable[[], object]],
            judge: Callable[[Path, End], None]) -> int:
    """Each fault at each operation; how many there were.

    prepare: fills a folder; returns the work. judge: fails if what is there is
    wrong, or not what was said.
    """
    total = 0
    for fault in FAULTS:
        for number in count(1):
            folder = tmp_path / f"{fault}-{number}"
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


@pytest.mark.parametrize("linked", [False, True])
def test_the_working_copy(linked, tmp_path, monkeypatch):
    """What apply, reset and undo do; a second name is written through."""
    def prepare(folder):
        desk = folder / "code" / "train_gpt2.py"
        desk.parent.mkdir()
        desk.write_bytes(OLD)
        if linked:
            os.link(desk, folder / "mine.py")
        monkeypatch.setattr(backups, "DESK", desk)
        monkeypatch.setattr(backups, "FOLDER", desk.parent / "backups")

        def replace():
            with backups.locked_desk():
                backups.replace_desk(NEW, OLD)

        return replace

    def judge(folder, end):
        desk = folder / "code" / "train_gpt2.py"
        there = desk.read_bytes()
        kept = [file.read_bytes()
                for file in (folder / "code" / "backups").glob("*.py")]
        assert there in (OLD, NEW)
        assert there == OLD or OLD in kept
        agrees(end, there == NEW, existed=True)

    assert try_all(tmp_path, prepare, judge) > 15


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
