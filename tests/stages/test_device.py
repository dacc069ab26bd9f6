"""The device of a process, without one: fakes in the place of GPUs."""

import errno
import os
import platform
import re
from types import SimpleNamespace

import pytest
import torch
import train_gpt2_3d as three_d
import train_gpt2_ddp as ddp
from conftest import program
from stages import attempt, edited, refused, train

from backstage import ROOT, device, flops, process, world
from backstage.errors import UserError, explain
from rankcheck.engine.ranks import launch

LAUNCHERS = ("SLURM_", "CUDA_", "OMP_", "RANK", "LOCAL_", "WORLD_SIZE")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    """No launcher, no SLURM, nothing hidden."""
    for name in list(os.environ):
        if name.startswith(LAUNCHERS):
            monkeypatch.delenv(name)


# ------------------------------------------- no silent training on the CPU


@pytest.mark.parametrize("environment, node, words", [
    ({"SLURM_GPUS_ON_NODE": "4"}, None, "has GPUs"),
    ({"SLURM_JOB_GPUS": "0"}, None, "has GPUs"),
    ({"SLURM_STEP_GPUS": "0,1"}, None, "has GPUs"),
    ({"CUDA_VISIBLE_DEVICES": "0"}, None, "CUDA_VISIBLE_DEVICES=0"),
    ({}, "nvidia3", "has a GPU"),
    ({}, None, None),
    ({"SLURM_GPUS_ON_NODE": "0"}, None, None),
    ({}, "nvidiactl", None),  # jobs without a GPU may see this one
    ({"CUDA_VISIBLE_DEVICES": "", "SLURM_GPUS_ON_NODE": "4"}, "nvidia0",
     None),
    ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, "nvidia0", None),
    ({"CUDA_VISIBLE_DEVICES": "0", "SLURM_GPUS_ON_NODE": "1",
      "WORKSHOP_GPUS": "simulated"}, "nvidia0", None),
], ids=str)
def test_what_says_that_there_is_a_gpu(
        tmp_path, monkeypatch, environment, node, words):
    (tmp_path / "dev").mkdir()
    if node:
        (tmp_path / "dev" / node).touch()
    found = device.find_gpu(environment, tmp_path)
    assert words in found if words else found == ""
    # a job without GPUs on a node that has some
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert not node or device.find_gpu(environment, tmp_path) == ""


@pytest.mark.skipif(
    torch.accelerator.is_available(), reason="this machine has a device")
def test_a_gpu_job_does_not_train_on_the_cpu(
        parsed, single, capsys, monkeypatch):
    from backstage import lightning

    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "4")
    with pytest.raises(UserError, match=(
            r"\(SLURM_GPUS_ON_NODE=4\).* PyTorch "
            + re.escape(torch.__version__)
            + ".*fits the driver.*--device cpu")):
        parsed()
    with pytest.raises(UserError, match="has GPUs"):
        lightning.get_world(SimpleNamespace(device="auto", devices=1))
    # said by the flag, it stays said when the run goes on; the GPUs are hidden
    parsed("--device", "cpu")
    parsed("--run-dir", single.folder, "--resume")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    parsed()
    assert capsys.readouterr().out.count(", device cpu, ") == 3


# --------------------------------------------- one device for each process


def test_the_local_rank_says_which_device(gpu, monkeypatch):
    gpu(count=4)
    assert device.use_device("auto", 3) == torch.device("cuda", 3)
    with pytest.raises(UserError, match="at most 4 per node") as error:
        device.use_device("auto", 4)
    assert "--gpus-per-task" not in str(error.value)
    gpu(count=1)
    assert device.use_device("auto", 0) == torch.device("cuda", 0)
    with pytest.raises(UserError, match=r"local rank 1.*--gpus-per-"
                       r"task.*--gpus-per-node instead.*CUDA_VISIBLE_DEVICES"):
        device.use_device("auto", 1)
    from backstage import lightning

    hp = SimpleNamespace(device="auto", devices=2)
    with pytest.raises(UserError, match="--gpus-per-task"):
        lightning.get_world(hp)
    # slices of a GPU
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
    ("NVIDIA RTX 6000 Ada Generation", None, None),
    ("Tesla V100-SXM2-16GB", 15.7, 15.7), ("Tesla V100-PCIE-32GB", 14, 14),
    ("NVIDIA GH200 480GB", 989, 67), ("AMD Instinct MI300A", 981, 122.6),
    ("AMD Instinct MI325X", 1307, 163.4), ("AMD Instinct MI355X", 2517, 157.3),
    ("NVIDIA GB200", 2500, None)])
