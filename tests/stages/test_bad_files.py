"""Files and flags that nobody would think of: right, or one line.

Whatever is in a file, its reader returns what is right or raises `UserError`.
The examples are what once ended with a traceback, a hang or a crash.
"""

import argparse
import base64
import contextlib
import gzip
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from conftest import program
from huggingface import import_folder
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from stages import (
    BYTES,
    GOLDEN,
    attempt,
    make_dataset,
    refused,
    same_state,
    train,
)
from trained import load_trained

from backstage import ROOT, dataset
from backstage.checkpoint import (
    FORMAT,
    check_fit,
    gather_state,
    load_checkpoint,
    outline,
    spread_state,
    write_checkpoint,
)
from backstage.errors import UserError
from backstage.files import Damaged, reading
from backstage.flags import parse
from backstage.record import COLUMNS, RECORD, Metrics
from rankcheck.engine import scratch
from rankcheck.engine.ranks import launch
from rankcheck.system import errors
from solutions import train_gpt2_std as std
from workshop.diff import passed_checks
from workshop.instructor import classroom
from workshop.results import profile, runs
from workshop.vocabulary import save_vocabulary

few = settings(max_examples=40, deadline=None, database=None,
               derandomize=True, suppress_health_check=[*HealthCheck])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(), inner, max_size=3), max_leaves=5)
VALUES = JSON | st.sampled_from([
    torch.zeros(3), torch.zeros(()), torch.zeros(3, dtype=torch.int64), [],
    {}, 2**70, -1, float("nan")])
MODEL = std.GPT(std.GPTConfig(32, 257, 1, 2, 8))
WEIGHT = "transformer.h.0.attn.c_attn.weight"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("bad")


def one_line(read, *arguments):
    """What it returns; None after a `UserError`, which has to be one line."""
    try:
        return read(*arguments)
    except (UserError, errors.UserError) as error:
        assert len(str(error).splitlines()) == 1, error
        return None


def changed(value, path, new):
    """A copy of JSON-like data with another value at a place."""
    if not path:
        return new
    parts = value.copy()
    parts[path[0]] = changed(parts[path[0]], path[1:], new)
    return parts


def places(value, path=()):
    """The places of all values in JSON-like data."""
    yield path
    if isinstance(value, (dict, list)):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


# ------------------------------------------------------- a place is changed


OPTIMIZER = MODEL.configure_optimizers(std.PRESETS["tiny"])
WEIGHTS, MOMENTS = gather_state(MODEL, OPTIMIZER)
STATE = {
    "format": FORMAT, "stage": "std", "step": 3, "model": WEIGHTS,
    "optimizer": MOMENTS, "config": asdict(MODEL.config),
    "hyperparameters": {"data": "data"}}
OUTLINE = outline(MODEL, OPTIMIZER)
PLACES = [*places(STATE)]
MOMENT = "optimizer", "state", WEIGHT, "exp_avg"
ROWS = ",".join(COLUMNS) + "\n" + "".join(
    f"{step},5.5,,0.01,1.5,0.25,1000,,4,1000\n" for step in range(3))


def as_bytes(save, *arguments, **options):
    """What is saved in a file."""
    file = io.BytesIO()
    save(file, *arguments, **options)
    return file.getvalue()


CONTENT = as_bytes(lambda file: torch.save(STATE, file))
SHARD = as_bytes(np.save, np.arange(100, dtype=np.uint16))


def read_checkpoint(file):
    """What a run goes on from, or a text is written with."""
    state, _ = load_trained(file)
    check_fit(file, state, OUTLINE)
    return state


def is_for_the_model(state):
    std.GPTConfig(**state["config"])
    return type(state["step"]) is int and state["step"] >= 0 and all(
        weight.shape == WEIGHTS[name].shape
        for name, weight in state["model"].items())


def read_run(file):
    """What a run is resumed with, and what is shown among the results."""
    (file.parent / "metrics.csv").write_text(ROWS)
    started = one_line(runs.read_started, file.parent)
    assert started is None or started["max_steps"] > 0
    return runs.read_run(file.parent)


def read_shard(file):
    file.with_name("any_val_000001.npy").write_bytes(SHARD)
    dataset.check_shards(file.parent, 32)
    return np.load(file)


