"""`why` about flight-recorder dumps: PyTorch's own, of ranks that wait."""

import json
import os
import pickle
import re
import subprocess
import sys

import pytest

from rankcheck.engine.ranks import Launch
from rankcheck.system.errors import UserError
from rankcheck.why import dumps
from rankcheck_testing.support import SOURCE_PATH, program, python

# Each rank dumps what it has called, while it waits, and leaves
SCRIPT = """\
import os, sys, threading, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
def leave():
    time.sleep(1.5)
    record = torch._C._distributed_c10d._dump_fr_trace(True, True, False)
    with open(f"dump_{rank}", "wb") as file:
        file.write(record)
    time.sleep(1)
    os._exit(0)
threading.Thread(target=leave, daemon=True).start()
one = torch.ones(4)
pair = dist.new_group([1, 2])
dist.all_reduce(one)
"""
FAULTS = {  # what is waited in, what is said, the ranks, whether it is proven
    "another operation": (
        "dist.broadcast(one, 0) if rank == 2 else dist.all_reduce(one)",
        "collective 2 of group 0: the operation differs: broadcast of "
        r"\[\[4\]\] Float on rank 2 \(.*train.py, line 17\), all_reduce of "
        r"\[\[4\]\] Float on ranks 0, 1 ", [2], True),
    "a rank does not come": (
        "time.sleep(9) if rank == 1 else dist.all_reduce(one)",
        r"ranks 0, 2 wait in collective 2 of group 0, .*; rank 1 has not "
        r"called it; the last one of rank 1 is 1, all_reduce \(.*line 16\)",
        [1], False),
    "in a group": (
        "dist.all_reduce(one, group=pair) if rank == 1 else time.sleep(9)",
        "rank 1 waits in collective 1 of group 1, .*; which other ranks are "
        "in that group is not recorded", [], False),
    "nothing": ("time.sleep(9)", "", [], False)}


def leave_dumps(folder, line):
    """The dumps of three ranks that have come to this line."""
    script = program(folder / "train.py", f"{SCRIPT}{line}\ntime.sleep(9)\n")
    Launch(script, world_size=3, cwd=str(folder)).wait(60)
    files = dumps.find_files(str(folder))
    assert [*files] == [0, 1, 2]
    return [dumps.load_dump(*item) for item in files.items()]


@pytest.mark.parametrize("name", [
    "another operation", *(pytest.param(name, marks=pytest.mark.whole)
                           for name in list(FAULTS)[1:])])
def test_ranks_that_wait(name, tmp_path):
    line, words, ranks, proven = FAULTS[name]
    found = dumps.judge_dumps(leave_dumps(tmp_path, line))
    assert len(found) == bool(words)
    for one in found:
        assert re.match(words, one.text), one.text
        assert one.ranks == ranks and bool(one.kind) == proven
    words = "-m", "rankcheck", "why", tmp_path
    end = python(tmp_path, *words, PYTHONPATH=SOURCE_PATH)
    assert end.returncode == proven and not end.stderr, end
    assert all(one.text in end.stdout for one in found)
    document = json.loads(python(
        tmp_path, *words, "--json", PYTHONPATH=SOURCE_PATH).stdout)
    assert document["status"] == proven
    assert document["blamed"] == ranks


def as_nccl(folder, change=lambda rank, value: None):
    """Let dumps of gloo have the names of NCCL's. Gloo's do not name their
    groups, and PyTorch's own tool cannot read them.
    """
    for file in folder.glob("dump_*"):
        value = pickle.loads(file.read_bytes())
        value["pg_config"] = {"0": {
            "name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]"}}
        if file.name != "dump_0":
            value["pg_config"]["1"] = {
                "name": "1", "desc": "undefined", "ranks": "[1, 2]"}
        for entry in value["entries"]:
            entry["profiling_name"] = entry["profiling_name"].replace(
                "gloo", "nccl")
        change(int(file.name[-1]), value)
        file.write_bytes(pickle.dumps(value))


def ask_torch(folder):
    """What torchfrtrace prints."""
    end = subprocess.run(
        [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace",
         "--prefix", "dump_", str(folder)], capture_output=True, text=True)
    assert end.returncode == 0, end.stderr
    return end.stdout + end.stderr


@pytest.mark.whole
@pytest.mark.parametrize(("name", "ours", "theirs"), [
    ("another operation", [2], "Culprit rank 2; .*COLLECTIVE_TYPE_MISMATCH"),
    ("a rank does not come", [1], r"missing ranks: \{1\}"),
    ("in a group", [2], r"missing ranks: \{2\}"), ("nothing", [], "")])
def test_torchs_own_tool_agrees(name, ours, theirs, tmp_path):
    leave_dumps(tmp_path, FAULTS[name][0])
    as_nccl(tmp_path)
    files = dumps.find_files(str(tmp_path))
    found = dumps.judge_dumps(
        [dumps.load_dump(*item) for item in files.items()])
    assert [one.ranks for one in found] == ([ours] if ours else [])
    said = ask_torch(tmp_path)
    if theirs:
        assert re.search(theirs, said), said
    else:
        assert "Culprit" not in said and "missing ranks" not in said


def add_messages(folder, *names, **change):
    """Let the ranks have sent or received something, as NCCL records it: gloo
    records no messages.

    names: of what each rank has called, "" for nothing.
    """
    def add(rank, value):
        last = value["entries"][-1]
        for name in filter(None, names[rank].split(", ")):
            value["entries"].append({
                **last, "profiling_name": f"nccl:{name}", "is_p2p": True,
                "retired": False, "p2p_seq_id": 1, **change})

    as_nccl(folder, add)
    files = dumps.find_files(str(folder))
    return dumps.judge_dumps(
        [dumps.load_dump(*item) for item in files.items()])


