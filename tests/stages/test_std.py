"""The single-device stage: what it computes, and that nothing is lost."""

import io
import itertools
import os
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import train_gpt2_ddp as ddp
import train_gpt2_std as std
from builders import contents
from stages import (
    attempt,
    make_dataset,
    refused,
    same_state,
    start_stage,
    train,
    wait_for_rows,
    write_shards,
)

from backstage import ROOT, dataset
from backstage.dataset import check_shards
from backstage.errors import UserError, explain
from backstage.files import new_folder
from backstage.flops import flops_per_token, num_parameters
from rankcheck.engine.ranks import launch
from rankcheck.record import recorder as watched

CONFIG = replace(std.MODELS["tiny"], vocab_size=257)


def test_the_working_copy_starts_as_the_single_device_stage():
    script = ROOT / "code" / "train_gpt2.py"
    committed = subprocess.run(
        ["git", "show", "HEAD:code/train_gpt2.py"], cwd=ROOT,
        capture_output=True)
    text = committed.stdout if committed.returncode == 0 else (
        script.read_bytes())
    assert text == (ROOT / "solutions/train_gpt2_std.py").read_bytes()


def test_log_and_metrics(single):
    first, _, _ = single.out.partition("| step")
    preset, world, run, parameters, startup = first.splitlines()
    assert preset.startswith("preset tiny, data ")
    assert "unlike the preset" not in preset
    assert f", {socket.gethostname()}; no backend, no scheduler; " in world
    assert run.startswith("run ") and " parameters: " in parameters
    assert re.fullmatch(r"startup \d+\.\d s", startup)
    lines = [line for line in single.out.splitlines() if line[:6] == "| step"]
    number = r"[\d,.]+(e[+-]\d+)?"
    for step, line in enumerate(lines):
        assert re.match(
            rf"\| step {step:4d}/20 \| loss \d\.\d{{6}} \| lr: {number} "
            rf"\| norm: \d\.\d{{4}} \| dt: +{number} ms "
            rf"\| tok/s: {number} \| (mem: {number} GiB|val: .*) \|$",
            line), line
    assert not single.err
    header = (single.folder / "metrics.csv").read_text().splitlines()[0]
    assert header == ("step,loss,val_loss,lr,norm,seconds,"
                      "tokens_per_second,mfu,samples_per_second,"
                      "tokens_per_second_per_device,memory,"
                      "memory_reserved")
    assert single.column("step") == list(range(20)) and len(lines) == 20
    for step in 9, 19:  # beside it, of four minibatches of training
        seen = [row["loss"] for row in single.rows[step - 3:step + 1]]
        assert f" (train: {sum(seen) / 4:.4f}) |" in lines[step]
    assert re.findall("^saved .*/checkpoints/(.*)$", single.out, re.M) == [
        "step_00000010.pt", "step_00000020.pt"]
    for row in single.rows:  # a step is 8 samples of 32 tokens
        assert row["tokens_per_second"] == pytest.approx(
            8 * 32 / row["seconds"], rel=1e-6)
    vectors = 4 * (9 + 4) * 32 + 2 * 32  # of four blocks, and ln_f
    matrices = num_parameters(CONFIG) - vectors
    assert (f"{matrices + vectors:,} parameters: {matrices:,} in 18 tensors "
            f"with weight decay 0.1, {vectors:,} in 34 tensors with weight "
            "decay 0\n") in single.out