def read_manifest(file):
    ratio = dataset.bytes_per_token(file.parent)
    assert ratio is None or ratio > 0
    return dataset.read_manifest(file.parent)


def read_class(file):
    return classroom.read_people(file.parent)


def read_checked(file):
    """Of a record that is none, nothing is known."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passed_checks, "PASSED_FILE", file)
        passed_checks.last_passed("ddp")
        return passed_checks.has_passed("ddp", b"x")


def read_ladder(file):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "RUNS", file.parent)
        return runs.read_ladder()


def read_trace(file):
    return profile.read_trace(file, {3: 1.0, 4: 1.0})


def zipped(text):
    return gzip.compress(text.encode(), mtime=0)  # the same bytes each time


def save_zipped(value, file):
    file.write_bytes(zipped(json.dumps(value)))


@dataclass
class Reader:
    """good: a file's bytes, or what it holds, which `save` writes."""

    file: str
    good: object
    read: Callable  # the file: what it holds, or a `UserError`
    is_right: Callable  # of what was read
    save: Callable = lambda value, file: file.write_text(json.dumps(value))

    def try_content(self, place, content):
        """Read this in the file's place: it is right, or one line."""
        save_vocabulary(BYTES, place)
        file = place / self.file
        if isinstance(content, bytes):
            file.write_bytes(content)
        else:
            self.save(content, file)
        result = one_line(self.read, file)
        assert result is None or self.is_right(result)


# how a run is recorded: as the examples in example-logs/ have it
RECORDED = json.loads((runs.EXAMPLES / "ddp-2" / RECORD).read_text())
READERS = {
    "checkpoint": Reader(
        "any.pt", CONTENT, read_checkpoint,
        lambda state: same_state(state["model"], WEIGHTS)),
    "values": Reader("any.pt", STATE, read_checkpoint, is_for_the_model,
                     torch.save),
    "record": Reader(RECORD, RECORDED, read_run, lambda run: (
        run.accumulation >= 0 and run.name and run.preset
        and (run.sent is None or run.sent >= 0))),
    "metrics": Reader(
        "metrics.csv", ROWS.encode(), lambda file: [*runs.read_metrics(file)],
        lambda rows: all(row["step"] >= 0 and isinstance(row["loss"], float)
                         and row.keys() >= {*COLUMNS} for row in rows)),
    "shard": Reader("any_train_000001.npy", SHARD, read_shard,
                    lambda tokens: len(tokens) == 100),
    "tokens": Reader(
        dataset.TOKENS, b"".join(b"%s %d\n" % (
            base64.b64encode(bytes([byte])), byte) for byte in range(256)),
        lambda file: dataset.load_vocabulary(file.parent),
        lambda encoding: encoding.encode("a") == [97]),
    "settings": Reader(
        dataset.SETTINGS, {"name": "bytes", "pat_str": r"[\s\S]",
                           "special_tokens": {dataset.END_OF_TEXT: 256}},
        lambda file: dataset.load_vocabulary(file.parent),
        lambda encoding: encoding.n_vocab == 257),
    "manifest": Reader("manifest.json", RECORDED, read_manifest,
                       lambda value: True),
    "trace": Reader("rank0.json.gz", {"traceEvents": [
        {"ph": "X", "ts": step, "dur": 1, "name": f"end of step {step}",
         "cat": "cpu_op", "tid": 1, "args": {"Sequence number": 5}}
        for step in (3, 4)]}, read_trace, lambda rank: all(
            step.end >= step.begin for step in rank.steps.values()),
        save_zipped),
    "ladder": Reader("ladder.json", json.loads(
        (runs.EXAMPLES / "ladder.json").read_text()), read_ladder,
        lambda ladder: all(rung["training"] > 0 for rung in ladder["rungs"])),
    "class": Reader("a.jsonl", {
        "stage": "ddp", "time": 30, "left": [1, 2], "right": False,
        "mistake": "it hangs"}, read_class, lambda people: all(
            0 <= one.since < 1e11 and {*one.left} <= {*range(1, 99)}
            and one.right in (None, True, False) for one in people)),
    "checked": Reader(".checked.json",
                      {"ddp": {passed_checks.digest(b"x"): "now"}},
                      read_checked, lambda passed: passed in (True, False)),
}


