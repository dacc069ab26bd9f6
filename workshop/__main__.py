"""The tools of the lessons: python -m workshop diff | check | apply | ..."""

import argparse
import importlib
import inspect
import os
import platform
import sys
import textwrap
import traceback
from importlib.metadata import version

from backstage.errors import UserError, run_main
from backstage.files import reason
from workshop import classroom
from workshop.lesson import desk, render
from workshop.lesson.diff import Diff
from workshop.stages import LESSONS, STAGES


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message):
        raise UserError(f"{message}: see {self.prog} --help")


def main():
    args = parse()
    try:
        sys.exit(call(args))
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


def call(args):
    """Do what a command does: "module:function", imported when it is needed.

    Most need no package. It gets the options that it has parameters for, and
    returns the exit status, or whether all is right.
    """
    function = args.function
    if isinstance(function, str):
        module, name = function.split(":")
        function = getattr(importlib.import_module(f"workshop.{module}"), name)
    wanted = inspect.signature(function).parameters
    said = function(**{name: value for name, value in vars(args).items()
                       if name in wanted})
    return not said if isinstance(said, bool) else said


def diff(stage, hints, number):
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    left = Diff(stage)
    classroom.note_diff(left)
    print(render.to_text(left, colour, hints, number))


def reset(name, list, undo):
    if list:
        desk.list_all()
    elif undo:
        desk.undo()
    else:
        desk.reset(name)


def script(stage):
    from workshop.doctor import name_commit

    path, reason = desk.choose(stage)
    print(reason, file=sys.stderr, flush=True)
    print(path, flush=True)
    print("software  Python", platform.python_version(), "torch",
          version("torch"), "lightning", version("lightning"), "commit",
          name_commit(), file=sys.stderr)


def why(job, flags):
    if job == "run" and flags:
        from workshop.why.start import run

        run(flags)
    from workshop.why.command import main

    return main(job)