def test_peaks(gpu, name, bf16, fp32):
    gpu(name=name)
    for precision, peak in (("bf16", bf16), ("fp32", fp32)):
        assert flops.peak_flops(torch.device("cuda", 0), precision) == (
            peak and pytest.approx(peak * 1e12))


# ----------------------------------------------------------------- errors


def in_a_pipeline(cause):
    """The error that a schedule raises in the place of any other."""
    error = RuntimeError("[Stage 1] failed to run forward")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize("error, words", [
    (torch.AcceleratorError("CUDA error: an illegal memory access was "
                            "encountered\nCUDA kernel errors might be"),
     "the device failed (CUDA error: an illegal memory access was "
     "encountered); fix: set CUDA_LAUNCH_BLOCKING=1"),
    (torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors"),
     "out of memory on the device; fix: use a smaller --microbatch-size"),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling "
                  "`cublasCreate(handle)`"),
     "out of memory on the device; fix: use a smaller --microbatch-size"),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"),
     "out of memory on the device; fix: use a smaller --microbatch-size"),
    (RuntimeError("a bug"), None), (RuntimeError(), None),
    # gloo's: one that the others are gone, and two that they are not
    (RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer "
                  "[127.0.0.1]:58601. This is typically"), "lost the other"),
    (RuntimeError("[enforce fail at gloo/transport/tcp/device.cc:84] ifa != "
                  "nullptr. Unable to find address for: ib0"),
     "GLOO_SOCKET_IFNAME names ib0, which is not a network interface of "
     "this machine; fix: unset it, or name one of lo"),
    (RuntimeError("[enforce fail at gloo/transport/tcp/loop.cc:105] fd_ != "
                  "-1. -1 vs -1. epoll_create: Too many open files"),
     "fix: raise it: ulimit -n 4096"),
    (RuntimeError("[enforce fail at gloo/transport/tcp/pair.cc:456] Received "
                  "data size doesn't match"), "distributed failed: [enforce"),
    # no other process has been met yet
    (torch.distributed.DistNetworkError(
        "The client socket has timed out after 15000ms while trying to "
        "connect to (127.0.0.1, 23457)."), "distributed failed: The client"),
    (torch.distributed.DistBackendError(
        "NCCL error in: NCCLUtils.cpp:77, remote process exited or there was "
        "a network error\nLast error:\nsocketProgress: Connection closed by "
        "remote peer n1<4>"), "lost the other processes"),
    (torch.distributed.DistBackendError(
        "NCCL error in: NCCLUtils.cpp:77, invalid usage\nLast error:\n"
        "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device"),
     "invalid usage ... Duplicate GPU detected"),
    (in_a_pipeline(torch.OutOfMemoryError("CUDA out of memory")),
     "--microbatch-size"),
    (in_a_pipeline(ValueError("a bug")), None),
], ids=lambda value: str(value)[:40])
def test_errors_of_a_device(monkeypatch, error, words):
    line = explain(error)
    assert words in line if words else line is None
    assert "\n" not in (line or "")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")  # now the line is right
    if words and words.startswith("the device failed"):
        assert explain(error) is None


@pytest.mark.parametrize("writable", [True, False])
def test_a_file_that_is_denied(writable, monkeypatch):
    """The clone is another's only if nothing in it can be written."""
    monkeypatch.setattr(os, "access", lambda *_: writable)
    line = explain(PermissionError(
        errno.EACCES, "Permission denied", str(ROOT / "runs")))
    assert line == f"{ROOT}/runs: Permission denied" + (
        "; fix: work in a clone of your own" * (not writable))


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
    script = program(tmp_path / "fails.py", FAILS)
    ranks = launch(script, world_size=2, timeout=50)
    assert [rank.status for rank in ranks] == [1, 1]
    assert "error (rank 1): rank 1 has enough" in ranks[1].err
    assert "lost the other processes" in ranks[0].err
    assert not any(rank.out for rank in ranks)


# ---------------------------------------------------------- the microbatch


@pytest.mark.parametrize("gibibytes, size", [
    (139.8, 64), (44.4, 32), (39.4, 32), (22.0, 16), (15.7, 8)])
def test_the_microbatch_is_what_fits_into_the_device(
        parsed, capsys, gpu, gibibytes, size):
    gpu(gibibytes=gibibytes)
    assert parsed().microbatch_size == size
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("preset gpt2") and (
        f"microbatches of {size}" in line)
    hp = parsed("--precision", "fp32")
    assert hp.microbatch_size == size // 2
    assert parsed("--microbatch-size", "3").microbatch_size == 3