def contents(good):
    """Strategy: what a file holds, with a place of it changed; any bytes."""
    if not isinstance(good, bytes):
        return st.builds(partial(changed, good),
                         st.sampled_from([*places(good)]), VALUES
                         if good is STATE else JSON) | st.binary(max_size=50)
    # of a checkpoint its directory, too, which no checksum covers
    begins = [0, max(good.find(b"PK\x01\x02"), 0)]
    position = st.sampled_from(begins).flatmap(
        lambda begin: st.integers(begin, len(good) - 1))
    return st.one_of(
        st.binary(max_size=200), st.text().map(str.encode),
        position.map(lambda end: good[:end]),
        st.builds(lambda at, bit: good[:at] + bytes([good[at] ^ 1 << bit])
                  + good[at + 1:], position, st.integers(0, 7)))


@pytest.mark.whole
@few
@given(st.data())
@pytest.mark.parametrize("name", READERS)
def test_a_place_changed(place, name, data):
    READERS[name].try_content(
        place, data.draw(contents(READERS[name].good)))


def with_line(number, end):
    """The vocabulary with another end of this line."""
    lines = READERS["tokens"].good.split(b"\n")
    lines[number] = lines[number].split()[0] + end
    return b"\n".join(lines)


@pytest.mark.parametrize(("name", "content"), [
    *product(("record", "metrics", "settings", "manifest", "trace", "ladder",
              "class", "checked"), (
        "ä".encode("latin-1"), bytes(range(256)), b"[" * 1_000_000,
        b"1" * 1_000_000, b"[1]", b"{}")),
    ("checkpoint", b""), ("checkpoint", Path("/etc/passwd").read_bytes()),
    *(("trace", content) for content in (
        zipped("{}")[:-1], zipped('{"traceEvents": [1]}'))),
    *(("checked", content) for content in (
        b"null", b'{"ddp": 1}', b'{"ddp": {"x": null}}')),
    *(("values", changed(STATE, path, value)) for path, value in (
        ((), torch.zeros(3)), (("step",), "6"), (("model", WEIGHT), None),
        (("model", WEIGHT), torch.zeros(24, 8, dtype=torch.int64)),
        (("model",), [1]), (("optimizer", "param_groups"), []),  # an abort
        (MOMENT, torch.zeros(3)),  # once -11
        ((*MOMENT[:3], "step"), torch.zeros(3)),
        (("optimizer", "param_groups", 0, "lr"), "x"),
        (MOMENT[:3], {"more": 3}), (("config",), [1]),
        (("config",), asdict(MODEL.config) | {"more": 1}),
        (("hyperparameters",), None))),
    ("record", b'{"hyperparameters": [1]}'),
    ("record", b'{"hyperparameters": null}'),
    ("record", changed(RECORDED, ("hyperparameters", "preset"), "")),
    ("metrics", b"step,loss\n0,x\n"), ("metrics", b"step,loss\n0,\0\n"),
    ("metrics", b"step\ninf\n"),
    ("shard", as_bytes(np.savez, a=np.zeros(3, np.uint16))),
    ("shard", SHARD.replace(b"}", b"{")),  # once a TokenError
    ("shard", SHARD.replace(b"(100,)", b"(10,) ")),  # once fewer, silently
    ("shard", as_bytes(np.save, np.array([{}]), allow_pickle=True)),
    ("tokens", with_line(3, b" 4")),  # once a panic
    ("tokens", with_line(3, b" -3")), ("tokens", with_line(3, b" 3 3")),
    ("tokens", with_line(3, b" 18446744073709551616"))],
    ids=lambda value: str(value)[:20] if isinstance(value, bytes) else None)
def test_what_once_went_wrong(place, name, content):
    READERS[name].try_content(place, content)


# ------------------------------------------------------------- checkpoints


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="Linux")
@pytest.mark.parametrize("verify", [True, False])
def test_a_checkpoint_is_mapped_and_not_read(tmp_path, verify):
    """A rank reads no more of it than it uses, and changes nothing."""
    file = tmp_path / "mapped.pt"
    file.write_bytes(CONTENT)
    state = load_checkpoint(file, verify=verify)
    assert str(file) in Path("/proc/self/maps").read_text()
    for weight in state["model"].values():
        weight.zero_()
    assert file.read_bytes() == CONTENT
    file.unlink()  # as the oldest is, while another rank has it
    assert not any(weight.any() for weight in state["model"].values())


