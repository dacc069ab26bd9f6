"""The device of a process, without one: fakes in the place of GPUs."""

import os
import platform
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import edit, needs
from stages import FOLDER, DieAfter, agree, train

from backstage import ROOT, cores, device, flags, flops, world
from backstage.errors import UserError, explain
from workshop.processes import free_port, launch
from workshop.stages import STAGES

sys.path.insert(0, str(ROOT / "solutions"))
import train_gpt2_3d as three_d
import train_gpt2_ddp as ddp
import train_gpt2_tp as tp

GOLDEN = FOLDER / "golden"
LAUNCHERS = ("SLURM_", "CUDA_", "OMP_", "RANK", "LOCAL_", "WORLD_SIZE")
no_accelerator = pytest.mark.skipif(
    torch.accelerator.is_available(), reason="this machine has a device")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    """No launcher, no SLURM, nothing hidden."""
    for name in list(os.environ):
        if name.startswith(LAUNCHERS):
            monkeypatch.delenv(name)
    yield
    os.environ.pop("OMP_NUM_THREADS", None)  # use_cores sets it


@pytest.fixture
def gpu(monkeypatch):
    """Makes torch take this machine for one with GPUs, as it is told."""
    def fake(count=4, name="NVIDIA A100-SXM4-40GB", gibibytes=39.4,
             bf16=True):
        accelerator = torch.device("cuda")
        for owner, attribute, value in (
                (torch.accelerator, "current_accelerator",
                 lambda check_available=False: accelerator),
                (torch.accelerator, "device_count", lambda: count),
                (torch.accelerator, "set_device_index", lambda index: None),
                (torch.cuda, "get_device_name", lambda device: name),
                (torch.cuda, "is_bf16_supported",
                 lambda including_emulation=True: bf16 or including_emulation),
                (torch.cuda, "get_device_properties",
                 lambda device: SimpleNamespace(
                     total_memory=int(gibibytes * 2**30)))):
            monkeypatch.setattr(owner, attribute, value)
    return fake


# ------------------------------------------- no silent training on the CPU


@pytest.mark.parametrize("environment, node, words", [
    ({"SLURM_GPUS_ON_NODE": "4"}, None, "SLURM gave"),
    ({"SLURM_JOB_GPUS": "0"}, None, "SLURM gave"),
    ({"SLURM_STEP_GPUS": "0,1"}, None, "SLURM gave"),
    ({"CUDA_VISIBLE_DEVICES": "0"}, None, "CUDA_VISIBLE_DEVICES=0"),
    ({}, "nvidia0", "has a GPU"),
    ({}, "nvidia3", "has a GPU"),
    ({}, None, None),
    ({"SLURM_GPUS_ON_NODE": "0"}, None, None),
    ({}, "nvidiactl", None),  # jobs without a GPU may see this one
    ({"CUDA_VISIBLE_DEVICES": "", "SLURM_GPUS_ON_NODE": "4"}, "nvidia0",
     None),
    ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, "nvidia0", None),
], ids=str)
def test_what_says_that_there_is_a_gpu(tmp_path, environment, node, words):
    (tmp_path / "dev").mkdir()
    if node:
        (tmp_path / "dev" / node).touch()
    found = device.find_gpu(environment, tmp_path)
    assert words in found if words else found == ""