def make_parser():
    """The parser, and that of each command by its name."""
    parser = Parser(
        prog="python -m workshop", usage="%(prog)s COMMAND ...", epilog="",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="The tools of the lessons. COMMAND --help says more of "
        "each.")
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", help=argparse.SUPPRESS,
        prog=parser.prog)

    def group(title):
        """The help of all commands shows those that follow below it."""
        parser.epilog += f"\n{title}:\n"

    def add(name, function, text, more=""):
        """text: for the help of all commands, too; more: for its own alone.
        """
        parser.epilog += textwrap.fill(
            text, 79, initial_indent=f"  {name:10}",
            subsequent_indent=12 * " ") + "\n"
        return add_hidden(name, function, f"{text} {more}")

    def add_hidden(name, function, text):
        """What scripts call."""
        command = commands.add_parser(name, description=text)
        command.set_defaults(function=function)
        return command

    def add_stage(command):
        command.add_argument("stage", choices=LESSONS,
                             help="the stage that the lesson makes")

    group("the lesson")
    add("lab", "lab:main",
        "Open JupyterLab with your script and a lesson side by side.",
        "Further flags are JupyterLab's, such as --no-browser.").add_argument(
            "stage", nargs="?", choices=LESSONS,
            help="the stage that the lesson makes (left out: start_here)")
    show = add("diff", diff,
               "Show what is left to change in your script, and why.")
    add_stage(show)
    show.add_argument("number", nargs="?", type=int,
                      help="show this change alone")
    show.add_argument("--hints", action=argparse.BooleanOptionalAction,
                      default=render.wants_hints(),
                      help="the place and the reason, without the code")
    tried = add("check", "check.command:main",
                "Run your script as 1, 2 and more processes, "
                "and compare with the single-device stage.")
    add_stage(tried)
    tried.add_argument("change", nargs="?", type=int, metavar="number",
                       help="try this change alone, as diff numbers it, with "
                       "all others made")
    tried.add_argument("-v", "--verbose", action="store_true",
                       help="show every question, and what follows from a "
                       "mistake")
    made = add("apply", "lesson.desk:apply",
               "Make changes of the lesson for you; your version is kept.")
    add_stage(made)
    made.add_argument("numbers", nargs="*", type=int, metavar="number",
                      help="their numbers, as diff shows them")
    made.add_argument("--all", action="store_true",
                      help="make all that are left")
    back = add("reset", reset, "Put a stage's finished script in place of "
               "yours; your version is kept.")
    back.add_argument("name", nargs="?", metavar="stage|DATE",
                      help=f"{', '.join(STAGES)}, or a backup's date")
    back.add_argument("--list", action="store_true",
                      help="show the stages, and the backups by their date")
    back.add_argument("--undo", action="store_true",
                      help="go back to your previous version")

    group("a job")
    start = add("launch", "launch:main", "Start a stage on all GPUs of this "
                "job of SLURM or PBS, or of this machine.", "The command is "
                "printed first. What follows -- are the script's own flags.")
    start.add_argument("stage", choices=[*STAGES, "doctor"], help="the stage: "
                       "your script if it has passed the check, else the "
                       "solution; or the doctor, who asks all ranks")
    start.add_argument("--dry-run", action="store_true", dest="dry",
                       help="only print the command")
    add("doctor", "doctor:main", "Check that "
        "everything the workshop needs is there.").add_argument(
            "--ranks", action="store_true", help="ask all processes that a "
            "launcher has started: do they reach each other, how fast?")
    add("why", why, "Say why a job of several processes hangs, has ended or "
        "is slow: which rank, and which line.", "`why run -- torchrun ...` "
        "starts a job so that this is known.").add_argument(
            "job", nargs="?", metavar="RUN|JOBID|PID", help="its folder, "
            "SLURM's number of it, or a process's: the launcher's or a "
            "rank's; without it, the job that torchrun started last")
    drawn = add("plot", "results.plot:main",
                "Draw the runs: loss curves, tokens/s, scaling.")
    drawn.add_argument("folders", nargs="*", metavar="run",
                       help="folders of runs (default: the newest in runs/ "
                       "and those like it)")
    drawn.add_argument("-o", "--output", default="results.png",
                       help="the file, .png, .svg or .pdf (results.png)")
    add("profile", "profile:main",
        "Say where the time of a step goes on each rank, "
        "from the traces that --profile N has recorded.").add_argument(
            "run", help="its folder")

    group("your own model")
    own = add("verify", "verify.command:main",
              "Run any training script as one process and "
              "as several for a few updates: does it train alike?")
    own.add_argument("-n", type=int, default=2, dest="size", metavar="N",
                     help="the number of processes (2)")
    own.add_argument("--steps", type=int, default=4,
                     help="how many updates are watched (4)")
    own.add_argument("--device", choices=("cpu", "gpu"), default="cpu",
                     help="where: cpu (the default), or gpu, one of this "
                     "machine for each process")
    own.add_argument("--resume-with", metavar="FLAGS", help="check what a "
                     "resume brings back, with these flags of the "
                     'script: --resume-with="--resume"')
    for one in tried, own:
        one.add_argument("--events", action="store_true",
                         help=argparse.SUPPRESS)  # for a notebook
    own.add_argument("program", nargs=argparse.REMAINDER,
                     metavar="-- SCRIPT FLAGS", help="the script, which "
                     "is not changed, and its own flags")
    theirs = add("import", "huggingface:import_folder", "Write a model in "
                 "Hugging Face's format as a checkpoint, for --init.")
    theirs.add_argument("folder", help="its folder")
    theirs.add_argument("file", help="the checkpoint to write, a .pt file")
    ours = add("export", "huggingface:export_run", "Write a run's model in "
               "Hugging Face's format, which transformers loads.")
    ours.add_argument("run", help="folder of the run, or a checkpoint")
    ours.add_argument("folder", help="the folder to write")

    group("the course")
    add("update", "update:main", "Bring this clone to the newest "
        "state of the course; what you edited is kept.")
    add("answers", "answers:main", "For the "
        "instructor: the answers to the questions of a lesson, or of "
        "all.").add_argument("lesson", nargs="?", help="ddp, collectives, ...")
    room = add("class", "classroom:main",
               "For the instructor: show how far those are who take part, on "
               "a page that updates itself.")
    room.add_argument("folder", help="the shared one that WORKSHOP_CLASS "
                      "names")
    room.add_argument("-o", "--output", default="class.html",
                      help="the page (class.html)")
    add("rehearse", "rehearse:main", "For the "
        "instructor: do what an attendee does in an hour, in a fresh clone, "
        "and say how long each step takes.", "What follows -- are the flags "
        "of the job's script, in place of --max-steps 100.")

    add_hidden(
        "script", script, "Name the script that a batch file trains with: "
        "yours if it has passed the check.").add_argument(
            "stage", choices=STAGES, help="the stage of the batch file")
    add_hidden(
        "progress", "results.runs:show_progress", "Show how far a run "
        "has got; the exit status is 0 if it is finished.").add_argument(
            "folder", metavar="run", help="its folder")
    return parser, commands.choices


def parse():
    parser, commands = make_parser()
    words, flags = sys.argv[1:], []
    if words[:1] in (["launch"], ["rehearse"], ["why"]) and "--" in words:
        at = words.index("--")
        words, flags = words[:at], words[at + 1:]
    args, args.flags = parser.parse_known_args(words)
    if args.command is None:
        parser.print_help()
        sys.exit(2)
    if args.flags and args.command != "lab":
        own = args.command in ("launch", "rehearse")
        parser.error(f"unrecognized arguments: {' '.join(args.flags)}"
                     + ": the script's own come after --" * own)
    args.flags += flags
    if args.command == "apply" and args.all == bool(args.numbers):
        commands["apply"].error("give the numbers of changes, or --all")
    if args.command == "reset" and (
            bool(args.name) + args.list + args.undo != 1):
        commands["reset"].error("name a stage, or --list or --undo")
    return args


if __name__ == "__main__":
    run_main(main)
