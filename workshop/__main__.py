"""The tools of the course: python -m workshop diff | check | apply | ..."""

from __future__ import annotations

import argparse
import sys
import traceback
from typing import NoReturn

from backstage.errors import UserError
from backstage.files import reason
from rankcheck import __main__
from workshop import command_line
from workshop.command_line import CourseCommand
from workshop.errors import run_tool

VERIFY, WHY = (__main__.COMMANDS[name] for name in ("verify", "why"))
# The commands as they come in a day
COMMANDS = {
    "the lesson": {
        "lab": CourseCommand(
            "workshop.notebook.lab",
            "Open JupyterLab with your script and a lesson side by side."),
        "diff": CourseCommand(
            "workshop.diff.command",
            "Show the changes that your script still lacks, and why.",
            function="diff"),
        "check": CourseCommand(
            "workshop.check.command",
            "Run your script with 1, 2 and more processes, and compare it "
            "with the single-device stage."),
        "apply": CourseCommand(
            "workshop.diff.command",
            "Make changes of the lesson for you; your version is backed up.",
            function="apply"),
        "reset": CourseCommand(
            "workshop.diff.command",
            "Replace your script by a stage's finished one; your version is "
            "backed up.", function="reset"),
        "certificate": CourseCommand(
            "workshop.certificate",
            "Write a page that says which checks have passed here, and when, "
            "with text that your model generated.")},
    "a job": {
        "launch": CourseCommand(
            "workshop.jobs.launch",
            "Start a stage on all GPUs of this SLURM or PBS job, or of this "
            "machine."),
        "doctor": CourseCommand(
            "workshop.jobs.doctor",
            "Check that this machine has what the course needs."),
        "cluster": CourseCommand(
            "workshop.cluster.command",
            "Start, inspect and end a SLURM of up to 4 nodes on this Linux "
            "machine: up | status | down."),
        "plot": CourseCommand(
            "workshop.results.plot",
            "Draw the runs: loss curves, tokens/s, scaling."),
        "profile": CourseCommand(
            "workshop.results.profile",
            "Show where a step's time goes on each rank, from the traces of "
            "--profile N.")},
    "any PyTorch script": {
        "verify": CourseCommand(VERIFY.module, VERIFY.about),
        "why": CourseCommand("workshop.why", WHY.about)},
    "the instructor": {
        "answers": CourseCommand(
            "workshop.instructor.answers",
            "Print the answers to the questions of one lesson or of all."),
        "class": CourseCommand(
            "workshop.instructor.classroom",
            "Show how far the attendees are, on a page that updates itself."),
        "update": CourseCommand(
            "workshop.instructor.update",
            "Get the newest version of the course; your edits are kept.")}}
HIDDEN = {
    "": CourseCommand("workshop.diff.command", "Say what to do next.",
                      function="journey"),
    "dev": CourseCommand(
        "workshop.dev", "For contributors: check that the parts of each "
        "lesson fit together."),
    # what the batch files call
    "script": CourseCommand(
        "workshop.diff.command",
        "Name the script that a batch file trains with: yours if it has "
        "passed the check.", function="script"),
    "progress": CourseCommand(
        "workshop.results.runs",
        "Show a run's progress; the exit status is 0 if it is finished.",
        function="progress")}


def main() -> NoReturn:
    try:
        args = parse_command()
        sys.exit(args.function(args))
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in ("", "backstage", "workshop"):
            raise
        raise UserError(f"{sys.executable} has no {error.name}; fix: run "
                        "`source activate.sh`") from error
    except (ImportError, OSError) as error:
        if not any(frame.f_globals.get("__name__") == "torch" for frame, _ in
                   traceback.walk_tb(error.__traceback__)):
            raise
        raise UserError(f"PyTorch cannot be loaded ({reason(error)}); fix: "
                        "load the site's modules that it needs, or install "
                        f"it again in {sys.prefix}") from error


def parse_command() -> argparse.Namespace:
    return command_line.parse(
        "python -m workshop", "The tools of the course. COMMAND --help "
        "describes each; without a command it says what to do next.", COMMANDS,
        HIDDEN)


def start() -> NoReturn:
    """The command `workshop`."""
    run_tool(main)


if __name__ == "__main__":
    start()
