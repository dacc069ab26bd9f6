"""The cells that submit a job to SLURM, and watch it."""

import os
import re
import shlex
import shutil
from pathlib import Path

from backstage import ROOT
from backstage.errors import require
from backstage.files import show_path
from workshop.cluster.config import SITE
from workshop.jobs import interpreter
from workshop.jobs.doctor import ask_slurm
from workshop.notebook import frontend
from workshop.notebook.cluster import run_slurm, use_cluster
from workshop.notebook.output import (
    in_one_line,
    show_output,
    show_text,
    split_arguments,
)
from workshop.stages import batch_files


def no_slurm():
    """Why the cells that submit jobs do nothing."""
    if shutil.which("qsub"):
        return ("These cells are for SLURM, but PBS is here: submit the job "
                "in a terminal, as batchfiles/README.md shows.")
    return ("There is no SLURM on this machine, so the cells that submit jobs "
            "do nothing. Read on: on a cluster's login node or in its portal "
            "they work. On Linux, `cluster(\"up\")` in the lesson "
            "cluster.ipynb starts one here.")


def require_slurm(program):
    """Use the cluster of this machine, if it is up; returns whether it is.

    Raises a `UserError` where there is no SLURM at all.
    """
    is_own = use_cluster()
    require(shutil.which(program), no_slurm())
    return is_own


@in_one_line
def slurm():
    """Say whether SLURM is here, and what the site asks for."""
    set_variables(require_slurm("sbatch"))
    return show_text(ask_slurm())


@in_one_line
def submit(name, flags="", options=""):
    """Submit batchfiles/batch-NAME.sh; on a site's cluster after a question.

    flags: for the script, and options: for sbatch, such as --nodes=2, both as
    on the command line. Nobody answers where the notebook runs by itself, and
    nothing is submitted.
    """
    is_own = require_slurm("sbatch")
    names = batch_files()
    require(name in names, f"no such batch file: {name}; fix: choose from "
            f"{', '.join(names)}")
    flags, options = split_arguments(flags), split_arguments(options)
    set_variables(is_own)
    ask_slurm()  # if it refuses, there is nothing to ask
    command = shlex.join(["sbatch", *options, f"batch-{name}.sh", *flags])
    sure = "y"
    if not is_own:
        sure = frontend.current.ask(
            f"Submit a job, `{command}`? [y/N] ", 60)
    if sure.strip().lower() not in ("y", "yes"):
        return show_text(f"Nothing is submitted: `{command}` needs a y.\nIf "
                         "JupyterLab runs no other cell, press Enter in the "
                         "box above.")
    return show_slurm("sbatch", *options,
                      ROOT / "batchfiles" / f"batch-{name}.sh", *flags)


def set_variables(is_own):
    """Set what `sbatch` passes on; is_own: on the cluster of this machine.

    That has none of the partitions that a site.sh may name.
    """
    os.environ.update(interpreter.sbatch_variables())
    if is_own:
        for name in SITE:
            os.environ.pop(name, None)


@in_one_line
def queue():
    """My jobs: PD waits, with the reason; R runs, with its nodes."""
    require_slurm("squeue")
    ask_slurm()  # what squeue says of a wrong configuration is long
    # as wide as a lesson beside the script
    return show_slurm("squeue", "--me", "-o", "%.10i %.12j %.2t %.8M %R")


def show_slurm(*command):
    """What a program of SLURM's says; a `UserError` if it fails."""
    end = run_slurm(*command)
    return show_output(end.stdout + end.stderr)


def job_order(log: Path) -> "tuple[list[int], int]":
    """A key that sorts logs by their jobs' numbers, slurm-12_3.out.

    The newest has the largest; a file's time is that of its last copy.
    """
    named = re.match(r"slurm-(\d+)(?:_(\d+))?", log.name)
    numbers = [int(part) for part in named.groups("0")] if named else [-1]
    return numbers, log.stat().st_mtime_ns


@in_one_line
def log(lines=600):
    """My newest job's log, with so many of its first and its last lines."""
    logs = [path for folder in {Path.cwd(), ROOT}
            for path in folder.glob("slurm-*.out")
            if path.is_file() and path.stat().st_uid == os.getuid()]
    require(logs, "no job of yours has written a log yet (slurm-*.out); fix: "
            "wait until it starts, or read example-logs/job.txt")
    require(lines in range(1, 10_000), "lines must be 1 or more")
    newest = max(logs, key=job_order)
    return show_output(f"{show_path(newest)}:\n"
                       + newest.read_text("utf-8", "replace"), most=lines)
