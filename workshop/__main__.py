"""The tools of the lessons: python -m workshop diff | check | apply | ..."""

import argparse
import os
import sys

from backstage.errors import UserError, run_main
from workshop import (
    classroom,
    doctor,
    lab,
    launch,
    progress,
    rehearse,
    update,
)
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
        run(args)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in ("", "backstage", "workshop"):
            raise
        raise UserError(f"{sys.executable} has no {error.name}: run `source "
                        "activate.sh` first") from error


def run(args):
    """Call the tool, and import what it needs: most need no package."""
    if args.command == "lab":
        lab.main(args.stage, args.flags)
    elif args.command == "diff":
        colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        left = Diff(args.stage)
        classroom.note_diff(left)
        print(render.to_text(left, colour, args.hints, args.number))
    elif args.command == "check":
        from workshop.check.command import main as check

        sys.exit(not check(args.stage, verbose=args.verbose,
                           events=args.events, change=args.number))
    elif args.command == "apply":
        desk.apply(args.stage, args.number)
    elif args.command == "reset" and args.list:
        desk.list_all()
    elif args.command == "reset" and args.undo:
        desk.undo()
    elif args.command == "reset":
        desk.reset(args.name)
    elif args.command == "script":
        path, reason = desk.choose(args.stage)
        print(reason, file=sys.stderr, flush=True)
        print(path)
    elif args.command == "doctor":
        sys.exit(doctor.main(args.ranks))
    elif args.command == "export":
        from workshop.huggingface import export_run

        export_run(args.run, args.folder)
    elif args.command == "import":
        from workshop.huggingface import import_folder

        import_folder(args.folder, args.file)
    elif args.command == "combine":
        from workshop.combine import main as combine

        combine(args.stage, args.file)
    elif args.command == "progress":
        sys.exit(progress.show(args.run))
    elif args.command == "why":
        if args.job == "run" and args.flags:
            from workshop.why.start import run

            run(args.flags)
        from workshop.why.command import main as why

        sys.exit(why(args.job))
    elif args.command == "verify":
        from workshop.verify.command import main as verify

        sys.exit(not verify(
            args.program, args.n, args.steps, args.resume_with))
    elif args.command == "rehearse":
        sys.exit(rehearse.main(args.flags))
    elif args.command == "launch":
        launch.main(args.stage, args.flags, args.dry_run)
    elif args.command == "class":
        classroom.main(args.folder, args.output)
    elif args.command == "update":
        update.main()
    elif args.command == "profile":
        from workshop.profile import main as profile

        profile(args.run)
    elif args.command == "plot":
        from workshop.results.plot import main as plot

        plot(args.output, args.run)


