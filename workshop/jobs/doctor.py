"""Check that this machine has what the course needs, a line per answer.

It works without torch, too: then the questions that need torch say so. With
--ranks, under any launcher, it asks all ranks: see doctor_ranks.py. Run as a
script, it does an all-reduce: the doctor starts that as several processes.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from backstage import ROOT
from backstage.errors import UserError, explain, require, run_main
from backstage.process import count_cores
from rankcheck.system import errors
from workshop.as_torchrun import join_world
from workshop.diff.diff import Script, nearest, read_stages
from workshop.jobs import git
from workshop.jobs.interpreter import COURSE_PACKAGES, last_line
from workshop.jobs.originals import require_originals
from workshop.jobs.requirements import find_unmet
from workshop.stages import LESSONS, WORKING_COPY, require_writable

DISK_GB = 4.5  # GB: three times 124M parameters with AdamW's moments, in fp32
ACTIVATE = ("fix: run `source activate.sh` (which needs a network the first "
            "time)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", action="store_true", help="check all "
                        "processes that a launcher has started: whether they "
                        "reach each other, and how fast")


def main(args: argparse.Namespace) -> int:
    """Print the answers; return the exit status, 1 if anything fails."""
    if args.ranks:
        join_world()
        from workshop.jobs.doctor_ranks import ask_ranks

        ask_device()  # which says more, where torch finds no GPU
        return ask_ranks()
    questions = (
        ("course", ask_course), ("python", ask_python),
        ("environment", ask_environment), ("packages", ask_packages),
        ("device", ask_device), ("processes", ask_processes),
        ("MPI", ask_mpi),
        ("data", ask_data), ("vocabulary", ask_vocabulary),
        ("write access", ask_write_access), ("SLURM", ask_slurm))
    status = 0
    for name, ask in questions:
        try:
            sign, answer = "ok", ask()
        except ModuleNotFoundError as error:
            sign, answer = "FAIL", f"{error.name} is missing, see packages"
        except (UserError, errors.UserError, OSError, ImportError,
                RuntimeError) as error:
            sign = "FAIL"  # the last two: torch does not fit this machine
            answer = explain(error) or str(error).strip().partition("\n")[0]
        status |= sign != "ok"
        print(f"{sign:5}  {name}: {answer}", flush=True)
    return int(status)


def ask_course() -> str:
    require_originals()
    site = ROOT / "site.sh"
    return f"commit {name_commit()}; site file " + (
        str(site) if site.is_file() else f"none ({site} does not exist)")


def name_commit() -> str:
    """The commit of this clone; "-dirty" if files were changed since."""
    try:
        return git.run_git("describe", "--always", "--dirty", "--exclude=*")
    except UserError:
        return "unknown (not a git clone that you may read)"


def ask_python() -> str:
    version = ".".join(str(part) for part in sys.version_info[:3])
    require(sys.version_info >= (3, 10), f"{version}, {sys.executable}: a run "
            "needs 3.10 to 3.14; fix: load a module for it in site.sh (see "
            "site.example.sh)")
    return f"{version}, {sys.executable}"


def ask_environment() -> str:
    require(sys.prefix != sys.base_prefix, f"none is active; {ACTIVATE}")
    folder = Path(sys.prefix)
    if folder.stat().st_uid == os.getuid():
        return f"{folder} (yours)"
    try:
        owner = folder.owner()
    except KeyError:  # the user has no name on this machine
        owner = f"user {folder.stat().st_uid}"
    return f"{folder} (shared, {owner} keeps it up to date)"


def ask_packages() -> str:
    missing = [name for name in COURSE_PACKAGES
               if importlib.util.find_spec(name) is None]
    require(not missing, f"{', '.join(missing)} missing; {ACTIVATE}")
    answer = ", ".join(COURSE_PACKAGES)
    tests = ROOT / "tests" / "requirements.txt"
    if tests.is_file() and find_unmet("tests"):
        answer += "; for pytest: source activate.sh tests"
    return answer


def ask_device() -> str:
    import torch

    from backstage.device import device_name, find_gpu

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        gpu, built = find_gpu(), torch.version
        kind = (f"CUDA {built.cuda}" if built.cuda else f"ROCm {built.hip}"
                if built.hip else "XPUs" if built.xpu else "CPUs alone")
        require(not gpu, f"{gpu}, but PyTorch {torch.__version__} "
                f"(for {kind}) finds no usable GPU; "
                f"{name_driver()}; fix: name a build of PyTorch that fits in "
                "site.sh, for CUDA 12 if the driver is older than 580 (see "
                "site.example.sh)")
        return (f"torch {torch.__version__}, no accelerator: "
                f"{count_cores()} CPUs, enough for preset nano")
    count = torch.accelerator.device_count()
    name = device_name(torch.device(accelerator.type, 0))
    answer = f"torch {torch.__version__}, {count} x {name}"
    if accelerator.type == "cuda":
        answer += f", {name_libraries()}"
    return answer


def name_driver(root: Path = Path("/")) -> str:
    """The version of NVIDIA's driver, as part of a sentence."""
    try:
        text = (root / "proc/driver/nvidia/version").read_text()
    except OSError:
        return "no NVIDIA driver is loaded"
    # NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  <date>
    found = re.search(r"\s(\d+(\.\d+)+)\s", text)
    return f"the NVIDIA driver is {found[1] if found else 'unknown'}"