def test_a_gpu_that_this_process_may_not_use(tmp_path, monkeypatch):
    """A job without GPUs on a node that has some."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert device.find_gpu({}, tmp_path) == ""


def test_the_driver_is_named(tmp_path):
    assert device.driver(tmp_path) == "no NVIDIA driver is loaded"
    file = tmp_path / "proc/driver/nvidia/version"
    file.parent.mkdir(parents=True)
    file.write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb "
        "22 01:44:30 UTC 2024\nGCC version:  gcc version 12.2.0 (Debian)\n")
    assert device.driver(tmp_path) == "the NVIDIA driver is 550.54.14"


@no_accelerator
@pytest.mark.parametrize("stage", [
    "ddp", *(pytest.param(name, marks=pytest.mark.whole)
             for name in ("std", "mpi", "lit"))])
def test_a_gpu_job_does_not_train_on_the_cpu(stage, tmp_path):
    script = STAGES[stage].solution
    words = ("--preset", "tiny", "--data", GOLDEN, "--run", tmp_path / "run")
    gpus = {**os.environ, "SLURM_GPUS_ON_NODE": "4"}
    by_mpi = STAGES[stage].launcher == "mpirun"
    if by_mpi:
        needs("mpirun")
    ranks = launch(script, *words, world_size=2, env=gpus, mpirun=by_mpi)
    # with MPI, the first one to fail ends the other
    assert [rank.status for rank in ranks] in ([1, 1], [1, -9] * by_mpi)
    (line,) = ranks[0].err.splitlines()
    for word in ("SLURM_GPUS_ON_NODE=4", torch.__version__, "driver",
                 "CUDA 12", "site.sh", "--device cpu"):
        assert word in line
    assert not (tmp_path / "run").exists()
    # said by the flag, it stays said when the run goes on
    (rank,) = launch(script, *words, "--device", "cpu", "--max-steps", 2,
                     env=gpus)
    assert rank.status == 0, rank.err
    (rank,) = launch(script, "--run", tmp_path / "run", "--resume",
                     "--max-steps", 3, env=gpus)
    assert rank.status == 0 and "device cpu" in rank.out, rank.err
    # the GPUs are hidden
    (rank,) = launch(script, *words[:4], "--run", tmp_path / "hidden",
                     "--max-steps", 2, env=gpus | {"CUDA_VISIBLE_DEVICES": ""})
    assert rank.status == 0, rank.err


# --------------------------------------------- one device for each process


def test_the_local_rank_says_which_device(gpu):
    gpu(count=4)
    assert device.use_device("auto", 3) == torch.device("cuda", 3)
    with pytest.raises(UserError, match="no more than 4 per node") as error:
        device.use_device("auto", 4)
    assert "--gpus-per-task" not in str(error.value)


def test_a_device_of_ones_own_is_named(gpu):
    gpu(count=1)
    assert device.use_device("auto", 0) == torch.device("cuda", 0)
    with pytest.raises(UserError, match=r"process 1 of this node.*--gpus-per-"
                       r"task.*--gpus-per-node instead.*CUDA_VISIBLE_DEVICES"):
        device.use_device("auto", 1)
    from backstage import lightning

    hp = SimpleNamespace(device="auto", strategy="ddp", compile=False)
    with pytest.raises(UserError, match="--gpus-per-task"):
        lightning.check_device(hp, 2)


def test_slices_of_a_gpu(gpu, monkeypatch):
    gpu(count=1, name="NVIDIA A100-SXM4-40GB MIG 1g.5gb")
    assert device.use_device() == torch.device("cuda", 0)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"NCCL.*MIG 1g\.5gb.*whole GPUs"):
        device.use_device()
    assert device.use_device("cpu") == torch.device("cpu")
    # MPI sends from the CPU's memory; each rank sees its own slice, or all one
    monkeypatch.setattr(world, "THE_GROUP", ["mpi4py's COMM_WORLD"])
    assert device.use_device("auto", 1) == torch.device("cuda", 0)


@pytest.mark.parametrize("name, bf16, fp32", [
    ("NVIDIA A100-SXM4-40GB", 312, 19.5),
    ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None, None),
    ("NVIDIA A10", 125, 31.2), ("NVIDIA A10G", 70, 31.2),
    ("NVIDIA RTX A6000", 154.8, 38.7),
    ("NVIDIA RTX 6000 Ada Generation", None, None),
    ("NVIDIA B200", 2250, 75), ("NVIDIA GB200", 2500, None),
    ("NVIDIA B300 SXM6 AC", 2250, 75), ("NVIDIA GB300", None, None),
])
def test_peaks(gpu, name, bf16, fp32):
    gpu(name=name)
    for precision, peak in (("bf16", bf16), ("fp32", fp32)):
        assert flops.peak_flops(torch.device("cuda", 0), precision) == (
            peak and pytest.approx(peak * 1e12))


@pytest.mark.parametrize("on, backend", [("cuda", "nccl"), ("cpu", "gloo")])
def test_the_group_is_told_the_device(monkeypatch, on, backend):
    """Gloo refuses a device, NCCL warns without one."""
    class Told(Exception):
        pass

    def init_process_group(*words, **options):
        raise Told(words, options)

    mine = torch.device(on, 2) if on == "cuda" else torch.device(on)
    monkeypatch.setattr(ddp, "parse", lambda *_: SimpleNamespace(device=""))
    monkeypatch.setattr(ddp, "use_device", lambda *_: mine)
    monkeypatch.setattr(ddp.dist, "init_process_group", init_process_group)
    for name, value in (("RANK", "2"), ("LOCAL_RANK", "2"),
                        ("WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    with pytest.raises(Told) as told:
        ddp.main()
    assert told.value.args == (
        (backend,), {"device_id": mine if on == "cuda" else None})


# ----------------------------------------------------------------- errors


@pytest.mark.parametrize("error, words", [
    (torch.AcceleratorError("CUDA error: an illegal memory access was "
                            "encountered\nCUDA kernel errors might be"),
     "the device failed (CUDA error: an illegal memory access was "
     "encountered): set CUDA_LAUNCH_BLOCKING=1"),
    (torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors"),
     "memory is full: try a smaller --microbatch-size"),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling "
                  "`cublasCreate(handle)`"),
     "memory is full: try a smaller --microbatch-size"),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"),
     "memory is full: try a smaller --microbatch-size"),
    (RuntimeError("a bug"), None), (RuntimeError(), None),
], ids=lambda value: str(value)[:40])
def test_errors_of_a_device(monkeypatch, error, words):
    line = explain(error)
    assert words in line if words else line is None
    assert "\n" not in (line or "")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")  # now the line is right
    if words and "failed" in words:
        assert explain(error) is None


FAILS = """\
import atexit, os, time
import torch.distributed as dist
from backstage.errors import require, run_main

