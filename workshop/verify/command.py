"""python -m workshop verify -n 2 -- train.py --its-flags."""

import argparse
import contextlib
import os
import re
import shlex
import shutil
import stat
from pathlib import Path

from workshop import scratch, server
from workshop.check.board import Events, Terminal
from workshop.errors import require
from workshop.findings import Questions

MOST = 64  # processes on this machine's CPU
WATCHES = ("workshop.watch.model", "workshop.watch.training")
PRELOAD = ("lightning.pytorch", "accelerate", "transformers.trainer")
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "False"}
SLEEP = 10.0  # seconds in which no rank does anything: it hangs


def add_arguments(parser):
    parser.add_argument("-n", type=int, default=2, dest="size", metavar="N",
                        help="the number of processes (2)")
    parser.add_argument("--steps", type=int, default=4,
                        help="how many updates are watched (4)")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu",
                        help="where: cpu (the default), or gpu, one of this "
                        "machine for each process")
    parser.add_argument("--resume-with", metavar="FLAGS", help="check what a "
                        "resume brings back, with these flags of the "
                        'script: --resume-with="--resume"')
    parser.add_argument("--events", action="store_true",
                        help=argparse.SUPPRESS)  # for a notebook
    parser.add_argument("program", nargs=argparse.REMAINDER,
                        metavar="-- SCRIPT FLAGS", help="the script, which "
                        "is not changed, and its own flags")


def main(args):
    return int(not verify(args.program, args.size, args.steps,
                          args.resume_with, args.events, args.device))


def verify(program, size, steps, resume_with=None, events=False, device="cpu"):
    """Print the answers; returns whether nothing was found to be wrong.

    program: the script and its flags, in which {n} is the number of
    processes, {rank} the rank, and {run} the name of a run. steps: how many
    updates are watched. resume_with: flags, in one string, that resume a run.
    events: print JSON, for a `Board` elsewhere. device: "gpu" takes one of
    this machine for each process.
    """
    program = program[program[:1] == ["--"]:]
    require(program, "name the script: python -m workshop verify -n 2 -- "
            "train.py --its-flags")
    require(1 < size <= MOST and steps > 0,
            f"-n is 2 to {MOST}, --steps 1 or more")
    script = Path(program[0]).absolute()
    require(script.is_file(), f"{program[0]} is not there")
    if device == "gpu":
        import torch

        count = torch.accelerator.device_count()
        require(count >= size, f"--device gpu takes a GPU for each of the "
                f"{size} processes, and this machine has {count}")
    data, out = scratch.read_script(script), Events() if events else Terminal()
    preload = [*server.PRELOAD, *WATCHES, *(
        name for name in PRELOAD if name.split(".")[0].encode() in data)]
    with scratch.scratch_folder(out.interrupted) as folder:
        server.get_servers(preload, size, 0)  # import torch meanwhile
        from workshop.verify import questions, resume

        (folder / "tmp").mkdir()
        trials = []

        def try_out(size, steps, kind="", more=(), gpus=False):
            trials.append(run(
                folder, script, [*program[1:], *more], size, steps, kind,
                preload, out.say, gpus, device))
            return trials[-1]

        more = Questions()
        if resume_with is not None:
            more.add("a resume brings everything back")(
                lambda case: resume.verify(
                    shlex.split(resume_with), case, steps))

        out.say(f"{script.name} as 1 and as {size} processes, {steps} updates "
                f"on the {device.upper()}")
        findings, not_seen = questions.verify(
            try_out, size, steps, more, device)
        tidy(folder.name[-8:], trials)
    for finding in findings:
        out.report(finding=[finding.verdict, finding.text, finding.advice])
        out.say(f"  {finding.verdict:4}  {finding.text}")
        if finding.advice:
            out.say(f"        -> {finding.advice}")
    out.say("not seen:")
    for text in not_seen:
        out.report(finding=["", text, ""])
        out.say(f"        {text}")
    wrong = sum(finding.verdict == "FAIL" for finding in findings)
    warned = sum(finding.verdict == "warn" for finding in findings)
    out.say(f"\n{wrong} wrong, {warned} to look at."
            + (" The first FAIL is often the cause of the others."
               if wrong > 1 else ""))
    out.report(right=not wrong)
    return not wrong


def tidy(name, trials):
    """Remove the files that the script has made in this folder, or of a named
    run, and the folders that it has made, once they are empty.

    Not what it has read as well: that may be a dataset. Nor what is another
    file by now, or what another program has put into such a folder. A run's
    folder goes as a whole: nobody else knows its name.
    """
    seen = [one for trial in trials for one in trial.seen if one]
    read = {path for one in seen for path in one["read"]}
    made = {path: number for one in seen for path, number
            in one["new"].items()}
    for path in sorted(made, reverse=True):  # what is in a folder before it
        if name in path or (path not in read and path.startswith(
                os.getcwd() + os.sep)):
            with contextlib.suppress(OSError):
                now = os.lstat(path)
                if now.st_ino != made[path]:
                    continue
                if not stat.S_ISDIR(now.st_mode):
                    os.unlink(path)
                elif name in path:
                    shutil.rmtree(path)
                else:
                    os.rmdir(path)


def with_size(flag, size):
    """{n} is the number of processes; {16/n} and {2*n} are calculated."""
    def value(found):
        number, sign = int(found[1] or 1), found[2] or "*"
        if sign == "*":
            return str(number * size)
        require(number % size == 0, f"{found[0]}: {number} is not divisible "
                f"by {size}")
        return str(number // size)

    return re.sub(r"\{(?:(\d+)([*/]))?n\}", value, flag)


def run(folder, script, flags, size, steps, kind, preload, say, gpus, device):
    """Start the script once, under observation: a `Trial`."""
    from workshop.trial import SECONDS, Trial, watch
    from workshop.watch import model

    seen = folder / f"{size}-{kind}{'-gpus' * gpus}"
    place = "saved" if kind == "resumed" else kind  # it goes on there
    name = (f"{folder.name[-8:]}-{size}" + "-gpus" * gpus  # new each time
            + f"-{place}" * bool(place))
    return watch(
        Trial(script), [
            with_size(flag, size).replace("{run}", name) for flag in flags],
        seen, say, {"allowed": SECONDS, "sleep": SLEEP},
        world_size=size,
        probes=model.probes(seen, size, steps, kind, gpus, device),
        env=TORCHRUN | (scratch.quiet_environment(folder / "tmp", {})
                        if device == "gpu" else
                        scratch.quiet_environment(folder / "tmp") | {
            "ACCELERATE_USE_CPU": "true"}),  # else each rank trains alone
        preload=preload, within=folder, hashes=int(kind == "hashes"))