@pytest.mark.whole
def test_a_checkpoint_with_something_missing(tmp_path):
    """Such as a weight, which was once left as random as it began."""
    file = tmp_path / "missing.pt"
    for *path, last in PLACES[1:]:
        if last == "stage" or "param_groups" in (*path, last):  # nobody reads
            continue
        inside = STATE
        for key in path:
            inside = inside[key]
        rest = inside.copy()
        del rest[last]
        torch.save(changed(STATE, path, rest), file)
        assert one_line(read_checkpoint, file) is None, (*path, last)


@pytest.mark.parametrize(("path", "value", "says"), [
    (("model", WEIGHT), WEIGHTS[WEIGHT].to_sparse(), "not a dense tensor"),
    (("model", WEIGHT), WEIGHTS[WEIGHT].to("meta"), "not a dense tensor"),
    (("model", WEIGHT), WEIGHTS[WEIGHT].to(torch.complex64), "complex64"),
    (("model", WEIGHT), WEIGHTS[WEIGHT] * torch.nan, "contains NaN"),
    (MOMENT, MOMENTS["state"][WEIGHT]["exp_avg"] * torch.nan,
     "exp_avg of .* contains NaN"),
    (("config", "n_layer"), 10**6, "h.999999.ln_1.weight is missing"),
    (("config", "block_size"), 2**30, "wpe.weight: its weight is float"),
    (("config", "n_head"), 3, "n_head does not divide"),
    (("format",), 1, "has checkpoint format 1, .*; fix: train again")])
def test_what_no_model_can_have(path, value, says, tmp_path):
    file = tmp_path / "odd.pt"
    torch.save(changed(STATE, path, value), file)
    with pytest.raises(UserError, match=says) as error:
        read_checkpoint(file)
    assert isinstance(error.value, Damaged) == (path != ("format",))


FOREIGN = {
    "nanoGPT": lambda file: torch.save({"model": {}, "iter_num": 5}, file),
    "Lightning": lambda file: torch.save(
        {"pytorch-lightning_version": "2.6", "state_dict": {}}, file),
    "argparse.Namespace": lambda file: torch.save(
        {"state_dict": {}, "hp": argparse.Namespace(lr=1)}, file),
    "Linear": lambda file: torch.save(torch.nn.Linear(2, 2), file),
    "it holds weight, bias": lambda file: torch.save(
        torch.nn.Linear(2, 2).state_dict(), file),
    "a pickle": lambda file: torch.save(
        {}, file, _use_new_zipfile_serialization=False),
    "Tensor": lambda file: torch.save(torch.zeros(2), file),
    "safetensors": lambda file: safetensors.torch.save_file(
        {"weight": torch.zeros(2)}, file),
    "a zip archive": lambda file: np.savez(open(file, "wb"), a=np.zeros(2)),
    "by another program": lambda file: file.write_text("a text"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_checkpoint_of_another_program(kind, tmp_path):
    """It is not called damaged, and torch's advice is not passed on."""
    file = tmp_path / "theirs.pt"
    FOREIGN[kind](file)
    with pytest.raises(
            Damaged, match="is not a checkpoint of the course") as got:
        load_trained(file)
    text = str(got.value)
    assert kind in text and "weights_only" not in text and "\n" not in text
    config = json.dumps({"n_positions": 8, "vocab_size": 257, "n_layer": 1,
                         "n_head": 2, "n_embd": 8})
    (tmp_path / "config.json").write_text(config)
    file.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError) as got:
        import_folder(tmp_path, tmp_path / "ours.pt")
    assert "weights_only" not in str(got.value)


@pytest.mark.parametrize("method", [
    zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2])
def test_a_checkpoint_that_was_packed_again(method, tmp_path):
    """By a program for archives, which compresses what torch maps."""
    file = tmp_path / "packed.pt"
    with (zipfile.ZipFile(io.BytesIO(CONTENT)) as ours,
          zipfile.ZipFile(file, "w", method) as theirs):
        for entry in ours.infolist():
            theirs.writestr(entry.filename, ours.read(entry))
    if method == zipfile.ZIP_BZIP2:
        with pytest.raises(Damaged, match=r"not a checkpoint .*compressed in"):
            read_checkpoint(file)
    else:
        assert same_state(read_checkpoint(file)["model"], WEIGHTS)


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.",
                                    "module._orig_mod."])