def main():
    dist.init_process_group("gloo")
    atexit.register(wait_for_the_others)
    dist.barrier()
    require(os.environ["RANK"] == "0", "rank 1 has enough")
    dist.barrier()

def wait_for_the_others():  # as one that leaves an NCCL group does
    print("an exit handler ran", flush=True)
    time.sleep(60)

run_main(main)
"""


def test_an_error_on_one_rank_ends_all_at_once(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text(FAILS)
    port = str(free_port())
    ranks = [subprocess.Popen(
        [sys.executable, script], text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env={
            **os.environ, "PYTHONPATH": str(ROOT), "RANK": rank,
            "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_PORT": port,
            "MASTER_ADDR": "127.0.0.1"}) for rank in "01"]
    ended = [rank.communicate(timeout=45) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1]
    assert "error (rank 1): rank 1 has enough" in ended[1][1]
    assert "lost the other processes" in ended[0][1]
    assert not any("exit handler" in out for out, _ in ended)


# ---------------------------------------------------------- the microbatch


def parsed(monkeypatch, *words, script=ddp):
    monkeypatch.setattr(sys, "argv", ["x", "--data", str(GOLDEN), *words])
    return flags.parse(
        script.Hyperparameters, script.PRESETS, script.MODELS)


@pytest.mark.parametrize("gibibytes, size", [
    (139.8, 64), (79.1, 64), (44.4, 32), (39.4, 32), (22.0, 16), (15.7, 8)])
def test_the_microbatch_is_what_fits_into_the_device(
        monkeypatch, capsys, gpu, gibibytes, size):
    gpu(gibibytes=gibibytes)
    assert parsed(monkeypatch).microbatch_size == size
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("preset gpt2") and (
        f"microbatches of {size}" in line)
    hp = parsed(monkeypatch, "--precision", "fp32")
    assert hp.microbatch_size == size // 2
    assert parsed(monkeypatch, "--microbatch-size", "3").microbatch_size == 3


def test_a_gpu_that_emulates_bf16_trains_in_fp32(monkeypatch, capsys, gpu):
    """Such as a T4: torch says that it supports bf16."""
    gpu(name="Tesla T4", gibibytes=14.6, bf16=False)
    assert parsed(monkeypatch).precision == "fp32"
    said = capsys.readouterr()
    assert "no bf16 arithmetic), device cuda, fp32, " in said.out
    assert not said.err
    assert parsed(monkeypatch, "--precision", "bf16").precision == "bf16"
    (line,) = capsys.readouterr().err.splitlines()
    assert "Tesla T4 only emulates bf16" in line and "fp32" in line
    gpu()
    assert parsed(monkeypatch).precision == "bf16"


@pytest.mark.parametrize("stage", [tp, three_d], ids=["tp", "3d"])
@pytest.mark.parametrize("tensor, gibibytes, size", [
    (1, 139.8, 64), (1, 79.1, 32), (1, 44.4, 32), (1, 39.4, 16), (1, 15.7, 8),
    (2, 79.1, 64), (2, 39.4, 32), (4, 39.4, 32), (4, 15.7, 16)])
def test_the_microbatch_leaves_room_for_the_loss_of_split_logits(
        monkeypatch, gpu, stage, tensor, gibibytes, size):
    gpu(gibibytes=gibibytes)
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert parsed(monkeypatch, "--tensor-parallel", str(tensor),
                  script=stage).microbatch_size == size


@pytest.mark.parametrize("preset, pipeline, world_size, size", [
    ("gpt2", 1, 2, 64), ("gpt2", 2, 2, 32),  # 16 of the 512 samples
    ("gpt2", 2, 4, 16), ("gpt2", 4, 4, 16), ("gpt2", 4, 32, 2),
    ("gpt2", 12, 12, 4),  # the next below 512 / 96 that divides
    ("nano", 2, 2, 1),  # of 8 samples: 4 for each of the two
])
def test_a_pipeline_has_many_microbatches(
        monkeypatch, gpu, preset, pipeline, world_size, size):
    """At least 8 for each of its stages, where the minibatch has them."""
    gpu(gibibytes=139.8)
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    hp = parsed(monkeypatch, "--preset", preset, "--pipeline-parallel",
                str(pipeline), script=three_d)
    assert hp.microbatch_size == size


def test_lightning_shards_where_compiling_is_the_default(monkeypatch, gpu):
    gpu(gibibytes=139.8)
    script = pytest.importorskip("train_gpt2_lit")
    hp = parsed(monkeypatch, "--strategy", "fsdp2", script=script)
    assert hp.preset == "gpt2" and hp.compile
    assert script.lit.get_world(hp) == (0, 0, 1, 1)


@pytest.mark.parametrize("words, world_size, size", [
    (["--preset", "gpt2"], 8, 64),  # of the 64 that each has
    (["--preset", "gpt2"], 16, 32),
    (["--preset", "gpt2", "--minibatch-size", "96"], 2, 48),
    (["--preset", "gpt2", "--minibatch-size", "100"], 1, 50),
    (["--preset", "nano"], 1, 8), (["--preset", "nano"], 2, 4),
    (["--preset", "nano"], 8, 1),
    (["--preset", "nano"], 3, 2),  # the script says that 8 has no third
    (["--preset", "nano"], 16, 1),
    (["--preset", "tiny"], 1, 2), (["--preset", "tiny"], 8, 1),
])
def test_the_microbatch_divides(monkeypatch, gpu, words, world_size, size):
    gpu(gibibytes=79.1)
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    assert parsed(monkeypatch, *words).microbatch_size == size
    monkeypatch.undo()
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    if "gpt2" not in words:
        hp = parsed(monkeypatch, *words, "--device", "cpu")
        assert hp.microbatch_size == size


def test_a_resumed_run_keeps_its_microbatch(tmp_path):
    """As far as it divides in the new world; a flag wins."""
    single = train("std", tmp_path / "single", data=GOLDEN)
    run = tmp_path / "run"

    def go_on(stage, *words, **options):
        result = train(stage, run, *words, **options)
        (size,) = re.findall(r"microbatches of (\d)", result.out)
        return result, size

    _, size = go_on("std", "--microbatch-size", 4, "--checkpoint-every", 7,
                    data=GOLDEN, observe=DieAfter(7))
    assert size == "4"
    _, size = go_on("std", "--resume", "--max-steps", 20, observe=DieAfter(2))
    assert size == "4"
    _, size = go_on("ddp", "--resume", world_size=4, observe=DieAfter(7))
    assert size == "2"
    result, size = go_on("std", "--resume", "--microbatch-size", 8)
    assert size == "8"
    agree(result, single)


def test_devices_of_different_memory_are_named(tmp_path):
    """Each rank chooses for itself, before they know each other."""
    script = tmp_path / "train_gpt2.py"
    line = '    world_size = int(os.environ["WORLD_SIZE"])\n'
    script.write_text(edit(
        STAGES["ddp"].solution.read_text(),
        (line, line + "    hp.microbatch_size = 1 + rank\n")))
    ranks = launch(script, "--preset", "tiny", "--device", "cpu", "--data",
                   GOLDEN, "--run", tmp_path / "run", world_size=2)
    assert [rank.status for rank in ranks] == [1, 1]
    assert "1 to 2 samples" in ranks[0].err
    assert "add --microbatch-size 1" in ranks[0].err


# -------------------------------------------------------------- the memory


FAULTS = """
import resource, sys, torch
from backstage.device import keep_memory
if "kept" in sys.argv:
    keep_memory()