@pytest.mark.parametrize("script, words, world_size, gibibytes, size", [
    (ddp, "--preset gpt2", 8, 79.1, 64),  # of the 64 that each has
    (ddp, "--preset gpt2", 16, 79.1, 32),
    (ddp, "--preset gpt2 --minibatch-size 96", 2, 79.1, 48),
    (ddp, "--preset gpt2 --minibatch-size 100", 1, 79.1, 50),
    *((ddp, f"--preset {preset} --device cpu", world_size, 79.1, size)
      for preset, world_size, size in (
          ("nano", 1, 8), ("nano", 16, 1), ("tiny", 1, 2), ("tiny", 8, 1),
          ("nano", 3, 2))),  # the script says that 8 has no third
    # room for the loss of split logits
    *((three_d, f"--tensor-parallel {tensor}", 4, gibibytes, size)
      for tensor, gibibytes, size in (
          (1, 79.1, 32), (1, 15.7, 8), (2, 79.1, 64), (4, 15.7, 16))),
    # at least 8 microbatches for each pipeline stage, where there are so many
    *((three_d, f"--preset {preset} --pipeline-parallel {pipeline}",
       world_size, 139.8, size)
      for preset, pipeline, world_size, size in (
          ("gpt2", 1, 2, 64), ("gpt2", 2, 4, 16),
          ("gpt2", 12, 12, 4),  # the next below 512 / 96 that divides
          ("nano", 2, 2, 1)))])  # of 8 samples: 4 for each of the two
def test_the_microbatch_divides(
        parsed, monkeypatch, gpu, script, words, world_size, gibibytes,
        size):
    gpu(gibibytes=gibibytes)
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    hp = parsed(*words.split(), script=script)
    assert hp.microbatch_size == size


def test_a_gpu_that_emulates_bf16_trains_in_fp32(parsed, capsys, gpu):
    """Such as a T4: torch says that it supports bf16."""
    gpu(name="Tesla T4", gibibytes=14.6, bf16=False)
    assert parsed().precision == "fp32"
    said = capsys.readouterr()
    assert "no bf16 arithmetic), device cuda, fp32, " in said.out
    assert not said.err
    assert parsed("--precision", "bf16").precision == "bf16"
    (line,) = capsys.readouterr().err.splitlines()
    assert "Tesla T4 only emulates bf16" in line and "fp32" in line
    gpu()
    assert parsed().precision == "bf16"


def test_lightning_shards_where_compiling_is_the_default(parsed, gpu):
    gpu(gibibytes=139.8)
    script = pytest.importorskip("train_gpt2_lit")
    hp = parsed("--strategy", "fsdp2", script=script)
    assert hp.preset == "gpt2" and hp.compile
    assert script.lit.get_world(hp) == (0, 0, 1, 1)


def test_a_resumed_run_keeps_its_microbatch(parsed, monkeypatch, single):
    """As far as it divides in the new world; a flag wins."""
    words = "--resume", "--run-dir", str(single.folder)  # of 2 samples
    for size, world_size, *more in (
            (2, "1"), (1, "8"), (4, "1", "--microbatch-size", "4")):
        monkeypatch.setenv("WORLD_SIZE", world_size)
        assert parsed(*words, *more).microbatch_size == size


def test_devices_of_different_memory_are_named(data, tmp_path):
    """Each rank chooses for itself, before they know each other."""
    line = '    world_size = int(os.environ["WORLD_SIZE"])\n'
    script = edited(tmp_path, "ddp", (
        line, line + "    hp.microbatch_size = 1 + rank\n"))
    result = attempt("ddp", tmp_path / "run", data=data, world_size=2,
                     script=script)
    refused(result, "1 to 2 samples", "add --microbatch-size 1")


# -------------------------------------------------------------- the memory


@pytest.mark.whole
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_memory_is_kept_and_threads_keep_to_their_core(tmp_path):
    """Counted in pages that the system had to hand out."""
    script = tmp_path / "counts.py"
    script.write_text("""
import os, resource, torch
from backstage.process import keep_memory, use_cores

def faults():
    for _ in range(40):  # it takes some until one lies where another was
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(12_000_000)  # 48 MB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(faults())
keep_memory()
print(faults())
os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1])
use_cores()
print(torch.get_num_threads())
""")
    rank, = launch(script, threads=2)
    given, kept, threads = map(int, rank.out.split())
    assert 10 * kept < given and threads == 1, rank.err


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
    large = torch.ones(2**26)  # 256 MiB
    assert device.peak_memory(cpu)[0] > large.nbytes
    assert device.peak_memory(cpu)[1] is None