def test_the_names_of_a_wrapped_model(prefix, tmp_path):
    """Of who saves what torch.compile or DDP returns."""
    def wrap(named):
        return {prefix + name: value for name, value in named.items()}

    file = tmp_path / "wrapped.pt"
    moments = MOMENTS | {"state": wrap(MOMENTS["state"])}
    torch.save(STATE | {"model": wrap(WEIGHTS), "optimizer": moments}, file)
    found = read_checkpoint(file)
    assert same_state(found["model"], WEIGHTS)
    assert same_state(found["optimizer"]["state"], MOMENTS["state"])


def test_weights_more_and_weights_alone():
    with pytest.raises(Damaged, match="more: its weight is"):
        check_fit(__file__, STATE | {
            "model": {**WEIGHTS, "more": torch.zeros(3)}}, outline(MODEL))
    # as for --init, whose optimizer begins anew
    other = STATE | {"optimizer": {"state": {}, "param_groups": []}}
    check_fit(__file__, other, outline(MODEL))
    with pytest.raises(Damaged, match="missing"):
        check_fit(__file__, other, OUTLINE)


def test_an_optimizer_keeps_its_own_options():
    """What the file says of them is not read, and may be anything."""
    model = std.GPT(MODEL.config)
    optimizer = model.configure_optimizers(std.PRESETS["tiny"])
    spread_state(changed(STATE, ("optimizer", "param_groups"), [{"lr": "x"}]),
                 model, optimizer)
    weights, moments = gather_state(model, optimizer)
    assert same_state(weights, WEIGHTS) and same_state(moments, MOMENTS)


@pytest.mark.whole
def test_a_missing_weight_stops_a_run(data, tmp_path):
    """The checkpoint before it is taken; --init has none before it."""
    run = tmp_path / "run"
    train("std", run, "--max-steps", 4, "--checkpoint-every", 2, data=data)
    newest = run / "checkpoints" / "step_00000004.pt"
    state = torch.load(newest, weights_only=True)
    del state["model"]["transformer.h.1.attn.c_attn.weight"]
    torch.save(state, newest)
    refused(attempt("fsdp", tmp_path / "new", "--init", newest, data=data,
                    world_size=2), "weight is missing", "--init")
    good = train("fsdp", run, "--resume", "--max-steps", 5, world_size=2)
    assert good.err.count("is corrupt") == 1 == good.err.count("\n")
    assert "resuming after step 1 " in good.out


# ------------------------------------------------------------------- runs


def test_a_name_that_torch_cannot_read_is_no_damage(tmp_path):
    file = tmp_path / os.fsdecode(b"\xff.pt")
    with file.open("wb") as writer:
        torch.save({}, writer)
    with pytest.raises(UserError, match=r"cannot be read \('utf-8' codec"), (
            reading(file)):
        torch.load(file, mmap=True)


def test_damaged_files_of_later_steps_take_no_checkpoints_place(tmp_path):
    """A run has gone on from one before them; what it saves now is there."""
    later = [tmp_path / f"step_{step:08d}.pt" for step in (8, 9)]
    for file in later:
        file.write_bytes(b"half of it")
    for step in (3, 4, 5):
        write_checkpoint(tmp_path, {"step": step})
    assert sorted(tmp_path.iterdir()) == [
        tmp_path / "step_00000004.pt", tmp_path / "step_00000005.pt", *later]


def test_what_a_spreadsheet_has_saved_is_resumed(tmp_path, capsys):
    """What can be read is kept; where rows are lost, so is the file."""
    file = tmp_path / "metrics.csv"
    file.write_bytes(b"\xef\xbb\xbf" + ROWS.encode())  # a byte-order mark
    metrics = Metrics(file, 3)
    assert len(metrics.losses) == 3 and metrics.last == 2
    assert not capsys.readouterr().err

    damaged = ROWS.replace("5.5", "5,5").encode()
    file.write_bytes(damaged)
    metrics = Metrics(file, 3)
    assert not metrics.losses
    (kept,) = tmp_path.glob("metrics.2*.csv")
    assert kept.read_bytes() == damaged
    said = capsys.readouterr().err
    assert "lacks 3 of the steps 0 to 2" in said and kept.name in said

    # what follows the lost rows is kept when the run is resumed again
    metrics.add(dict.fromkeys(COLUMNS, 1) | {"step": 3})
    assert Metrics(file, 4).last == 3

    file.write_text(ROWS.replace(",", ";"))  # as some write it: no columns
    Metrics(file, 3)
    assert file.read_text() == f"{','.join(COLUMNS)}\n"


