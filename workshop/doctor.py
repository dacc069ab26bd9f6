"""Is everything there that the workshop needs? A line for each answer.

Without torch, too: then what needs it says so. Started as several processes,
by srun or torchrun, it asks whether they reach each other, and how fast. Run
as a script, it is what the doctor starts as two processes: an all-reduce.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from workshop import ROOT
from workshop.environment import PACKAGES
from workshop.errors import UserError, check, explain
from workshop.launchers import name_ranks

ACTIVATE = "run `source activate.sh`, where there is a network the first time"


def main():
    """Print the answers; the exit status is 1 if something is to be done."""
    name_ranks()
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        return ask_ranks()
    questions = (
        ("python", ask_python), ("environment", ask_environment),
        ("packages", ask_packages), ("device", ask_device),
        ("processes", ask_processes), ("data", ask_data),
        ("vocabulary", ask_vocabulary), ("write access", ask_write_access),
        ("SLURM", ask_slurm))
    status = 0
    for name, ask in questions:
        try:
            sign, answer = "ok", ask()
        except ModuleNotFoundError as error:
            sign, answer = "TO DO", f"{error.name} is missing, see packages"
        except (UserError, OSError, ImportError, RuntimeError) as error:
            sign = "TO DO"  # the last two: a torch that does not fit here
            answer = explain(error) or str(error).strip().partition("\n")[0]
        status |= sign != "ok"
        print(f"{sign:5}  {name}: {answer}", flush=True)
    return int(status)


def ask_python():
    """Which Python this is."""
    version = ".".join(str(part) for part in sys.version_info[:3])
    check(sys.version_info >= (3, 10), f"{version}, {sys.executable}: a run "
          "needs 3.10 or newer: load its module in site.sh (see "
          "site.example.sh)")
    return f"{version}, {sys.executable}"


def ask_environment():
    """Which environment is active, and whose it is."""
    check(sys.prefix != sys.base_prefix, f"none is active: {ACTIVATE}")
    folder = Path(sys.prefix)
    if folder.stat().st_uid == os.getuid():
        return f"{folder} (yours)"
    try:
        owner = folder.owner()
    except KeyError:  # a number that has no name here
        owner = f"user {folder.stat().st_uid}"
    return f"{folder} (shared, {owner} keeps it up to date)"


def ask_packages():
    """Which packages are missing."""
    missing = [name for name in PACKAGES
               if importlib.util.find_spec(name) is None]
    check(not missing, f"{', '.join(missing)} missing: {ACTIVATE}")
    return ", ".join(PACKAGES)


def ask_device():
    """What torch computes on here."""
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return (f"torch {torch.__version__}, no accelerator: "
                f"{os.cpu_count()} CPUs, enough for preset nano")
    from workshop.run import device_name

    count = torch.accelerator.device_count()
    name = device_name(torch.device(accelerator.type, 0))
    return f"torch {torch.__version__}, {count} x {name}"


def ask_processes():
    """Whether two processes reach each other."""
    import torch

    from workshop.ranks import launch

    # two processes cannot share a GPU in NCCL: then the CPU has to do
    device = ("auto" if torch.accelerator.is_available()
              and torch.accelerator.device_count() > 1 else "cpu")
    begin = time.monotonic()
    ranks = launch(__file__, device, world_size=2, timeout=60)
    lines = [line for rank in ranks for line in rank.err.splitlines()]
    check(all(rank.status == 0 for rank in ranks),
          "two processes of this machine do not reach each other: "
          + (lines[-1] if lines else "no answer after 60 s"))
    return f"{ranks[0].out.strip()} in {time.monotonic() - begin:.1f} s"


def ask_data():
    """Which datasets are there, and how many tokens they have."""
    folders = [ROOT / "fineweb" / "demo", ROOT / "fineweb" / "edu_fineweb10B"]
    named = os.environ.get("WORKSHOP_DATA")
    if named:
        folders[1] = Path(named)
        check(folders[1].is_dir(), f"{named}, which WORKSHOP_DATA names, is "
              "not there: mend it in site.sh")
    check(folders[0].is_dir(), f"no demo dataset: {ACTIVATE}")
    return "; ".join(
        f"{folder} ({count_tokens(folder, 'train'):,} train + "
        f"{count_tokens(folder, 'val'):,} val tokens)"
        for folder in folders if folder.is_dir())


def count_tokens(folder, split):
    """How many tokens a split of the dataset has."""
    shards = sorted(folder.glob(f"*_{split}_*.npy"))
    check(shards, f"{folder}: there is no shard *_{split}_*.npy: make the "
          "dataset again")
    import numpy as np

    try:
        return sum(len(np.load(shard, mmap_mode="r")) for shard in shards)
    except (ValueError, EOFError, TypeError) as error:
        raise UserError(f"{folder}: a shard is damaged, make the dataset "
                        f"again ({error})") from error


def ask_vocabulary():
    """Whether texts can be generated without a network."""
    from workshop import vocabulary

    demo = vocabulary.load(ROOT / "fineweb" / "demo")
    gpt2 = ("GPT-2's is on this machine" if vocabulary.gpt2_is_cached() else
            "GPT-2's is not on this machine (activate.sh fetches it where "
            "there is a network; datasets with their own do without)")
    return f"the demo dataset's has {demo.n_vocab:,} tokens; {gpt2}"


def ask_write_access():
    """Whether runs and edited scripts can be written."""
    for folder in (ROOT / "code", ROOT / "runs"):
        while not folder.exists():
            folder = folder.parent
        check(os.access(folder, os.W_OK | os.X_OK), f"{folder} cannot be "
              "written: work in a clone of your own")
    free = shutil.disk_usage(ROOT).free / 2**30
    check(free > 1, f"{ROOT}: only {free:.1f} GiB are free on this disk")
    return f"{ROOT}, {free:,.0f} GiB free on this disk"


def ask_slurm():
    """Which SLURM is here, and what the environment tells it."""
    if not shutil.which("sbatch"):
        return "not on this machine: start runs with torchrun"
    version = subprocess.run(["sbatch", "--version"], capture_output=True,
                             text=True, check=False)
    check(version.returncode == 0,
          "sbatch fails: " + version.stderr.strip().rpartition("\n")[2])
    names = [f"{name}={value}" for name, value in sorted(os.environ.items())
             if name.startswith(("SBATCH_", "SALLOC_", "SLURM_"))
             and name.endswith(("_ACCOUNT", "_PARTITION", "_QOS",
                                "_RESERVATION"))]
    return f"{version.stdout.strip()}, " + (
        " ".join(names) or "no account or partition in the environment: "
        "name them in your batch files if your site wants them")


def all_reduce(device):
    """Add up a one from each rank; rank 0 says how many there were."""
    import torch
    import torch.distributed as dist

    from workshop.run import get_device

    device = get_device(device, int(os.environ["LOCAL_RANK"]))
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend)
    total = torch.ones(1, device=device)
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print(f"{total.item():.0f} processes added up over {backend}")
    dist.destroy_process_group()


def ask_ranks():
    """Say which devices the ranks have, and time an all-reduce of them all.

    Rank 0 says it; the exit status is 1 if the sum was wrong.
    """
    import datetime
    import socket

    import torch
    import torch.distributed as dist

    from workshop.run import device_name, get_device

    device = get_device("auto", int(os.environ["LOCAL_RANK"]))
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, timeout=datetime.timedelta(minutes=2))
    rank, n = dist.get_rank(), dist.get_world_size()
    devices = [None] * n
    dist.all_gather_object(
        devices, f"{socket.gethostname()}, {device_name(device)}")
    if rank == 0:
        for number, name in enumerate(devices):
            print(f"ok     rank {number}: {name}")

    # as many as the gradients of GPT-2 on a GPU, fewer on a CPU
    numel = 2**20 if device.type == "cpu" else 124 * 10**6
    values = torch.empty(numel, device=device)
    seconds = []
    for _ in range(6):
        values.fill_(rank + 1)
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(values)
        total = values[-1].item()  # waits for the device
        seconds.append(time.perf_counter() - begin)
    best = min(seconds[1:])  # the first one connects
    megabytes = numel * 4 / 1e6
    # what each rank sends (and receives) at least
    speed = 2 * (n - 1) / n * megabytes / 1e3 / best
    right = bool((values == n * (n + 1) / 2).all())
    if rank == 0:
        print(f"{'ok' if right else 'TO DO':5}  all-reduce: {n} ranks over "
              f"{backend}, {megabytes:,.0f} MB in {1e3 * best:.1f} ms: "
              f"{speed:.2f} GB/s a rank"
              + ("" if right else f"; the sum was {total:g}, which is wrong"),
              flush=True)
    dist.destroy_process_group()
    return int(not right)


if __name__ == "__main__":
    all_reduce(sys.argv[1])