for _ in range(40):  # it takes some until one lies where another was
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(12_000_000)  # 48 MB
    last = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(last)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_memory_is_kept_for_the_next_tensor():
    """Counted in pages that the system had to hand out."""
    given, kept = (int(subprocess.run(
        [sys.executable, "-c", FAULTS, word], check=True, cwd=ROOT,
        stdout=subprocess.PIPE).stdout) for word in ("given", "kept"))
    assert 10 * kept < given, (kept, given)


def test_the_memory_of_a_device(monkeypatch, gpu, tmp_path):
    gpu(gibibytes=39.4)
    mine = torch.device("cuda", 1)
    for name, size in (("allocated", 15.5), ("reserved", 17)):
        monkeypatch.setattr(
            torch.cuda, f"max_memory_{name}",
            lambda device, size=size: int(size * 2**30) * (device == mine))
    assert device.peak_memory(mine) == (15.5 * 2**30, 17 * 2**30)
    assert device.describe_memory(15.5 * 2**30, mine) == "15.5 GiB (39%)"
    # of a CPU, the process's own
    cpu = torch.device("cpu")
    file = tmp_path / "status"
    file.write_text("VmPeak:\t  900 kB\nVmHWM:\t  123456 kB\nVmRSS: 1 kB\n")
    assert device.resident_memory(file) == 123456 * 1024
    assert 2**25 < device.resident_memory(tmp_path / "none") < 2**42
    assert device.describe_memory(2**29, cpu) == "0.5 GiB"
    before, reserved = device.peak_memory(cpu)
    large = torch.ones(2**26)  # 256 MiB
    assert device.peak_memory(cpu)[0] > before - 2**27 and reserved is None
    assert device.peak_memory(cpu)[0] > large.nbytes


