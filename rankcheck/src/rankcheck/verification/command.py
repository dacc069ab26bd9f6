"""rankcheck verify -n 2 -- train.py --its-flags."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import shutil
import sys
from functools import partial
from pathlib import Path

from rankcheck.engine import fork_server, sandbox, scratch
from rankcheck.engine.findings import Report, warn
from rankcheck.engine.hang_detector import PATIENCE
from rankcheck.engine.report import Events, Quiet, Terminal
from rankcheck.system.errors import NotCompared, UserError, require, show_path
from rankcheck.system.version import require_torch
from rankcheck.verification.program import read

MOST = 64  # processes on this machine's CPU
WATCHES = ("rankcheck.record.training", "rankcheck.record.torch_api")
PRELOAD = ("accelerate", "transformers.trainer")  # not lightning: it reads its
# rank when it is imported
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "False"}
ON_CPU = {**scratch.HIDDEN,
          "ACCELERATE_USE_CPU": "true"}  # else each rank trains alone
REMEDY = ("Name another folder for what it writes: one below the current "
          "folder, or one with {run} in it, which is another name each time.")
SCHEMA = 2  # of --json: another number if a field changes or goes
TEMPORARY = {"nodes": "tmp-nodes"}  # nothing is left in it by a run before
IDLE = 10.0  # seconds in which no rank does anything: does it hang?


def add_arguments(parser):
    parser.add_argument("-n", type=int, default=2, dest="size", metavar="N",
                        help="the number of processes (2)")
    parser.add_argument("--steps", type=int, default=4,
                        help="how many updates are watched (4)")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu",
                        help="where: cpu (the default), or gpu, one of this "
                        "machine for each process")
    parser.add_argument("--patience", type=float, default=PATIENCE,
                        metavar="SECONDS", help="how long it may be idle, as "
                        "in a download, before it is given up "
                        f"({PATIENCE:.0f})")
    parser.add_argument("--resume-with", metavar="FLAGS", help="check what a "
                        "resume brings back, with these flags of the "
                        'script: --resume-with="--resume"')
    parser.add_argument("--allow-uncompared", action="store_true",
                        help="exit with 0 also where nothing could be "
                        "compared with one process, or gradients were not "
                        "seen to be reduced (else the status is 2)")
    parser.add_argument("--json", action="store_true", help="print one JSON "
                        "document instead, which the README describes")
    parser.add_argument("--events", action="store_true",
                        help=argparse.SUPPRESS)  # for a notebook
    parser.add_argument("program", nargs=argparse.REMAINDER,
                        metavar="-- SCRIPT FLAGS", help="the script, which "
                        "is not changed, or -m and a module, and its own "
                        "flags")


def main(args: argparse.Namespace) -> int:
    """Return the exit status: 0, 1 if something is wrong, 2 if not verified.
    """
    options = {name: getattr(args, name) for name in (
        "size", "steps", "resume_with", "device", "patience",
        "allow_uncompared")}
    try:
        if args.json:
            return print_document(args, options)
        report = verify(args.program, events=args.events, **options)
    except UserError as error:
        error.status = 2  # whichever command has called this
        raise
    if report.error:
        print(f"error: {report.error}", file=sys.stderr)
    return report.status


def print_document(args: argparse.Namespace, options: dict) -> int:
    """Print what was found as one JSON document; return the exit status."""
    words = args.program[args.program[:1] == ["--"]:]
    document = {"schema": SCHEMA, "script": "".join(words[:1]),
                "flags": words[1:], "processes": args.size,
                "steps": args.steps, "device": args.device, "status": 2,
                "error": "interrupted", "findings": [], "not_checked": []}
    out = Quiet()
    out.interrupted, findings = b"", ()
    try:
        program = read(args.program)
        document |= {"script": show_path(program.script),
                     "flags": [*program.flags]}
        report = examine(args.program, **options, out=out)
        findings = report.findings
        document |= {"not_checked": [*report.not_checked],
                     "error": report.error or None, "status": report.status}
    except Exception as error:
        findings = getattr(error, "findings", ())
        document["error"] = str(error)
        raise
    finally:
        document["findings"] = [describe(finding, document["script"])
                                for finding in findings]
        print(json.dumps(document, indent=2, allow_nan=False))
    if report.error:
        print(f"error: {report.error}", file=sys.stderr)
    return document["status"]


def describe(finding, script):
    """What JSON says of a finding."""
    return {"question": finding.question or None, "verdict": finding.verdict,
            "text": finding.text, "advice": finding.advice,
            "ranks": [*finding.ranks],
            "places": [{"file": script, "line": line}
                       for line in sorted(finding.lines)],
            "numbers": {name: float(value) if math.isfinite(value) else None
                        for name, value in finding.numbers.items()}}


def verify(*given, events: bool = False, **options) -> Report:
    """Print the answers, with `events` in JSON, for a `Board` elsewhere.

    Further arguments: see `examine`.
    """
    out = Events() if events else Terminal()
    report = examine(*given, **options, out=out)
    out.say("not checked:")
    for text in report.not_checked:
        out.report(finding=["", text, ""])
    summary = (f"{len(report.failures)} wrong, {len(report.warnings)} to "
               "look at.")
    if report.internal_errors:
        summary += " rankcheck itself failed: this is no verdict."
    elif report.status == 2:
        summary += f" Not verified: {'; '.join(report.uncompared)}."
    out.say(f"\n{summary}")
    out.report(right=report.ok)
    return report


def examine(program: list[str], size: int, steps: int,
            resume_with: str | None = None, device: str = "cpu",
            patience: float = PATIENCE, allow_uncompared: bool = False, *,
            out: Quiet) -> Report:
    """Run a script as one and as several processes, and compare.

    Args:
        out: is told how far it has come, and the findings.
        Others: see `rankcheck.verify`; size is its n.

    Raises:
        NotCompared: ranks were idle for too long.
        UserError: the script could not be run.
    """
    require(1 < size <= MOST and steps > 0,
            f"-n is 2 to {MOST}, --steps 1 or more")
    require_torch()
    program = read(program)
    if device == "gpu":
        import torch

        count = torch.accelerator.device_count()
        require(count >= size, f"--device gpu takes a GPU for each of the "
                f"{size} processes, and this machine has {count}")
    data = scratch.read_script(program.script)
    preload = [*fork_server.PRELOAD, *WATCHES, *(
        name for name in PRELOAD if name.split(".")[0].encode() in data)]
    try:
        resume_flags = resume_with and shlex.split(resume_with)
    except ValueError as error:
        raise UserError(f"--resume-with: {error}") from None
    files = sandbox.Kept()
    with scratch.scratch_folder(out.interrupted) as folder:
        fork_server.get_servers(preload, size, 0)  # import torch meanwhile
        fork_server.preload_one("torch")
        from rankcheck.verification import questions, runs

        (folder / "tmp").mkdir()
        files.changed()  # by others, while torch was imported
        out.say(f"{program.name} as 1 and as {size} processes, {steps} updates"
                f" on the {device.upper()}" + (
                    f" ({program.launcher} and its own flags are left out)"
                    if program.launcher else ""))
        made = runs.Runs(partial(
            start, program, folder, preload, out.say, device, patience,
            processes=size), size, steps, device, resume_flags)
        answers = questions.verify(made)
        findings = answers.findings
        if changed := files.changed():
            findings.append(warn(changed, sandbox.BY_WHOM))
    for finding in findings:
        out.report(finding=[finding.verdict, finding.text, finding.advice])
    if made.waited:
        made.waited.findings = findings
        raise made.waited
    uncompared = () if allow_uncompared else tuple(answers.uncompared)
    return Report(program.script, tuple(findings),
                  tuple(answers.not_checked), uncompared,
                  tuple(answers.internal_errors))


def start(program, folder, preload, say, device, patience,
          size, steps, kind="", flags=(), gpus=False, processes=1):
    """Start a program under observation: a `Trial`.

    folder: for all of its runs. size: of how many processes; steps, kind: of
    `Rows`, "nodes" if they believe that they are on two. flags: further ones.
    gpus: whether a CPU stands in for them. processes: how many there are in
    the run of several.
    """
    from rankcheck.engine.exits import explain
    from rankcheck.engine.trial import LITTLE, SECONDS, Trial, watch
    from rankcheck.record import training

    seen = folder / f"{size}-{kind}{'-gpus' * gpus}"
    place = "saved" if kind == "resumed" else kind  # it goes on there
    name = (f"{folder.name[-8:]}-{size}" + "-gpus" * gpus  # always new
            + f"-{place}" * bool(place))
    temporary = folder / TEMPORARY.get(kind, "tmp")
    temporary.mkdir(exist_ok=True)
    copy = sandbox.make(folder, name, program.script)
    cwd, script = copy.name(Path.cwd()), copy.name(program.script)
    if program.module and not script.is_relative_to(cwd):
        script = program.script  # it is imported where it is installed
    trial = watch(
        Trial(script), [*program.with_size(size, name, flags)], seen, say,
        {"allowed": SECONDS, "idle": IDLE, "patience": patience},
        world_size=size, module=program.module,
        place=str(cwd) if program.module else None,
        probes=[copy, *training.probes(
            seen, size, steps, kind, gpus, device,
            {"": 1, "still": processes}.get(kind, 0))],
        nodes=2 if kind == "nodes" else 1,
        env=TORCHRUN | scratch.quiet_environment(
            temporary, {} if device == "gpu" else ON_CPU),
        preload=preload, within=folder, cwd=str(cwd),
        hashes=int(kind == "hashes"))
    copy.require_kept(REMEDY)
    if trial.gave_up == "waits":
        raise NotCompared(
            f"{program.name}, {size} process{'es' * (size > 1)}: "
            f"{explain(trial).text}. If it needs longer: --patience SECONDS")
    if not all(trial.seen) and shutil.disk_usage(folder).free < LITTLE:
        raise scratch.full(folder.parent)  # where checkpoints were saved
    if kind != "saved":
        shutil.rmtree(copy.top, ignore_errors=True)  # large checkpoints
    trial.script, trial.copy = program.script, copy.top
    for rank in trial.ranks:
        rank.out, rank.err = map(copy.as_known, (rank.out, rank.err))
    return trial