@pytest.mark.whole
def test_messages(tmp_path):
    leave_dumps(tmp_path, "time.sleep(9)")
    found, = add_messages(tmp_path, "send 0->1", "recv 1<-2", "")
    assert re.fullmatch(
        r"rank 0 waits in send of group 0, to rank 1 \(.*\); no recv of rank "
        r"1 waits for it, which waits in recv \(.*\)", found.text), found.text
    assert found.ranks == [1] and not found.kind


@pytest.mark.whole
def test_a_message_to_a_rank_that_nobody_knows(tmp_path):
    leave_dumps(tmp_path, "time.sleep(9)")
    found, = add_messages(tmp_path, "send 0->7", "", "")
    assert found.text.endswith("rank 7 has left no dump")
    assert found.ranks == [7]


@pytest.mark.whole
def test_messages_that_are_sent_together(tmp_path):
    """NCCL adds an entry for all of them, which has no counterpart."""
    leave_dumps(tmp_path, "time.sleep(9)")
    assert not add_messages(
        tmp_path, "send 0->1, recv 0<-1, coalesced",
        "recv 1<-0, send 1->0, coalesced", "")


@pytest.mark.whole
def test_collectives_that_are_started_together(tmp_path):
    """They share a number. A rank whose last entry lacks is no mismatch."""
    leave_dumps(tmp_path, "time.sleep(9)")

    def add(rank, value):
        last = {**value["entries"][-1], "collective_seq_id": 2}
        parts = [last | {"profiling_name": "nccl:_all_gather_base",
                         "retired": False}] * 2
        end = last | {"profiling_name": "nccl:coalesced"}
        value["entries"] += [*parts, end] if rank < 2 else parts

    as_nccl(tmp_path, add)
    files = dumps.find_files(str(tmp_path))
    found, = dumps.judge_dumps(
        [dumps.load_dump(*item) for item in files.items()])
    assert not found.kind and found.text.startswith(
        "rank 2 waits in collective 2 of group 0, _all_gather_base of ")


@pytest.mark.whole
def test_groups_of_one_name_on_other_ranks(tmp_path):
    """They are two groups: their collectives are not compared."""
    leave_dumps(tmp_path, "time.sleep(9)")

    def split(rank, value):
        last = value["entries"][-1]
        ranks = "[0]" if rank == 0 else "[1, 2]"
        value["pg_config"]["5"] = {"name": "5", "desc": "", "ranks": ranks}
        name = "nccl:broadcast" if rank == 0 else "nccl:all_reduce"
        value["entries"].append({
            **last, "process_group": ("5", ""), "profiling_name": name})

    as_nccl(tmp_path, split)
    files = dumps.find_files(str(tmp_path))
    read = [dumps.load_dump(*item) for item in files.items()]
    assert {call.group.ranks for call in read[0].calls[-1:]} == {(0,)}
    assert not dumps.judge_dumps(read)


@pytest.mark.whole
@pytest.mark.parametrize(("name", "differs"), [
    ("all_reduce", True), ("all_gather", False), ("broadcast", True),
    ("all_to_all_single", False), ("reduce_scatter", False)])
def test_sizes_that_may_differ(name, differs, tmp_path):
    """NCCL gathers and scatters lists of tensors of several sizes."""
    leave_dumps(tmp_path, "time.sleep(9)")

    def grow(rank, value):
        value["entries"][-1] |= {
            "profiling_name": f"nccl:{name}", "retired": False,
            "input_sizes": [[4 + rank]], "output_sizes": [[4 + rank]]}

    as_nccl(tmp_path, grow)
    files = dumps.find_files(str(tmp_path))
    found, = dumps.judge_dumps(
        [dumps.load_dump(*item) for item in files.items()])
    assert bool(found.kind) == differs, found.text
    assert ("the sizes differ" in found.text) == differs


def test_evidence_comes_first(tmp_path):
    """A folder that `why run` has written to may hold pickles of a script."""
    script = program(tmp_path / "script.py", "print('done')\n")
    folder = tmp_path / "why"
    python(tmp_path, "-m", "rankcheck", "why", "run", "--", sys.executable,
           script, PYTHONPATH=SOURCE_PATH, RANKCHECK_WHY=str(folder))
    (folder / "state_0").write_bytes(pickle.dumps([1]))
    end = python(tmp_path, "-m", "rankcheck", "why", folder,
                 PYTHONPATH=SOURCE_PATH)
    assert end.returncode == 0 and "all ranks have ended" in end.stdout, end


def test_a_fifo_is_no_dump(tmp_path):
    """Opening it would wait for a writer."""
    os.mkfifo(tmp_path / "dump_0")
    assert dumps.find_files(str(tmp_path)) == {}


@pytest.mark.parametrize("content", [
    b"", b"\x80", b"\x80\x04}.", pickle.dumps(UserError), pickle.dumps([1])])
def test_what_is_no_dump(content, tmp_path):
    """It is one line; nothing in it is called."""
    (tmp_path / "dump_0").write_bytes(content)
    if not content:
        assert not dumps.find_files(str(tmp_path))
        return
    end = python(tmp_path, "-m", "rankcheck", "why", tmp_path / "dump_",
                 PYTHONPATH=SOURCE_PATH)
    assert end.returncode == 2 and end.stderr.count("\n") == 1, end
    assert "is not a flight-recorder dump" in end.stderr


def test_several_sets_are_named(tmp_path):
    for name in "one_0", "two_0":
        (tmp_path / name).write_bytes(b"\x80")
    with pytest.raises(UserError, match=r"several sets of dumps; fix: name "
                       r"one of .*/one_, .*/two_"):
        dumps.find_files(str(tmp_path))
