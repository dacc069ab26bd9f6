"""Does what an attendee does in an hour, and says how long each step takes.

    python -m workshop rehearse                 with 100 steps of training
    python -m workshop rehearse -- --max-steps 20 --preset tiny

It works in a fresh clone, which it makes in the folder where it is called and
removes at the end, with this clone's site.sh and with the environment that is
active. Run it as another user to see what an attendee may read and write.
Only the standard library, from Python 3.9 on.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from backstage import ROOT
from backstage.errors import UserError
from rankcheck.launch.scratch import remove
from workshop.jobs import git, interpreter

COMPLAINT = "application/x-workshop-complaint"  # what a cell complains of
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GRACE = 20  # seconds in which a step that is ended may clean up
PATIENCE = 4  # after so many times the expected seconds a step is ended
ACTIVATED = 'source activate.sh >/dev/null && exec "$@"'
REASON = re.compile(r"error|fatal|TO DO|FAIL|sbatch:|qsub:|activate\.sh:")


@dataclass(frozen=True)
class Step:
    """A step of the hour: a command in the clone, in an activated shell."""

    name: str
    seconds: int  # the longest that the plan leaves an attendee to wait
    command: tuple
    cancel: str = ""  # the program that ends the job it has submitted


def steps(flags, which=shutil.which):
    """Those of the hour. flags: of the job's training script."""
    def ours(*words):
        return ("python", "-m", "workshop", *words)

    if which("sbatch"):
        job = Step("job", 300, (
            "sbatch", "--parsable", "--wait", "--output=job.txt",
            "batchfiles/batch-ddp-1n2g.sh", *flags), "scancel")
    elif which("qsub"):
        job = Step("job", 300, (
            "qsub", "-W", "block=true", "-o", "job.txt", "-v",
            f"WORKSHOP_VENV={interpreter.archive() or sys.prefix},"
            f"STAGE=ddp,FLAGS={' '.join(flags)}",
            "batchfiles/pbs/batch-stage.sh"), "qdel")
    else:
        job = Step("job", 300, ours("launch", "ddp", "--", *flags))
    return (Step("activate", 120, ("true",)),
            Step("doctor", 60, ours("doctor")),
            Step("start", 120, notebook("start_here")),
            Step("diff", 10, ours("diff", "ddp")),
            Step("reset", 10, ours("reset", "ddp")),
            Step("check", 120, ours("check", "ddp")), job,
            Step("results", 60, notebook("results")))


def notebook(name):
    """The command that runs all cells of a lesson."""
    return ("jupyter", "nbconvert", "--log-level=ERROR", "--execute",
            "--to=notebook", "--output-dir=executed",
            f"notebooks/{name}.ipynb")


def add_arguments(parser):
    parser.after = "the script's own"
    parser.description += (" What follows -- are the flags of the job's "
                           "script, in place of --max-steps 100.")


def main(args):
    """Print a table as it goes; returns the exit status.

    Raises a `UserError` if there can be no clone.
    """
    for number in ENDING:
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup wants it
            signal.signal(number, leave)
    folder = Path(tempfile.mkdtemp(prefix=".rehearsal-", dir=".")).absolute()
    clone, status = folder / "gpt2-workshop", 0
    try:
        make_clone(clone)
        status = rehearse(steps(args.flags or ["--max-steps", "100"]), clone)
    finally:
        if status:
            print(f"The clone is kept, to look into: {clone}")
        else:
            remove(folder)
    return status


def leave(number, frame):
    """End the step that runs, and remove the clone: once."""
    for other in ENDING:
        signal.signal(other, signal.SIG_IGN)
    sys.exit(128 + number)


def make_clone(clone):
    """A clone as an attendee has it: the commit, not what was edited since."""
    # another user's clone, too: we run its code already
    trust = ("-c", "safe.directory=*")
    with git.start(*trust, "clone", "--quiet", "--upload-pack",
                   shlex.join(["git", *trust, "upload-pack"]), ROOT, clone,
                   ) as made:
        said = made.communicate()[1].decode(errors="replace")
    if made.returncode:
        raise UserError(f"{ROOT} cannot be cloned: {reason(said)}")
    if (ROOT / "site.sh").exists():
        shutil.copy(ROOT / "site.sh", clone)


def rehearse(steps, clone):
    """Do the steps until one fails; returns the exit status."""
    slow = []
    print("step       expected        met   ok")
    for step in steps:
        log, begin = clone / f"{step.name}.log", time.monotonic()
        status = run(step, clone, log)
        took = time.monotonic() - begin
        late = took > step.seconds
        wrong = complaints(clone / "executed" / Path(step.command[-1]).name)
        failed = status or wrong
        print(f"{step.name:8} {step.seconds:8} s {took:8.1f} s   "
              + ("NO" if failed else "slow" if late else "yes"), flush=True)
        if failed:
            said = wrong + log.read_text("utf-8", "replace")
            if step.cancel and (clone / "job.txt").exists():
                said += (clone / "job.txt").read_text("utf-8", "replace")
            print(f"{step.name}: {reason(said)}: try `cd {clone} && source "
                  f"activate.sh && {shlex.join(step.command)}`",
                  file=sys.stderr)
            return 1
        slow += [step.name] * late
    print(f"Everything works, but this took longer than the plan leaves: "
          f"{', '.join(slow)}" if slow else "Everything works, in time.")
    return 0


def run(step, clone, log):
    """Do a step, with what it says in the log; returns its exit status."""
    env = {name: value for name, value in os.environ.items()
           if name not in ("PYTHONPATH", "WORKSHOP_INSTALL", "VIRTUAL_ENV")}
    # unless site.sh names another
    env["WORKSHOP_VENV"] = interpreter.archive() or sys.prefix
    with open(log, "w+b") as out:
        process = subprocess.Popen(
            ["bash", "-c", ACTIVATED, "bash", *step.command], cwd=clone,
            env=env, stdin=subprocess.DEVNULL, stdout=out,
            stderr=subprocess.STDOUT, start_new_session=True)
        try:
            return process.wait(PATIENCE * step.seconds)
        except subprocess.TimeoutExpired:
            out.seek(0, os.SEEK_END)
            out.write(b"\nerror: it had not ended after "
                      b"%d s\n" % (PATIENCE * step.seconds))
            out.flush()  # before qsub says that it was ended
            return 1
        finally:
            if process.poll() is None:
                end(process, step, log)


def complaints(notebook):
    """What its cells complain of: to nbconvert such a cell has succeeded."""
    cells = json.loads(notebook.read_text("utf-8"))["cells"] if (
        notebook.exists()) else []
    return "".join(f"error: {''.join(output['data'][COMPLAINT])}\n"
                   for cell in cells for output in cell.get("outputs", [])
                   if COMPLAINT in output.get("data", {}))


def end(process, step, log):
    """End a step, and the job that it waits for."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(GRACE)
            break
    job = re.match(r"[\w.\[\]-]+", log.read_text("utf-8", "replace"))
    if step.cancel and job:
        # qsub has ended its job already, and qdel would complain
        subprocess.run([step.cancel, job[0]], check=False,
                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def reason(text):
    """The line that says what is wrong, else the last one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if REASON.match(line)),
                lines[-1] if lines else "it said nothing")