# --------------------------------------------------------------- the copy


def test_one_copy_from_pinned_memory(data, monkeypatch):
    samples = ddp.DataIterator(ddp.get_shards(data, "train"), 2, 32, 0, 1)
    assert next(samples).shape == (2, 2, 32)
    pinned, copies = [], []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory",
                        lambda tensor: pinned.append(tensor) or tensor)
    batch = next(samples)
    assert pinned == [batch] and batch.is_contiguous()
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    monkeypatch.setattr(torch.Tensor, "to", lambda *args, **options: (
        copies.append((args, options)) or batch))
    x, y = ddp.training_step(
        lambda *batch: batch, batch, torch.device("cpu"), "fp32")
    assert copies == [((batch, torch.device("cpu")), {"non_blocking": True})]
    assert torch.equal(x[:, 1:], y[:, :-1])


# ---------------------------------------------------------------- threads


@pytest.mark.parametrize("lines, limits, quota", [
    (["0::/"], {}, 64), (["0::/"], {"cpu.max": "max 100000"}, 64),
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
    (["0::/"], {"cpu.max": "nonsense"}, 64),
], ids=str)
def test_what_the_cgroups_allow(tmp_path, monkeypatch, lines, limits, quota):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    files = {"proc/self/cgroup": "\n".join(lines)} | {
        f"sys/fs/cgroup/{name}": text for name, text in limits.items()}
    for name, text in files.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    assert process.quota(tmp_path) == quota
    assert process.quota(tmp_path / "not Linux") == 64


@pytest.mark.parametrize("mine, parents, processes, allowed, count", [
    (64, 64, 1, 64, 64), (64, 64, 4, 64, 16), (64, 64, 1, 2, 2),
    (64, 64, 4, 2, 1), (8, 64, 4, 64, 8),  # srun has bound each to 8
    (8, 8, 4, 64, 2),  # torchrun's share what it has
    (8, 64, 4, 12, 3), (1, 64, 4, 64, 1), (64, 64, 1, 2.5, 2)])
def test_a_share_of_the_cores(
        monkeypatch, mine, parents, processes, allowed, count):
    monkeypatch.setattr(process, "affinity",
                        lambda process: parents if process else mine)
    monkeypatch.setattr(process, "quota", lambda root: allowed)
    assert process.count_cores(processes) == count


def test_threads_are_set_unless_the_user_has(monkeypatch):
    used = []
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 32)
    monkeypatch.setattr(process, "count_cores", lambda n: 64 // n)
    monkeypatch.setattr(process, "CHOSEN", [])
    process.use_cores(4)
    assert used == [16] and os.environ["OMP_NUM_THREADS"] == "16"
    process.use_cores(8)  # Lightning starts more of them than were here
    assert used == [16, 8] and os.environ["OMP_NUM_THREADS"] == "8"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")  # somebody has set it
    process.use_cores(4)
    assert used == [16, 8]
    with monkeypatch.context() as simulated:  # SLURM counts unreal cores
        simulated.setenv("WORKSHOP_GPUS", "simulated")
        process.use_cores(16)
        assert used.pop() == 4
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    process.use_cores(1)  # never more than torch takes by itself
    assert used == [16, 8, 32]


@pytest.mark.whole
@pytest.mark.parametrize(("precision", "length", "fused"), [
    ("bf16", 128, False), ("bf16", 256, True), ("fp32", 128, True)])
def test_a_cpu_computes_attention_the_faster_way(
        precision, length, fused, data, tmp_path):
    """And what it learns is the same, as far as bf16 goes."""
    def run(name, before=""):
        script = edited(tmp_path, "std", ("run.begin()", f"""{before}
    print("fused", torch.backends.cuda.flash_sdp_enabled())
    run.begin()"""))
        return train("std", tmp_path / name, "--precision", precision,
                     "--block-size", length, "--sequence-length", length,
                     "--max-steps", 3, data=data, texts=False, script=script)

    mine = run("mine")
    assert f"fused {fused}\n" in mine.out
    if not fused:
        other = run("other", "torch.backends.cuda.enable_flash_sdp(True)")
        assert "fused True\n" in other.out
        for column in "loss", "norm":
            assert mine.column(column) == pytest.approx(
                other.column(column), rel=2e-3)