def parse():
    """What the command line asks for."""
    parser = Parser(prog="python -m workshop",
                    description="The tools of the lessons.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    def add(name, text):
        return commands.add_parser(name, help=text, description=text)

    def add_stage(command):
        command.add_argument("stage", choices=LESSONS,
                             help="the stage that the lesson makes")

    add("lab", "Open JupyterLab with your script and a lesson side by side; "
        "further flags are JupyterLab's, such as --no-browser.").add_argument(
            "stage", nargs="?", choices=LESSONS,
            help="the stage that the lesson makes (left out: start_here)")
    diff = add("diff", "Show what is left to change in your script, and why.")
    add_stage(diff)
    diff.add_argument("number", nargs="?", type=int,
                      help="show this change alone")
    diff.add_argument("--hints", action=argparse.BooleanOptionalAction,
                      default=render.wants_hints(),
                      help="the place and the reason, without the code")
    check = add("check", "Run your script as 1, 2 and more processes, and "
                "compare with the single-device stage.")
    add_stage(check)
    check.add_argument("number", nargs="?", type=int,
                       help="try this change alone, as diff numbers it, with "
                       "all others made")
    check.add_argument("-v", "--verbose", action="store_true",
                       help="show every question, and what follows from a "
                       "mistake")
    check.add_argument("--events", action="store_true",
                       help=argparse.SUPPRESS)  # for a notebook
    apply = add("apply", "Make changes of the lesson for you; your version "
                "is kept.")
    add_stage(apply)
    apply.add_argument("number", nargs="*", type=int,
                       help="their numbers, as diff shows them")
    apply.add_argument("--all", action="store_true",
                       help="make all that are left")
    reset = add("reset", "Put a stage's finished script in place of yours; "
                "your version is kept.")
    reset.add_argument("name", nargs="?", metavar="stage|DATE",
                       help=f"{', '.join(STAGES)}, or a backup's date")
    reset.add_argument("--list", action="store_true",
                       help="show the stages, and the backups by their date")
    reset.add_argument("--undo", action="store_true",
                       help="go back to your previous version")
    add("script", "Name the script that a batch file trains with: yours if it "
        "has passed the check.").add_argument(
            "stage", choices=STAGES, help="the stage of the batch file")
    start = add("launch", "Start a stage on all GPUs of this job of SLURM or "
                "PBS, or of this machine; the command is printed first. What "
                "follows -- are the script's own flags.")
    start.add_argument("stage", choices=[*STAGES, "doctor"], help="the stage: "
                       "your script if it has passed the check, else the "
                       "solution; or the doctor, who asks all ranks")
    start.add_argument("--dry-run", action="store_true",
                       help="only print the command")
    add("doctor", "Check that everything the workshop needs is "
        "there.").add_argument(
            "--ranks", action="store_true", help="ask all processes that a "
            "launcher has started: do they reach each other, how fast?")
    add("progress", "Show how far a run has got; the exit status is 0 if it "
        "is finished.").add_argument("run", help="its folder")
    add("why", "Say why a job of several processes hangs, has ended or is "
        "slow: which rank, and which line. `why run -- torchrun ...` starts a "
        "job so that this is known.").add_argument(
            "job", nargs="?", metavar="RUN|JOBID|PID", help="its folder, "
            "SLURM's number of it, or a process's: the launcher's or a "
            "rank's; without it, the job that torchrun started last")
    verify = add("verify", "Run any training script as one process and as "
                 "several for a few updates, on the CPU: does it train "
                 "alike?")
    verify.add_argument("-n", type=int, default=2,
                        help="the number of processes (2)")
    verify.add_argument("--steps", type=int, default=4,
                        help="how many updates are watched (4)")
    verify.add_argument("--resume-with", metavar="FLAGS", help="check what a "
                        "resume brings back, with these flags of the "
                        'script: --resume-with="--resume"')
    verify.add_argument("program", nargs=argparse.REMAINDER,
                        metavar="-- SCRIPT FLAGS", help="the script, which "
                        "is not changed, and its own flags")
    export = add("export", "Write a run's model in Hugging Face's format, "
                 "which transformers loads.")
    export.add_argument("run", help="folder of the run, or a checkpoint")
    export.add_argument("folder", help="the folder to write")
    theirs = add("import", "Write a model in Hugging Face's format as a "
                 "checkpoint, for --init.")
    theirs.add_argument("folder", help="its folder")
    theirs.add_argument("file", help="the checkpoint to write, a .pt file")
    both = add("combine", "Write a script with what two stages change of std, "
               "such as mpi and kernels; its losses have to be std's.")
    both.add_argument("stage", nargs=2, help="their names")
    both.add_argument("file", help="the file to write")
    add("rehearse", "For the instructor: do what an attendee does in an hour, "
        "in a fresh clone, and say how long each step takes. What follows -- "
        "are the flags of the job's script, in place of --max-steps 100.")
    room = add("class", "For the instructor: show how far those are who take "
               "part, on a page that updates itself.")
    room.add_argument("folder", help="the shared one that WORKSHOP_CLASS "
                      "names")
    room.add_argument("-o", "--output", default="class.html",
                      help="the page (class.html)")
    add("update", "Bring this clone to the newest state of the course; what "
        "you edited is kept.")
    add("profile", "Say where the time of a step goes on each rank, from the "
        "traces that --profile N has recorded.").add_argument(
            "run", help="its folder")
    plot = add("plot", "Draw the runs: loss curves, tokens/s, scaling.")
    plot.add_argument("run", nargs="*", help="folders of runs (default: the "
                      "newest in runs/ and those like it)")
    plot.add_argument("-o", "--output", default="results.png",
                      help="the file, .png, .svg or .pdf (results.png)")

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
    if args.command == "apply" and args.all == bool(args.number):
        apply.error("give the numbers of changes, or --all")
    if args.command == "reset" and (
            bool(args.name) + args.list + args.undo != 1):
        reset.error("name a stage, or --list or --undo")
    return args


if __name__ == "__main__":
    run_main(main)