# --------------------------------------------------------------- the copy


def test_one_copy_from_pinned_memory(monkeypatch):
    data = ddp.DataIterator(ddp.get_shards(GOLDEN, "train"), 2, 32, 0, 1)
    batch = next(data)
    assert batch.shape == (2, 2, 32) and batch.is_contiguous()
    assert not batch.is_pinned()

    pinned = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory",
                        lambda tensor: pinned.append(tensor) or tensor)
    batch = next(data)
    assert pinned == [batch]

    copies = []

    class Batch:
        def is_pinned(self):
            return True

        def to(self, device, non_blocking):
            copies.append((device, non_blocking))
            return batch

    cpu = torch.device("cpu")
    x, y = ddp.training_step(lambda *batch: batch, Batch(), cpu, "fp32")
    assert copies == [(cpu, True)]
    assert torch.equal(x[:, 1:], y[:, :-1])


# ---------------------------------------------------------------- threads


def write_cgroup(root, lines, limits):
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("\n".join(lines) + "\n")
    for name, text in limits.items():
        file = root / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    return root


@pytest.mark.parametrize("lines, limits, quota", [
    (["0::/"], {}, 64), (["0::/"], {"cpu.max": "max 100000"}, 64),
    (["0::/"], {"cpu.max": "200000 100000"}, 2),
    (["0::/a/b"], {"a/cpu.max": "150000 100000",
                   "a/b/cpu.max": "max 100000"}, 1.5),
    (["0::/a/b"], {"a/cpu.max": "400000 100000",
                   "a/b/cpu.max": "300000 100000"}, 3),
    # the host's path, in a container that does not see it
    (["0::/system.slice/docker-1"], {"cpu.max": "200000 100000"}, 2),
    (["4:cpu,cpuacct:/", "3:cpuset:/"], {"cpu/cpu.cfs_quota_us": "-1",
                                         "cpu/cpu.cfs_period_us": "100000"},
     64),
    (["4:cpu,cpuacct:/docker/1"], {"cpu/cpu.cfs_quota_us": "250000",
                                   "cpu/cpu.cfs_period_us": "100000"}, 2.5),
    (["4:cpu:/a", "0::/"], {"cpu/a/cpu.cfs_quota_us": "200000",
                            "cpu/a/cpu.cfs_period_us": "100000"}, 2),
    (["0::/"], {"cpu.max": "nonsense"}, 64),
], ids=str)
def test_what_the_cgroups_allow(tmp_path, monkeypatch, lines, limits, quota):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert cores.quota(write_cgroup(tmp_path, lines, limits)) == quota
    assert cores.quota(tmp_path / "not Linux") == 64