def name_libraries() -> str:
    """NCCL and cuDNN, as they are loaded, and where from.

    Those of a module for CUDA come before those that this PyTorch was built
    with, which pip has installed beside it.
    """
    import psutil
    import torch

    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    cudnn = torch.backends.cudnn.version()  # 91002 is 9.10.2
    major, rest = divmod(cudnn or 0, 10_000)
    names = [("NCCL", nccl, "libnccl.so"),
             ("cuDNN", f"{major}.{rest // 100}.{rest % 100}" if cudnn else
              "none", "libcudnn.so")]
    loaded = {part.path for part in psutil.Process().memory_maps()}
    answers = []
    for name, version, file in names:
        others = sorted(
            path for path in loaded if Path(path).name.startswith(file)
            and not Path(path).is_relative_to(Path(torch.__file__).parents[1]))
        answers.append(f"{name} {version}" + (
            f" (from {others[0]}, not the one that pip has installed)"
            if others else ""))
    return ", ".join(answers)


def ask_processes() -> str:
    """Check whether two processes reach each other."""
    import torch

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("127.0.0.1", 9))  # which sends nothing
        except OSError as error:
            raise UserError("this machine cannot connect to itself, as its "
                            "loopback interface is down; fix: ip link set lo "
                            "up") from error
    # with NCCL two processes cannot share a GPU: then use the CPU
    device = ("auto" if torch.accelerator.is_available()
              and torch.accelerator.device_count() > 1 else "cpu")
    return start_ranks(2, device)


def ask_mpi() -> str:
    """Whether mpirun starts more ranks than a small machine has cores."""
    from workshop.jobs.mpirun import Mpirun, require_mpirun

    try:
        require_mpirun()
    except errors.UserError as error:
        return f"{error}; only the lesson mpi needs it"
    import torch  # noqa: F401  # the ranks are forked with it

    return start_ranks(4, "by MPI", launcher=Mpirun())


def start_ranks(number: int, device: str, **options: Any) -> str:
    """Return the result of an all-reduce over N processes here."""
    from rankcheck.engine.ranks import launch
    from rankcheck.engine.scratch import scratch_folder

    begin = time.monotonic()
    with scratch_folder(b"\ninterrupted\n") as folder:
        ranks = launch(__file__, device, world_size=number, timeout=60,
                       within=folder, **options)
    require(all(rank.status == 0 for rank in ranks),
            f"{number} processes on this machine do not reach each other: "
            + last_line("\n".join(rank.err for rank in ranks),
                        "no answer after 60 s"))
    return (f"{''.join(rank.out for rank in ranks).strip()} in "
            f"{time.monotonic() - begin:.1f} s")


