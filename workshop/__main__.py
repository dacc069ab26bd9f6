"""The tools of the course: python -m workshop diff | check | apply | ..."""

import importlib
import sys
import textwrap
import traceback

from backstage.errors import UserError, run_main
from backstage.files import reason
from workshop.command_line import Parser

# The commands of a day. A module has `add_arguments(parser)` and `main(args)`,
# which returns the exit status; one that is named with a command, such as
# diff, has `add_diff` and `diff`. It is imported when the command is called.
COMMANDS = {
    "the lesson": {
        "lab": ("lab", "Open JupyterLab with your script and a lesson side by "
                "side."),
        "diff": ("lesson.command:diff", "Show what is left to change in your "
                 "script, and why."),
        "check": ("check.command", "Run your script as 1, 2 and more "
                  "processes, and compare with the single-device stage."),
        "apply": ("lesson.command:apply", "Make changes of the lesson for "
                  "you; your version is kept."),
        "reset": ("lesson.command:reset", "Put a stage's finished script in "
                  "place of yours; your version is kept.")},
    "a job": {
        "launch": ("launch", "Start a stage on all GPUs of this job of SLURM "
                   "or PBS, or of this machine."),
        "doctor": ("doctor", "Check that everything the workshop needs is "
                   "there."),
        "plot": ("results.plot", "Draw the runs: loss curves, tokens/s, "
                 "scaling."),
        "profile": ("profile", "Say where the time of a step goes on each "
                    "rank, from the traces that --profile N has recorded.")},
    "any script, and your own": {
        "verify": ("verify.command", "Run any training script as one process "
                   "and as several for a few updates: does it train alike?"),
        "why": ("why.slow", "Say why a job of several processes hangs, has "
                "ended or is slow: which rank, and which line.")},
    "the instructor": {
        "answers": ("answers", "Print the answers to the questions of a "
                    "lesson, or of all."),
        "class": ("classroom", "Show how far those are who take part, on a "
                  "page that updates itself."),
        "rehearse": ("rehearse", "Do what an attendee does in an hour, in a "
                     "fresh clone, and say how long each step takes."),
        "update": ("update", "Bring this clone to the newest state of the "
                   "course; what you edited is kept.")}}
HIDDEN = {  # what the batch files call
    "script": ("lesson.command:script", "Name the script that a batch file "
               "trains with: yours if it has passed the check."),
    "progress": ("results.runs:progress", "Show how far a run has got; the "
                 "exit status is 0 if it is finished.")}
NEXT = ("journey", "Say what comes next.")  # without a command
PROGRAM = "python -m workshop"


def main():
    try:
        args = parse()
        sys.exit(args.run(args))
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
    """What the command line says; `run` is the command's function."""
    command, *words = sys.argv[1:] or [""]
    if command in ("-h", "--help"):
        print_help()
        sys.exit()
    known = {"": NEXT, **HIDDEN}
    for group in COMMANDS.values():
        known.update(group)
    if command not in known:
        raise UserError(f"there is no command {command}: see {PROGRAM} --help")
    place, about = known[command]
    module, _, name = place.partition(":")
    module = importlib.import_module(f"workshop.{module}")
    parser = Parser(prog=f"{PROGRAM} {command}", description=about)
    getattr(module, f"add_{name or 'arguments'}")(parser)
    args = parser.parse(words)
    args.command, args.run = command, getattr(module, name or "main")
    return args


def print_help():
    print(f"usage: {PROGRAM} COMMAND ...\n\nThe tools of the course. COMMAND "
          "--help says more of each; without a\ncommand it says what comes "
          "next.")
    for group, commands in COMMANDS.items():
        print(f"\n{group}:")
        for name, (_, about) in commands.items():
            print(textwrap.fill(about, 79, initial_indent=f"  {name:10}",
                                subsequent_indent=12 * " "))


if __name__ == "__main__":
    run_main(main)