@pytest.mark.parametrize("mine, parents, processes, allowed, count", [
    (64, 64, 1, 64, 64), (64, 64, 4, 64, 16), (64, 64, 1, 2, 2),
    (64, 64, 4, 2, 1), (8, 64, 4, 64, 8),  # srun has bound each to 8
    (8, 8, 4, 64, 2),  # torchrun's share what it has
    (8, 64, 4, 12, 3), (1, 64, 4, 64, 1), (64, 64, 1, 2.5, 2)])
def test_a_share_of_the_cores(
        monkeypatch, mine, parents, processes, allowed, count):
    monkeypatch.setattr(cores, "affinity",
                        lambda process: parents if process else mine)
    monkeypatch.setattr(cores, "quota", lambda root: allowed)
    assert cores.count_cores(processes) == count


def test_threads_are_set_unless_the_user_has(monkeypatch):
    used = []
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 32)
    monkeypatch.setattr(cores, "count_cores", lambda n: 64 // n)
    monkeypatch.setattr(cores, "CHOSEN", [])
    cores.use_cores(4)
    assert used == [16] and os.environ["OMP_NUM_THREADS"] == "16"
    cores.use_cores(8)  # Lightning starts more of them than were here
    assert used == [16, 8] and os.environ["OMP_NUM_THREADS"] == "8"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")  # somebody has set it
    cores.use_cores(4)
    assert used == [16, 8]
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    cores.use_cores(1)  # never more than torch takes by itself
    assert used == [16, 8, 32]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux")
def test_a_real_process_keeps_to_its_core():
    program = ("import os, torch; os.sched_setaffinity(0, "
               "list(os.sched_getaffinity(0))[:1]); "
               "from backstage.cores import use_cores; use_cores(); "
               "print(torch.get_num_threads())")
    done = subprocess.run([sys.executable, "-c", program], text=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT)},
                          capture_output=True)
    assert done.stdout == "1\n", done.stderr