def ask_data() -> str:
    folders = [ROOT / "fineweb" / "demo", ROOT / "fineweb" / "edu_fineweb10B"]
    named = os.environ.get("WORKSHOP_DATA")
    if named:
        folders[1] = Path(named)
        require(folders[1].is_dir(), f"WORKSHOP_DATA is {named}, which does "
                "not exist; fix: correct it in site.sh")
    require(folders[0].is_dir(), f"no demo dataset; {ACTIVATE}")
    from backstage import dataset

    return "; ".join(
        "{} ({train:,} train + {val:,} val tokens)".format(
            folder, **dataset.check_shards(folder, 1))
        for folder in folders if folder.is_dir())


def ask_vocabulary() -> str:
    """Whether text can be generated without a network."""
    from backstage import dataset

    demo = dataset.load_vocabulary(ROOT / "fineweb" / "demo")
    gpt2 = ("GPT-2's is on this machine" if dataset.gpt2_is_cached() else
            "GPT-2's is not on this machine (activate.sh downloads it; "
            "datasets with their own do not need it)")
    return f"the demo dataset's has {demo.n_vocab:,} tokens; {gpt2}"


def ask_write_access() -> str:
    for folder in (ROOT / "code", ROOT / "runs"):
        while not folder.exists():
            folder = folder.parent
        require_writable(folder)
    free = shutil.disk_usage(ROOT).free / 1e9
    require(free > DISK_GB, f"{ROOT}: only {free:.1f} GB are free on this "
            f"disk, but a run of preset gpt2 needs {DISK_GB} GB for two "
            "checkpoints and part of a third; fix: free some space")
    return f"{ROOT}, {free:,.0f} GB free on this disk"


def ask_slurm() -> str:
    if not shutil.which("sbatch"):
        return "not on this machine" + (
            ", but PBS is: see batchfiles/README.md" if shutil.which("qsub")
            else ": start runs with torchrun")
    version = subprocess.run(["sbatch", "--version"], capture_output=True,
                             text=True, check=False)
    if version.returncode != 0:
        answer = version.stderr.strip().rpartition("\n")[2]
        raise UserError(
            f"SLURM does not answer ({answer}); fix: work without SLURM, "
            "which the lessons do not need: in a terminal, `python -m "
            f"workshop launch {suggest_stage()} -- --preset tiny` starts the "
            "script, and `python -m workshop cluster up` starts a SLURM on "
            "this machine")
    names = [f"{name}={value}" for name, value in sorted(os.environ.items())
             if name.startswith(("SBATCH_", "SALLOC_", "SLURM_"))
             and name.endswith(("_ACCOUNT", "_PARTITION", "_QOS",
                                "_RESERVATION"))]
    return f"{version.stdout.strip()}, " + (
        " ".join(names) or "no account or partition in the environment: "
        "name them in site.sh if your site wants them")


def suggest_stage() -> str:
    """Return a stage to launch: that of the working copy, or else ddp."""
    with contextlib.suppress(UserError):
        _, stage = nearest(Script(WORKING_COPY), read_stages())
        if stage in LESSONS:
            return stage
    return "ddp"


def all_reduce(device: str) -> None:
    """Sum a one from each rank; rank 0 prints how many there were, over what.

    device: "auto", "cpu", ..., or "by MPI".
    """
    if device == "by MPI":
        from backstage.mpi import MPI

        name, version = MPI.get_vendor()
        over, leave = f"{name} {'.'.join(map(str, version))}", MPI.Finalize
        rank, total = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.allreduce(1)
    else:
        import torch
        import torch.distributed as dist

        from backstage.device import use_device

        used = use_device(device, int(os.environ["LOCAL_RANK"]))
        over = dist.get_default_backend_for_device(used)
        dist.init_process_group(
            over, device_id=None if used.type == "cpu" else used)
        ones = torch.ones(1, device=used)
        dist.all_reduce(ones)
        rank, total = dist.get_rank(), int(ones.item())
        leave = dist.destroy_process_group
    if rank == 0:
        print(f"all-reduce over {total} processes with {over}")
    leave()


if __name__ == "__main__":
    run_main(lambda: all_reduce(sys.argv[1]))