@pytest.mark.parametrize("name", READERS)
def test_a_pipe_is_no_file(name, tmp_path):
    """Opening it would wait endlessly."""
    save_vocabulary(BYTES, tmp_path)
    file = tmp_path / READERS[name].file
    file.unlink(missing_ok=True)
    os.mkfifo(file)
    passed_over = name in ("class", "checked")
    with (contextlib.nullcontext() if passed_over else pytest.raises(
            UserError, match="not a file")):
        assert READERS[name].is_right(READERS[name].read(file))


# --------------------------------------------------------------- datasets


AS_NOBODY = """\
import os, sys  # nobody may not read Python's own files either
from pathlib import Path
from backstage import checkpoint, dataset
from backstage.errors import explain
import documents, shards
if os.getuid() == 0:
    os.setuid(65534)
folder = Path(sys.argv[1])
for read in (lambda: dataset.check_shards(folder, 32),
             lambda: shards.find(folder),
             lambda: checkpoint.list_checkpoints(folder),
             lambda: [*documents.walk(folder.parent)]):
    try:
        read()
        print("it is listed")
    except Exception as error:
        print(explain(error))
"""


@pytest.mark.parametrize(("hidden", "refused"), [
    (".", 4), ("test_train_000002.npy", 1)])  # the others will read it later
def test_what_may_not_be_read_is_not_passed_over(hidden, refused, tmp_path):
    with tempfile.TemporaryDirectory() as parent:  # a path for everybody
        os.chmod(parent, 0o755)
        folder = make_dataset(Path(parent, "data"))
        (folder / hidden).chmod(0)
        end, = launch(program(tmp_path / "reads.py", AS_NOBODY), folder,
                      place=ROOT)
    lines = end.out.splitlines()
    assert lines[refused:] == ["it is listed"] * (4 - refused), end
    for line in lines[:refused]:
        assert "Permission denied" in line and (folder / hidden).name in line


def test_a_note_of_macos_is_no_shard(tmp_path):
    """A stage would list it: so it has to go."""
    folder = make_dataset(tmp_path / "data")
    for name in ".DS_Store", "._manifest.json":
        (folder / name).write_bytes(b"\0\5\x16\7")
    dataset.check_shards(folder, 32)
    (folder / "._test_train_000001.npy").write_bytes(b"\0\5\x16\7")
    with pytest.raises(UserError, match=r"macOS metadata.* -delete") as error:
        dataset.check_shards(folder, 32)
    subprocess.run(str(error.value).rpartition(": ")[2], shell=True,
                   check=True)
    dataset.check_shards(folder, 32)


