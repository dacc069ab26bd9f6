"""The tools of the course: python -m workshop diff | check | apply | ..."""

import sys
import traceback

from backstage.errors import UserError, run_main
from backstage.files import reason
from rankcheck import __main__
from rankcheck.system import command_line

# The commands as they come in a day: see command_line.parse
COMMANDS = {
    "the lesson": {
        "lab": (
            "workshop.notebook.lab",
            "Open JupyterLab with your script and a lesson side by side."),
        "diff": (
            "workshop.diff.command:diff",
            "Show what is left to change in your script, and why."),
        "check": (
            "workshop.check.command",
            "Run your script as 1, 2 and more processes, and compare with the "
            "single-device stage."),
        "apply": (
            "workshop.diff.command:apply",
            "Make changes of the lesson for you; your version is kept."),
        "reset": (
            "workshop.diff.command:reset",
            "Put a stage's finished script in place of yours; your version is "
            "kept.")},
    "a job": {
        "launch": (
            "workshop.jobs.launch",
            "Start a stage on all GPUs of this job of SLURM or PBS, or of "
            "this machine."),
        "doctor": (
            "workshop.jobs.doctor",
            "Check that everything the workshop needs is there."),
        "plot": (
            "workshop.results.plot",
            "Draw the runs: loss curves, tokens/s, scaling."),
        "profile": (
            "workshop.results.profile",
            "Say where the time of a step goes on each rank, from the traces "
            "that --profile N has recorded.")},
    "any script, and your own": __main__.COMMANDS | {
        "why": ("workshop.why", __main__.COMMANDS["why"][1])},
    "the instructor": {
        "answers": (
            "workshop.instructor.answers",
            "Print the answers to the questions of a lesson, or of all."),
        "class": (
            "workshop.instructor.classroom",
            "Show how far those are who take part, on a page that updates "
            "itself."),
        "update": (
            "workshop.instructor.update",
            "Bring this clone to the newest state of the course; what you "
            "edited is kept.")}}
HIDDEN = {
    "": ("workshop.diff.command:journey", "Say what comes next."),
    "dev": ("workshop.dev", "For those who change the course: check that the "
            "parts of each lesson fit together."),
    # what the batch files call
    "script": (
        "workshop.diff.command:script",
        "Name the script that a batch file trains with: yours if it has "
        "passed the check."),
    "progress": (
        "workshop.results.runs:progress",
        "Show how far a run has got; the exit status is 0 if it is finished.")}


def main():
    try:
        args = parse()
        sys.exit(args.function(args))
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in ("", "backstage", "workshop"):
            raise
        raise UserError(f"{sys.executable} has no {error.name}: run `source "
                        "activate.sh` first") from error
    except (ImportError, OSError) as error:
        if not any(frame.f_globals.get("__name__") == "torch" for frame, _ in
                   traceback.walk_tb(error.__traceback__)):
            raise
        raise UserError(f"PyTorch does not load here ({reason(error)}): is a "
                        "module of the site missing, or is its installation "
                        f"in {sys.prefix} damaged?") from error


def parse():
    return command_line.parse(
        "python -m workshop", "The tools of the course. COMMAND --help says "
        "more of each; without a command it says what comes next.", COMMANDS,
        HIDDEN)


def start():
    """The command `workshop`."""
    run_main(main)


if __name__ == "__main__":
    start()
