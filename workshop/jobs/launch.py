"""Starts a stage with what is here: python -m workshop launch STAGE -- FLAGS

In a job of SLURM it starts a process for each of its GPUs on all of its nodes,
in one of PBS as many on each node as the job's mpiprocs, elsewhere one for
each GPU of this machine. It prints the command before it becomes that command,
so that you can type it yourself the next time, and the one before it by which
each node unpacks an archive of the environment. `launch doctor` starts the
doctor's questions to all ranks in the same way.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from tempfile import gettempdir

from backstage import ROOT
from backstage.errors import UserError, require
from rankcheck.system.errors import read_regular
from rankcheck.why.start import begin_start, switch_on
from workshop.command_line import Parser
from workshop.diff import working_copy
from workshop.jobs import interpreter
from workshop.stages import STAGES, find_stage

# Of a job's variables srun may see these. The others are options of whatever
# this shell was started with, such as a portal's JupyterLab.
KEPT_VARIABLES = ("SLURM_JOB_", "SLURM_CONF", "SLURM_MPI_TYPE")
# Of those others, what changes the printed command if somebody types it.
OPTIONS = re.compile(
    r"SLURM_(CPUS_PER_GPU|CPU_BIND|DISTRIBUTION|EXACT|EXCLUSIVE|EXPORT_ENV|"
    r"GPU_BIND|GPUS_PER_TASK|GRES|HINT|MEM_BIND|MEM_PER_CPU|MEM_PER_GPU|"
    r"MEM_PER_NODE|STEP_GRES|THREADS_PER_CORE|TRES_PER_TASK)")
# Open MPI gives the processes on other nodes only the variables that it is
# told to.
SENT_VARIABLES = re.compile(
    r"(PATH|PYTHONPATH|LD_LIBRARY_PATH|TIKTOKEN_CACHE_DIR|ZE_FLAT_.*|"
    r"(FI|GLOO|MASTER|MPI4PY|NCCL|OMP|TORCH|UCX|WORKSHOP)_.*)")

NOT_HERE = ("is not installed; fix: load its module, or run `source "
            "activate.sh`")


@dataclass
class Allocation:
    """Where the processes will be."""

    name: str  # of the job, or ""
    hosts: list[str]
    per_host: int  # processes
    scheduler: str = ""  # "SLURM", "PBS", or "" on a machine of your own

    def __str__(self) -> str:
        return (f"{self.name or 'no job'}: {len(self.hosts)} x "
                f"{self.per_host} processes, on {' '.join(self.hosts)}")


def find_job_place(env: Mapping[str, str],
                   count_devices: Callable[[], int]) -> Allocation:
    """Return where we run. count_devices: counts this machine's devices.

    Raises a `UserError` if the job does not say how many processes it wants.
    """
    require("RANK" not in env, "this process is a rank already (RANK is set); "
            "fix: call this once, in the job's shell, or unset RANK")
    if "SLURM_JOB_ID" in env and "SLURM_JOB_NODELIST" in env:
        hosts = ask_program("scontrol", "show", "hostnames",
                            env["SLURM_JOB_NODELIST"]).split()
        require(hosts, "scontrol lists no node of this job")
        gpus = (sum(read_numbers(env, "SLURM_GPUS_ON_NODE"))  # 0: it has none
                or sum(read_numbers(env, "SLURM_GPUS_PER_NODE")))
        tasks = {*(read_numbers(env, "SLURM_TASKS_PER_NODE") or [1])}
        require(gpus or len(tasks) == 1, "the job has "
                f"{env.get('SLURM_TASKS_PER_NODE')} tasks on its nodes; fix: "
                "request equally many on each, with --ntasks-per-node")
        return Allocation(f"SLURM job {env['SLURM_JOB_ID']}", hosts,
                          gpus or max(1, *tasks), "SLURM")
    if "PBS_NODEFILE" in env:
        text = read_regular(env["PBS_NODEFILE"]).decode(errors="replace")
        counts = Counter(text.split())
        require(len({*counts.values()}) == 1, f"{env['PBS_NODEFILE']} does "
                "not name all nodes equally often; fix: request equally many "
                "mpiprocs on each")
        return Allocation(f"PBS job {env.get('PBS_JOBID', '?')}", [*counts],
                          next(iter(counts.values())), "PBS")
    return Allocation("", ["this machine"], count_devices() or 2)


def read_numbers(env: Mapping[str, str], name: str) -> list[int]:
    """Those in a variable of SLURM's, such as 2, 4(x2),1 or a100:4.

    Raises a `UserError` if it holds something else.
    """
    entries = [entry for entry in env.get(name, "").split(",") if entry]
    counts = []
    for entry in entries:
        found = re.fullmatch(r"(?:[^,]*:)?([0-9]{1,5})(\(x[0-9]+\))?", entry)
        if found is None:
            raise UserError(f"{name} is {env.get(name)!r:.40}, not a number; "
                            f"fix: unset {name}")
        counts.append(int(found[1]))
    return counts


def make_command(place: Allocation, launcher: str, program: list[str],
                 env: Mapping[str, str]) -> list[str]:
    """The command, a list.

    launcher: of the program's processes, as in the registry of stages.
    """
    if launcher == "python":
        return ["python", *program]
    mpi, python = launcher == "mpirun", ["python"]
    # under srun each process asks it for its rank: see prepare_process()
    if not mpi and place.scheduler != "SLURM":
        python += ["-m", "workshop.as_torchrun"]
    if place.scheduler == "PBS":
        cores = env.get("NCPUS", "")  # of a node
        if cores.isdecimal() and cores == env.get("OMP_NUM_THREADS"):
            # PBS has set it, for one process on each node
            threads = max(1, int(cores) // place.per_host)
            python = ["env", f"OMP_NUM_THREADS={threads}", *python]
    if place.scheduler:
        return [*on_each_host(place, place.per_host, env), *python, *program]
    if mpi:
        return ["mpirun", "-n", str(place.per_host), *(
            ["--bind-to", "none"] * is_open_mpi("mpirun")), *python, *program]
    # torchrun takes flags from such variables, which Kubeflow sets
    require(env.get("PET_NNODES", "1") == "1", "this is one of several nodes "
            f"(PET_NNODES is {env.get('PET_NNODES')}); fix: `torchrun "
            f"{shlex.join(program)}` on each of them, or `unset PET_NNODES` "
            "to train on this one alone")
    return [*unset(env, re.compile("PET_.*")), "torchrun", "--standalone",
            "--nproc-per-node", str(place.per_host), *program]


def unset(env: Mapping[str, str], pattern: re.Pattern[str]) -> list[str]:
    """The beginning of a command that runs without these variables."""
    names = sorted(name for name in env if pattern.fullmatch(name))
    flags = [flag for name in names for flag in ("-u", name)]
    return ["env", *flags] if flags else []


def on_each_host(place: Allocation, processes: int,
                 env: Mapping[str, str]) -> list[str]:
    """What starts a program so many times on each of the job's nodes."""
    total = len(place.hosts) * processes
    if place.scheduler == "SLURM":
        # salloc has the other
        counts = (read_numbers(env, "SLURM_CPUS_ON_NODE")
                  or read_numbers(env, "SLURM_JOB_CPUS_PER_NODE") or [1])
        cores = max(1, min(counts) // processes)
        return [*unset(env, OPTIONS), "srun", f"--nodes={len(place.hosts)}",
                f"--ntasks={total}", f"--ntasks-per-node={processes}",
                f"--cpus-per-task={cores}", "--overlap",
                "--kill-on-bad-exit=1"]
    per_host = ["--ppn"]  # PALS, MPICH and Intel MPI
    if is_open_mpi("mpiexec"):
        per_host = [word for name in env if SENT_VARIABLES.fullmatch(name)
                    for word in ("-x", name)] + ["--bind-to", "none", "-N"]
    return ["mpiexec", "-n", str(total), *per_host, str(processes)]


def is_open_mpi(program: str) -> bool:
    """Whether it is Open MPI's, which binds a process to a core or two."""
    return "Open" in ask_program(program, "--version")


def add_arguments(parser: Parser) -> None:
    parser.after = "the script's own"
    parser.description = (f"{parser.description} The command is printed "
                          "first. The script's own flags follow --.")
    parser.add_argument("stage", choices=[*STAGES, "doctor"], help="the stage:"
                        " your script if it has passed the check, else the "
                        "solution; or the doctor, which checks all ranks")
    parser.add_argument("--dry-run", action="store_true", dest="dry",
                        help="only print the command")


def main(args: argparse.Namespace) -> None:
    """Print the command, and become it unless dry."""
    stage, flags = args.stage, args.flags
    env = switch_on(os.environ)
    place = find_job_place(env, count_devices)
    if stage == "doctor":
        launcher, why = "mpirun", "program   the doctor"
        program = ["-m", "workshop", "doctor", "--ranks", *flags]
    else:
        launcher = find_stage(stage).launcher
        script, why = working_copy.choose_script(stage)
        program = [str(script), *flags]
    command = make_command(place, launcher, program, env)
    archive = interpreter.archive()
    first: list[str] = []
    starts_on_nodes = bool(place.scheduler) and command[0] != "python"
    if archive and starts_on_nodes:
        # another node may not have unpacked it yet
        first = [*on_each_host(place, 1, env), "env",
                 f"TMPDIR={gettempdir()}", "bash", str(ROOT / "setup.sh"),
                 "unpack", archive]
    print(f"place     {place}", why,
          *[f"first     {shlex.join(first)}"] * bool(first),
          f"command   {shlex.join(command)}", sep="\n", flush=True)
    if args.dry:
        return
    env = begin_start(command, env)
    if place.scheduler == "SLURM" and starts_on_nodes:
        env = {name: value for name, value in env.items()
               if name.startswith(KEPT_VARIABLES)
               or not name.startswith("SLURM_")}
    if first:
        done = subprocess.run(first, env=env, stdout=subprocess.DEVNULL)
        require(done.returncode == 0, f"not every node could unpack {archive};"
                " fix: see the reason above")
    try:
        os.execvpe(command[0], command, env)
    except OSError as error:
        raise UserError(f"{command[0]} {NOT_HERE}") from error


def ask_program(*command: str) -> str:
    """Return a program's output; raise a `UserError` if it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True,
                              check=True).stdout
    except FileNotFoundError as error:
        raise UserError(f"{command[0]} {NOT_HERE}") from error
    except (OSError, subprocess.CalledProcessError) as error:
        raise UserError(f"`{shlex.join(command)}` fails; "
                        "fix: run it here to see why") from error


def count_devices() -> int:
    """The accelerators that torch can use on this machine."""
    import torch

    return torch.accelerator.device_count()