CUT = """\
import os, sys
from backstage import dataset
from backstage.errors import run_main
from solutions import train_gpt2_std as std

def main():
    dataset.check_shards(sys.argv[1], 32)
    shards = std.get_shards(sys.argv[1], "train")
    data = std.DataIterator(shards, 4, 32)
    if sys.argv[2] == "cut":
        os.truncate(shards[0], 100)
    else:  # a SIGBUS that is not a shard's
        os.kill(os.getpid(), 7)
    data.seek(70)
    next(data)

run_main(main)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's number of SIGBUS")
def test_a_shard_that_is_cut_while_it_is_read(tmp_path):
    folder = make_dataset(tmp_path / "data")
    np.save(folder / "test_train_000001.npy", np.zeros(10_000, np.uint16))
    script = program(tmp_path / "cuts.py", CUT)
    (killed,), (cut,) = (launch(script, folder, how, place=ROOT)
                         for how in ("kill", "cut"))
    line, = cut.err.splitlines()
    assert cut.status == 1 and line.startswith("error: ")
    assert "test_train_000001.npy was truncated while being read" in line
    assert killed.status == -7


# ------------------------------------------------------------------ flags


FLAGS = ["--" + name.replace("_", "-") for name in vars(std.PRESETS["tiny"])
         if name not in ("run_dir", "resume")]
NUMBERS = st.integers() | st.floats() | st.sampled_from([2**63, 2**70, -2**70])


@pytest.mark.whole
@few
@given(st.lists(st.tuples(st.sampled_from(FLAGS), NUMBERS | st.text(
    st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"]))),
    max_size=2))
@example([("--warmup-steps", -3)])
@example([("--learning-rate", "nan")])
@example([("--eval-minibatches", 2**40)])
@example([("--resume", "")])
def test_any_flags(data, pairs):
    words = [word for flag, value in pairs for word in (
        [f"{flag}={value}"] if value != "" else [flag])]
    with (pytest.MonkeyPatch.context() as patch,
          contextlib.redirect_stdout(io.StringIO())):
        patch.setattr(sys, "argv", [
            "train_gpt2.py", "--preset=tiny", f"--data={data}", *words])
        parsed = one_line(parse, std.Hyperparameters, std.PRESETS, std.MODELS)
    if parsed:
        hp, _ = parsed
        assert std.MODELS["tiny"].n_embd == 32
        assert not hp.resume and 0 <= hp.learning_rate < float("inf")
        assert 0 <= hp.warmup_steps < 2**31 > hp.minibatch_size > 0
        torch.manual_seed(hp.seed)


# ---------------------------------------------------------------- the rest


def leave_folder(parent, user):
    """Make a check's folder in a user's process that is killed; its path."""
    program = (f"import os, tempfile; tempfile.tempdir = {parent!r}\n"
               f"from rankcheck.engine import scratch\nos.setuid({user})\n"
               "print(scratch.make_folder(), flush=True)\n"
               "os.kill(os.getpid(), 9)")
    said = subprocess.run([sys.executable, "-c", program], text=True,
                          stdout=subprocess.PIPE).stdout
    return Path(said.strip())


def test_what_a_killed_check_has_left_is_removed(monkeypatch):
    with tempfile.TemporaryDirectory() as parent:  # of a short name
        monkeypatch.setattr("tempfile.gettempdir", lambda: parent)
        mine = scratch.make_folder()
        killed = leave_folder(parent, os.getuid())
        assert killed.exists()
        os.chmod(parent, 0o1777)  # as /tmp
        another = leave_folder(parent, 65534) if os.getuid() == 0 else mine
        theirs = Path(parent, f"{scratch.PREFIX}of-my-thesis")
        marked = Path(parent, f"{scratch.PREFIX}marks")
        linked = Path(parent, f"{scratch.PREFIX}link")
        for folder, mark in (theirs, None), (marked, "another's words"):
            folder.mkdir()
            (folder / "best.pt").write_text("three weeks of training")
            if mark:
                (folder / scratch.MARK).write_text(mark)
        linked.symlink_to(mine)
        for folder in mine, theirs, marked:
            os.utime(folder, (0, 0))  # it has been there for long
        scratch.make_folder()
        assert mine.exists() and linked.exists() and not killed.exists()
        assert another.exists()
        for folder in theirs, marked:
            assert (folder / "best.pt").exists()


# ------------------------------------------- what older versions have written


@pytest.mark.parametrize("name", ["format-2"])
def test_a_stored_checkpoint_is_read(name):
    """A file of each format that was ever written and is still read.

    Those of format 1 are refused: see `test_what_no_model_can_have`.
    """
    state, _ = load_trained(GOLDEN / f"{name}.pt")
    model = std.GPT(std.GPTConfig(**state["config"]))
    optimizer = model.configure_optimizers(std.PRESETS["tiny"])
    check_fit(GOLDEN / f"{name}.pt", state, outline(model, optimizer))
    spread_state(state, model, optimizer)
    weights, moments = gather_state(model, optimizer)
    assert same_state(weights, state["model"])
    assert same_state(moments["state"], state["optimizer"]["state"])
    assert state["step"] == 1 and FORMAT == 2


def test_a_stored_run_of_the_starter_goes_on(tmp_path):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    shutil.copy(GOLDEN / "starter-1.pt",
                run / "checkpoints" / "step_00000001.pt")
    result = train("starter", run, "--resume", "--max-steps", 2)
    assert "| step    1/2" in result.out and "| step    0/" not in result.out
    assert "lacks 1 of the steps 0 to 0" in result.out