@pytest.mark.parametrize("lengths", [[4001], [700, 3, 1298, 2000], [97] * 40])
@pytest.mark.parametrize(("B", "T"), [(1, 8), (2, 32), (8, 32)])
def test_samples_follow_the_contract(tmp_path, lengths, B, T):
    """Step s reads samples [s*S, (s+1)*S), through shard ends and epochs."""
    tokens = np.arange(sum(lengths))  # a token is its own position
    parts = np.split(tokens, np.cumsum(lengths)[:-1])
    shards = std.get_shards(write_shards(tmp_path, parts, [0]), "train")
    n, S = (len(tokens) - 1) // T, 8
    worlds = [[std.DataIterator(shards, B, T)]] + [
        [ddp.DataIterator(shards, B, T, rank, world_size)
         for rank in range(world_size)] for world_size in (1, 2, 4)]
    for ranks in worlds:
        world_size = len(ranks)
        if S % (B * world_size):
            continue
        for step in range(2 * n // S + 2):
            x, y = (torch.cat(parts) for parts in zip(*[
                next(data) for _ in range(S // (B * world_size))
                for data in ranks], strict=True))
            first = (step * S + torch.arange(S)) % n * T
            expected = first[:, None] + torch.arange(T)
            assert torch.equal(x, expected)
            assert torch.equal(y, expected + 1)
        for rank, data in enumerate(ranks):
            data.seek(3 * S)
            assert torch.equal(next(data)[0][0],
                               (3 * S + rank * B) % n * T + torch.arange(T))


def test_a_large_folder_opens_without_being_read(tmp_path):
    """98 shards of 100 million tokens: sparse files of nominally 19.6 GB."""
    shard = tmp_path / "fineweb_train_000001.npy"
    with open(shard, "wb") as file:
        np.lib.format.write_array_header_1_0(file, {
            "descr": "<u2", "fortran_order": False, "shape": (100_000_000,)})
        file.truncate(file.tell() + 200_000_000)
    for number in range(2, 99):
        os.link(shard, tmp_path / f"fineweb_train_{number:06d}.npy")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    data = std.DataIterator(
        std.get_shards(tmp_path, "train"), 16, 1024)
    data.seek(data.num_samples - 16)
    x, _ = next(data)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert x.shape == (16, 1024) and data.num_samples == 9_570_312
    assert after - before < 50_000  # KiB


def test_learning_rate():
    hp = std.Hyperparameters()
    assert std.get_lr(7, 18692, hp) == pytest.approx(6.7133e-06, rel=1e-4)
    assert std.get_lr(714, 18692, hp) == pytest.approx(6e-4)
    assert std.get_lr(715, 18692, hp) == pytest.approx(6e-4)
    assert std.get_lr(18691, 18692, hp) == pytest.approx(6e-5, rel=1e-4)


def test_flops_per_token():
    """The number that others give for the 124M model."""
    assert flops_per_token(std.GPTConfig(), 1024) == pytest.approx(
        855e6, rel=1e-3)


def test_help_from_another_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rank, = launch(ROOT / "code/train_gpt2.py", "--help")
    assert rank.status == 0 and "--sequence-length" in rank.out


# ------------------------------------------------------- nothing is lost


@pytest.mark.whole
def test_killed_at_random_moments(data, tmp_path, single):
    """kill -9 until it is done: the same loss and weights, bit for bit."""
    run, rng = tmp_path / "killed", random.Random(0)
    resume = ()
    for rows in sorted(rng.sample(range(15), 3)):
        launch = start_stage("std", run, "--checkpoint-every", 3, *resume,
                             data=data)
        wait_for_rows(run, rows)
        time.sleep(rng.uniform(0, 0.02))
        launch.signal(signal.SIGKILL)
        assert launch.wait()[0].status == -signal.SIGKILL
        resume = ("--resume",)
    done = train("std", run, *resume)
    for name in ("step", "loss", "val_loss", "norm", "lr"):
        assert done.column(name) == single.column(name)
    for part in ("model", "optimizer"):
        assert same_state(done.checkpoint()[part], single.checkpoint()[part])


def die_while_saving(log):
    """Kills the process when half of the second checkpoint is written."""
    number = itertools.count(1)

    @watched.replace(torch, "save")
    def half(save, state, file):
        save(state, file)
        if next(number) == 2:
            file.truncate(file.tell() // 2)
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.whole
def test_killed_while_a_checkpoint_is_written(data, tmp_path, single):
    flags = ("--checkpoint-every", 5)
    dead = attempt("std", tmp_path / "run", *flags, data=data,
                   probes=[die_while_saving])
    assert dead.status == -signal.SIGKILL
    folder = tmp_path / "run" / "checkpoints"
    part, whole_one = sorted(file.name for file in folder.iterdir())
    assert whole_one == "step_00000005.pt"
    assert re.fullmatch(r"\.step_00000010\.pt\.\d+-0\.workshop-part", part)
    theirs = {"step_best.pt": b"kept by hand", "step_00000001.pt": b"mine",
              ".film.part": b"half of it", "notes.workshop-part": b"a note"}
    for name, data in theirs.items():
        (folder / name).write_bytes(data)
    done = train("std", tmp_path / "run", "--resume")
    assert done.column("loss") == single.column("loss")
    assert done.column("step") == list(range(20))
    last = torch.load(folder / "step_00000020.pt")
    assert same_state(last["model"], single.checkpoint()["model"])
    assert {file.name for file in folder.iterdir()} == {
        "step_00000015.pt", "step_00000020.pt", *theirs}
    for name, data in theirs.items():
        assert (folder / name).read_bytes() == data


@pytest.mark.parametrize(("name", "resume"), [
    ("hyperparameters.json", ()), ("metrics.csv", ()), ("checkpoints", ()),
    ("metrics.csv", ("--resume",)),
    ("checkpoints/step_00000020.pt", ("--resume",)),
    ("checkpoints/best.ckpt", ("--resume",))])
def test_a_folder_with_anything_of_a_run_is_not_free(
        name, resume, data, tmp_path):
    run = tmp_path / "run"
    file = run / name
    file.parent.mkdir(parents=True)
    file.write_bytes(b"of another program")
    (run / "why").mkdir()
    (run / "why" / "notes.txt").write_text("mine")
    before = contents(run)
    refused(attempt("std", run, *resume, "--max-steps", 3, data=data), "holds")
    assert contents(run) == before


class CtrlCWhilePrinting(io.RawIOBase):
    """The standard output, in which Ctrl-C meets the line of a step."""

    def __call__(self, log):
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(self))

    def writable(self):
        return True

    def write(self, data):
        if b"| step    3/" in bytes(data):
            os.kill(os.getpid(), signal.SIGINT)
        return os.write(1, data)


@pytest.mark.parametrize(("stage", "number", "status", "probes"), [
    ("std", signal.SIGTERM, 0, ()),
    pytest.param("lit", signal.SIGINT, 130, (), marks=pytest.mark.whole),
    ("std", signal.SIGINT, 130, [CtrlCWhilePrinting()])])
def test_stops_with_a_checkpoint(
        data, tmp_path, stage, number, status, probes):
    run = tmp_path / "run"
    launch = start_stage(stage, run, "--max-steps", 2000, "--eval-every", 2000,
                         "--checkpoint-every", 2000, data=data, probes=probes)
    if not probes:
        wait_for_rows(run, 3)
        launch.signal(number)
    stopped = launch.result(run)
    assert stopped.status == status, stopped.err
    assert f"stopped by {number.name}" in stopped.out
    assert ("Ctrl-C: stopping after this step" in stopped.out) == (
        number == signal.SIGINT)
    assert not any(stopped.column("val_loss"))  # no needless work
    rows = len(stopped.rows)
    assert [file.name for file in run.glob("checkpoints/*")] == [
        f"step_{rows:08d}.pt"]
    # and it continues as if nothing had happened
    more = train(stage, run, "--resume", "--max-steps", rows + 3)
    assert more.column("step") == list(range(rows + 3))


@pytest.mark.whole
def test_a_damaged_checkpoint_is_passed_over(data, tmp_path, single):
    run = tmp_path / "run"
    train("std", run, "--checkpoint-every", 9, data=data)
    newest = run / "checkpoints" / "step_00000020.pt"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    done = train("std", run, "--resume")
    assert done.err.count(f"{newest} is corrupt") == 1
    assert "resuming after step 17" in done.out
    assert done.column("loss") == single.column("loss")
    assert re.search(r"\(train: .*?\)", done.out)[0] == re.findall(
        r"\(train: .*?\)", single.out)[1]  # also of steps before that
    assert same_state(done.checkpoint()["model"],
                      single.checkpoint()["model"])
    for file in run.glob("checkpoints/*.pt"):
        os.truncate(file, file.stat().st_size // 2)
    refused(attempt("std", run, "--resume"), "is corrupt", "another --run-dir")


def small_files(limit, log=None):
    """No file may grow beyond a limit in bytes, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


@pytest.mark.whole
def test_a_full_disk_leaves_the_checkpoint_before(data, tmp_path):
    run = tmp_path / "run"
    train("std", run, "--max-steps", 10, data=data)
    kept = (run / "checkpoints" / "step_00000010.pt").read_bytes()
    for limit, words in (
            (100_000, ["could not be written (File too large)"]),
            (1500, ["cannot write: File too large", "--resume"])):
        result = attempt("std", run, "--resume", "--max-steps", 20,
                         probes=[partial(small_files, limit)])
        refused(result, *words)
        assert "unchanged" not in result.err  # it has never been there
        assert [(file.name, file.read_bytes())
                for file in run.glob("checkpoints/*")] == [
            ("step_00000010.pt", kept)]
    new = tmp_path / "new"
    refused(attempt("std", new, data=data,
                    probes=[partial(small_files, 500)]),
            "hyperparameters.json could not be written (File too large)")
    assert not [*new.iterdir()]  # the next attempt finds the folder free


@pytest.mark.whole
def test_a_full_disk_for_the_output(data, tmp_path):
    """Like `python ... > log`: what is left would be written at the end."""
    with open(tmp_path / "log", "w") as log:
        ran = subprocess.run(
            [sys.executable, ROOT / "solutions" / "train_gpt2_ddp.py",
             "--preset", "tiny", "--data", data, "--run-dir", tmp_path / "run",
             "--max-steps", "500", "--checkpoint-every", "500"],
            env={**os.environ, "PYTHONPATH": str(ROOT),
                 "PYTHONUNBUFFERED": ""},
            preexec_fn=lambda: small_files(3000), stdout=log,
            stderr=subprocess.PIPE, text=True)
    assert ran.returncode == 1
    assert ran.stderr == (
        "error: cannot write: File too large; fix: free some space; a run "
        "resumes with --resume\n")


@pytest.mark.parametrize("stage", ["std", "lit"])
def test_a_loss_that_is_not_finite_spares_the_checkpoint(
        stage, data, tmp_path):
    run = tmp_path / "run"
    train(stage, run, "--max-steps", 5, data=data)
    kept = (run / "checkpoints" / "step_00000005.pt").read_bytes()
    failed = attempt(stage, run, "--resume", "--max-steps", 20,
                     "--learning-rate", 1e30, "--checkpoint-every", 1)
    refused(failed, "the loss is", "--learning-rate")
    for file in sorted(run.glob("checkpoints/*.pt")):
        model = torch.load(file, weights_only=True)["model"]
        assert all(weight.isfinite().all() for weight in model.values())
    assert (run / "checkpoints" / "step_00000005.pt").read_bytes() == kept


@pytest.mark.whole
def test_resume_finds_its_own_settings(data, tmp_path, monkeypatch):
    """--run-dir and --resume say enough; a finished run ends at once."""
    monkeypatch.chdir(data.parent)  # a relative folder is its user's
    run = tmp_path / "run"  # not there yet: it starts afresh
    train("std", run, "--resume", "--preset", "tiny", "--max-steps", 6,
          "--microbatch-size", 4, data=data.name)
    again = train("std", run, "--resume")
    assert "already finished" in again.out
    longer = train("std", run, "--resume", "--max-steps", 8)
    assert longer.column("step") == list(range(8))
    assert longer.out.splitlines()[0].endswith(
        "microbatches of 4; unlike the preset: max_steps 8")
    state = longer.checkpoint()
    assert state["hyperparameters"]["microbatch_size"] == 4
    assert (state["format"], state["stage"], state["step"]) == (2, "std", 8)
    (run / "hyperparameters.json").unlink()  # there are its checkpoints
    refused(attempt("std", run, data=data), "already holds a run",
            "choose another --run-dir")
    done = train("std", run, "--resume", "--preset", "tiny", "--max-steps", 9,
                 "--data", data)
    assert done.column("step") == list(range(9))


@pytest.mark.whole
@pytest.mark.parametrize("stage", ["std", "starter"])
def test_one_process_at_a_time_trains_in_a_run(stage, data, tmp_path):
    """A second one would take the first one's metrics away."""
    run = tmp_path / "run"
    launch = start_stage(
        stage, run, "--max-steps", 10**6, "--eval-every", 10**6,
        "--checkpoint-every", 10**6, data=data)
    wait_for_rows(run, 3)
    records = {file: file.read_bytes() for file in run.glob("*.json")}
    for again in [()] * (stage == "std") + [("--resume",)]:
        refused(attempt(stage, run, *again, data=data),
                "another process is training in this run")
    assert records == {file: file.read_bytes() for file in records}
    launch.signal(signal.SIGKILL)  # before there is a checkpoint
    rows = len(launch.result(run).rows)
    done = train(stage, run, "--resume", "--max-steps", rows + 2, data=data)
    assert done.column("step") == list(range(rows + 2))


def test_runs_of_the_same_second_have_folders_of_their_own(tmp_path):
    folders = {new_folder(tmp_path, "std") for _ in range(3)}
    assert len(folders) == 3 and all(f.is_dir() for f in folders)


@pytest.mark.whole
@pytest.mark.parametrize("script", ["solutions/train_gpt2_std.py",
                                    "starter/train.py"])
def test_closed_streams_and_a_home_folder(script, data, tmp_path):
    """As cron and daemons start it, and with a ~ that no shell replaced."""
    flags = "--max-steps", "2", "--run-dir=~/run"
    if "std" in script:
        flags += "--preset=tiny", "--data=~/data"
    (tmp_path / "data").symlink_to(data)
    ended = subprocess.run(
        ["bash", "-c", 'exec "$@" <&- >&- 2>&-', "-", sys.executable,
         ROOT / script, *flags], cwd=tmp_path,
        env={**os.environ, "HOME": str(tmp_path)})
    assert ended.returncode == 0
    metrics = (tmp_path / "run" / "metrics.csv").read_text()
    assert metrics.startswith("step,loss,") and metrics.count("\n") == 3
    assert not (tmp_path / "~").exists()


def few_files(hard, log=None):
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))


@pytest.mark.parametrize(("hard", "status"), [(1024, 0), (64, 1)])
def test_more_shards_than_files_may_be_open(hard, status, tmp_path):
    data = make_dataset(tmp_path / "data")
    for number in range(10, 110):
        np.save(data / f"test_train_{number:06}.npy", np.ones(50, np.uint16))
    ended = attempt("std", tmp_path / "run", "--max-steps", 1, data=data,
                    probes=[partial(few_files, hard)])
    assert ended.status == status, ended.err
    if status:
        refused(ended, "ulimit -n 4096")


# --------------------------------------------------------------- bad input


def test_a_run_dir_in_a_file(data, tmp_path):
    (tmp_path / "file").touch()
    refused(attempt("std", tmp_path / "file" / "run", data=data), "file/run")


@pytest.mark.parametrize(("flags", "words"), [
    ("--max-stepz 3", "--max-stepz.*--help"),
    ("--sequence-length 33", "longer than the 32 positions"),
    ("--n-head 3", "--n-embd 32 is not divisible by --n-head 3"),
    ("--device tpu", r"--device tpu .*cpu"),
    ("--data /no/such/folder", "/no/such/folder.*--data"),
    ("--max-steps many", "--max-steps.*many"),
    ("--preset huge", "'huge'.*--preset.*'gpt2-xl'"),
    ("--max-steps -1", "--max-steps"),
    ("--profile -1", "--profile must be 0 or more"),
    ("--data EMPTY", r"no shard \*_train_\*\.npy"),
    ("--data BAD", r"vocabulary\.json is corrupt"),
    (f"--seed {10**20}", "--seed must be 2147483647 or less"),
    ("--minibatch-size " + "1" * 5000, "--minibatch-size"),
    ("--weight-decay 1e400", "--weight-decay must be"),
    ("--data=~/no-such-data", f"{Path.home()}/no-such-data")])
def test_bad_flags(tmp_path, monkeypatch, parsed, flags, words):
    monkeypatch.chdir(tmp_path)
    Path("EMPTY").mkdir()
    (make_dataset(Path("BAD")) / "vocabulary.json").write_text("{}")
    with pytest.raises(UserError, match=words) as error:
        parsed("--preset", "tiny", *flags.split(), script=std)
    assert "\n" not in str(error.value)


SECOND = "test_train_000002.npy"


@pytest.mark.parametrize(("change", "words"), [
    (lambda data: np.save(data / SECOND, np.arange(100)),
     [SECOND, "int64", "not 1-D uint16"]),
    (lambda data: os.truncate(data / SECOND, 139), [SECOND, "rebuild it"]),
    (lambda data: os.truncate(data / SECOND, 9999),
     [SECOND, "longer than its header says"]),
    (lambda data: write_shards(data, [[1] * 8] * 3, [1] * 100),
     ["24 tokens of train are too few"]),
    (lambda data: write_shards(data, [[257] * 2500], [1] * 100),
     ["token 257", "vocabulary of 257"]),
    (lambda data: (data / "vocabulary.tiktoken").write_text("not base64"),
     ["vocabulary.tiktoken is corrupt"]),
    (lambda data: np.save(data / "x_train_val_0.npy", np.arange(9)),
     ["val_0.npy would be in both splits"]),
], ids=["dtype", "truncated", "longer", "short", "token", "vocabulary",
        "split"])
def test_bad_shards(tmp_path, change, words):
    data = make_dataset(tmp_path / "data")
    change(data)
    with pytest.raises(UserError) as error:
        check_shards(data, 32)
    assert all(word in str(error.value) for word in words)


def look_at_few(log):
    """A probe: less of a shard is looked at before a run."""
    @watched.replace(dataset, "check_shards")
    def check(check, folder, length, look=100):
        return check(folder, length, look)


@pytest.mark.parametrize(("stage", "mesh"), [
    ("std", (1, 1, 1)), ("ddp", (1, 2, 1)), ("lit", (1, 1, 1)), *(
        pytest.param(*place, marks=pytest.mark.whole) for place in (
            ("fsdp", (1, 2, 1)), ("3d", (1, 1, 2)), ("mpi", (1, 2, 1))))])
def test_a_token_that_no_look_has_found_is_one_line(stage, mesh, tmp_path):
    """Only the first tokens of a shard are looked at before a run.

    257 is in the padding of the embedding. A sharded one takes any number.
    """
    data = make_dataset(tmp_path / "data")
    tokens = np.tile(np.arange(256, dtype=np.uint16), 10)
    tokens[150] = 257
    np.save(data / "test_train_000001.npy", tokens)
    result = attempt(stage, tmp_path / "run", data=data, mesh=mesh,
                     probes=[look_at_few])
    assert all(rank.status for rank in result.ranks)
    assert ("test_train_000001.npy is corrupt (token 257 is not in the "
            "vocabulary of 257 tokens)") in result.err


def test_what_no_memory_holds_is_one_line():
    with pytest.raises(RuntimeError) as error:
        torch.empty(2**58)
    assert "out of memory" in explain(error.value)


@pytest.mark.whole
def test_a_run_of_another_model(data, tmp_path, parsed):
    other = tmp_path / "run"
    train("std", other, "--max-steps", 2, data=data)
    for flag, value, was in ("sequence-length", 16, 32), (
            "preset", "nano", "tiny"):
        with pytest.raises(UserError, match=f"--{flag} {was} .* {value}"):
            parsed("--run-dir", other, "--resume", f"--{flag}", value)
    wider = make_dataset(tmp_path / "wider")
    for file in wider.glob("vocabulary.*"):  # then it is GPT-2's
        file.unlink()
    refused(attempt("std", other, "--resume", "--max-steps", 4, data=wider),
            "a different model", "vocab_size 257, not 50257")
    refused(attempt("std", other, "--resume", "--n-layer", 3),
            "a different model (n_layer 4, not 3)")
    file = other / "hyperparameters.json"
    file.write_text(file.read_text()[:50])
    with pytest.raises(UserError, match=r"hyperparameters\.json is corrupt"):
        parsed("--run-dir", other, "--resume")


@pytest.mark.whole
def test_a_shape_and_a_prompt_of_ones_own(data, tmp_path):
    run = tmp_path / "run"
    flags = "--n-layer 1 --n-head 2 --n-embd 16 --block-size 64".split()
    first = train("std", run, *flags, "--sequence-length", 48, "--prompt",
                  "the cat", "--max-steps", 2, data=data, texts=True)
    assert first.out.count("\n> the cat") == 8
    config = dict(block_size=64, vocab_size=257, n_layer=1, n_head=2,
                  n_embd=16)
    assert first.checkpoint()["config"] == config
    assert "n_layer 1, n_head 2, n_embd 16, block_size 64" in first.out
    again = train("std", run, "--resume", "--max-steps", 4, "--prompt", "")
    assert again.checkpoint()["config"] == config
    file = next((run / "checkpoints").glob("*4.pt"))
    refused(attempt("std", tmp_path / "other", "--init", file, data=data),
            f"{file} is of a different model",
            "n_layer 1, not 4; n_head 2, not 4")


def test_a_folder_without_vocabulary_trains(tmp_path):
    """As other courses prepared them, or begin to; GPT-2's is elsewhere."""
    words = np.random.default_rng(0).integers(0, 50257, 1000)
    folder = write_shards(tmp_path / "edu_fineweb10B", [words], words,
                          name="edufineweb")
    (folder / "manifest.json").write_text('{"complete": false}')
    env = {**os.environ, "TIKTOKEN_CACHE_DIR": str(tmp_path)}
    result = train("std", tmp_path / "run", "--max-steps", 1, data=folder,
                   env=env, texts=True)
    assert "is incomplete" in result.err
    assert result.out.count("no generated text: ") == 1
    assert result.checkpoint()["config"]["vocab_size"] == 50257
