"""rankcheck verify -n 2 -- train.py --its-flags."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from rankcheck.engine import fork_server, run, sandbox, scratch
from rankcheck.engine.findings import (
    Finding,
    Report,
    count_of,
    counted,
    warn,
)
from rankcheck.engine.hang_detector import PATIENCE, Budget
from rankcheck.engine.progress import (
    LOADING,
    paused_collection,
    saying_that_it_lasts,
)
from rankcheck.engine.report import Events, Quiet, Terminal
from rankcheck.engine.workspace import Workspace, open_workspace
from rankcheck.system.errors import NotCompared, UserError, require, show_path
from rankcheck.system.version import require_torch
from rankcheck.verification.program import Program, read_program

if TYPE_CHECKING:  # they import torch
    from rankcheck.engine.run_record import RunRecord
    from rankcheck.verification.runs import PlannedRun

MOST_PROCESSES = 64  # processes on this machine's CPU
WATCHES = ("rankcheck.record.training", "rankcheck.record.torch_api")
# Not lightning: it reads its rank when it is imported
PRELOAD_IF_NAMED = ("accelerate", "transformers.trainer")
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "False"}
CPU_VARIABLES = {**scratch.HIDDEN_GPUS,
                 "ACCELERATE_USE_CPU": "true"}  # else each rank trains alone
FIX = ("fix: let it write to another folder: one below the current "
       "folder, or one with {run} in its name, which is new each time")
SCHEMA = 4  # of --json: another number if a field changes or goes
TEMPORARY = {"nodes": "tmp-nodes"}  # nothing is left in it by a run before
RANKS_IDLE = 10.0  # seconds in which no rank does anything: does it hang?


class Options(TypedDict):
    """What the command line says beside the program, for `examine`."""

    size: int
    steps: int
    resume_with: str | None
    device: str
    patience: float
    allow_uncompared: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-n", type=int, default=2, dest="size", metavar="N",
                        help="the number of processes (2)")
    parser.add_argument("--steps", type=int, default=4,
                        help="how many optimizer steps are watched (4)")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu",
                        help="cpu (the default), or gpu: one GPU of this "
                        "machine for each process")
    parser.add_argument("--patience", type=float, default=PATIENCE,
                        metavar="SECONDS", help="how long the script may be "
                        "idle, as in a download, before it is stopped "
                        f"({PATIENCE:.0f})")
    parser.add_argument("--resume-with", metavar="FLAGS", help="check what a "
                        "resume restores, with these flags of the "
                        'script: --resume-with="--resume"')
    parser.add_argument("--allow-uncompared", action="store_true",
                        help="exit with status 0, not 2, if nothing could be "
                        "compared with the single-process run, or gradients "
                        "were not seen to be reduced")
    parser.add_argument("--json", action="store_true", help="print one JSON "
                        "document instead (see the README)")
    parser.add_argument("--events", action="store_true",
                        help=argparse.SUPPRESS)  # for a notebook
    parser.add_argument("program", nargs=argparse.REMAINDER,
                        metavar="-- SCRIPT FLAGS", help="the script, which is "
                        "not changed, or -m and a module, and its flags")


def main(args: argparse.Namespace) -> int:
    """Return the exit status: 0, 1 if something is wrong, 2 if not verified.
    """
    options: Options = {
        "size": args.size, "steps": args.steps,
        "resume_with": args.resume_with, "device": args.device,
        "patience": args.patience, "allow_uncompared": args.allow_uncompared}
    try:
        if args.json:
            return print_document(args.program, options)
        report = verify(args.program, events=args.events, **options)
    except UserError as error:
        error.status = 2  # whichever command has called this
        raise
    if report.error:
        print(f"error: {report.error}", file=sys.stderr)
    return report.status


def print_document(command: list[str], options: Options) -> int:
    """Print what was found as one JSON document; return the exit status.

    command: the program, as `read_program` takes it.
    """
    given = command[1:] if command[:1] == ["--"] else command
    document: dict[str, Any] = {
        "schema": SCHEMA, "script": "".join(given[:1]), "flags": given[1:],
        "processes": options["size"], "steps": options["steps"],
        "device": options["device"], "status": 2, "error": "interrupted",
        "findings": [], "not_checked": []}
    out = Quiet()
    out.interrupted = b""
    findings: Sequence[Finding] = ()
    try:
        program = read_program(command)
        document |= {"script": show_path(program.script),
                     "flags": [*program.flags]}
        report = examine(command, **options, out=out)
        findings = report.findings
        document |= {"not_checked": [*report.not_checked],
                     "error": report.error or None, "status": report.status}
    except Exception as error:
        findings = getattr(error, "findings", ())
        document["error"] = str(error)
        raise
    finally:
        document["findings"] = [finding_to_json(finding, document["script"])
                                for finding in findings]
        print(json.dumps(document, indent=2, allow_nan=False))
    if report.error:
        print(f"error: {report.error}", file=sys.stderr)
    return report.status


def finding_to_json(finding: Finding, script: str) -> dict[str, Any]:
    """Return what JSON says of a finding. script: as the document names it.
    """
    return {"question": finding.question or None,
            "kind": finding.kind, "verdict": finding.verdict,
            "text": finding.text, "fix": finding.fix_text,
            "ranks": [*finding.ranks],
            "places": [{"file": script, "line": line}
                       for line in sorted(finding.lines)],
            "numbers": {name: float(value) if math.isfinite(value) else None
                        for name, value in finding.numbers.items()}}


def verify(command: list[str], size: int, steps: int,
           resume_with: str | None = None, device: str = "cpu",
           patience: float = PATIENCE, allow_uncompared: bool = False, *,
           events: bool = False) -> Report:
    """Run a script as one and as several processes, and print the answers.

    Args:
        events: print JSON, for a `Board` elsewhere.
        Others: see `examine`.
    """
    out = Events() if events else Terminal()
    report = examine(command, size, steps, resume_with, device, patience,
                     allow_uncompared, out=out)
    out.say("not checked:")
    for text in report.not_checked:
        out.report(finding=["", text, ""])
    summary = (f"{counted(report.failures, 'failure')}, "
               f"{counted(report.warnings, 'warning')}.")
    if report.internal_errors:
        summary += " rankcheck itself failed, so this is not a verdict."
    elif report.status == 2:
        summary += f" Not verified: {'; '.join(report.uncompared)}."
    out.say(f"\n{summary}")
    out.report(right=report.ok)
    return report


def examine(command: list[str], size: int, steps: int,
            resume_with: str | None = None, device: str = "cpu",
            patience: float = PATIENCE, allow_uncompared: bool = False, *,
            out: Quiet) -> Report:
    """Run a script as one and as several processes, and compare.

    Args:
        command: the script, or -m and a module, and its flags: see
            `read_program`.
        out: is told how far it has come, and the findings.
        Others: see `rankcheck.verify`; size is its n.

    Raises:
        NotCompared: ranks were idle for too long.
        UserError: the script could not be run.
    """
    require(1 < size <= MOST_PROCESSES and steps > 0,
            f"-n must be 2 to {MOST_PROCESSES}, and --steps 1 or more")
    require(patience > 0, "--patience must be more than 0 seconds; "
            "fix: name them, as in --patience 60")
    require_torch()
    program = read_program(command)
    if device == "gpu":
        import torch

        count = torch.accelerator.device_count()
        require(count >= size, f"--device gpu needs a GPU for each of the "
                f"{size} processes, but this machine has {count}")
    data = scratch.read_script(program.script)
    preload = [*run.PRELOAD, *WATCHES, *(
        name for name in PRELOAD_IF_NAMED
        if name.split(".")[0].encode() in data)]
    resume_flags = split_flags(resume_with)
    with open_workspace(out.interrupted) as workspace:
        fork_server.get_servers(preload, size, 0)  # import torch meanwhile
        text = (f"Running {program.name} with 1 and with {size} processes, "
                f"{count_of(steps, 'optimizer step')} each, on the "
                f"{device.upper()}")
        if program.launcher:
            text += f" (without {program.launcher} and its flags)"
        out.say(text)
        with saying_that_it_lasts(out.say, LOADING), paused_collection():
            fork_server.preload_one("torch")
            from rankcheck.verification import questions, runs

        workspace.files.changed()  # by others, while torch was imported
        experiment = Experiment(program, size, device, patience, workspace,
                                preload, out.say)
        script_runs = runs.Runs(experiment.start, size, steps, device,
                                resume_flags)
        verification = questions.ask_questions(script_runs)
        findings = verification.findings
        if changed := workspace.files.changed():
            findings.append(warn(changed, sandbox.BY_WHOM,
                                 kind="changed-files"))
    for finding in findings:
        out.report(finding=[finding.verdict, finding.text, finding.fix_text])
    if script_runs.idle_error:
        script_runs.idle_error.findings = findings
        raise script_runs.idle_error
    uncompared = () if allow_uncompared else tuple(verification.uncompared)
    return Report(program.script, tuple(findings),
                  tuple(verification.not_checked), uncompared,
                  tuple(verification.internal_errors),
                  verification.comparable_by)


def split_flags(text: str | None) -> list[str] | None:
    """Split the flags that resume a run, as a shell does."""
    if text is None:
        return None
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"--resume-with: {error}") from None


@dataclass(frozen=True)
class Experiment:
    """A program that is to be verified, and how all of its runs are made.

    Attributes:
        program: what is run.
        size: the number of processes in the runs of several.
        device: "gpu" where there are GPUs, else "cpu".
        patience: seconds without a step after which idle ranks are given
            up.
        workspace: where the runs are made.
        preload: modules that are imported once for all ranks.
        say: is told what a run waits for.
    """

    program: Program
    size: int
    device: str
    patience: float
    workspace: Workspace
    preload: Sequence[str]
    say: Callable[[str], None]

    def start(self, planned: PlannedRun) -> RunRecord:
        """Start the program, watch it, and return the result.

        Raises:
            NotCompared: the ranks were idle for too long.
            UserError: the script could not be run.
        """
        from rankcheck.engine.exits import explain_failure
        from rankcheck.engine.run_record import SECONDS, RunRecord
        from rankcheck.record import training

        program, folder = self.program, self.workspace.folder
        size, kind = planned.size, planned.kind
        stand_in = "-gpus" if planned.gpus else ""
        record_folder = folder / f"{size}-{kind}{stand_in}"
        name = f"{folder.name[-8:]}-{size}{stand_in}"  # always new
        if kind == "resumed":
            name += "-saved"  # it goes on there
        elif kind:
            name += f"-{kind}"
        temporary = folder / TEMPORARY.get(kind, "tmp")
        temporary.mkdir(exist_ok=True)
        copy = sandbox.make(folder, name, program.script)
        cwd, script = copy.name(Path.cwd()), copy.name(program.script)
        if program.module and not script.is_relative_to(cwd):
            script = program.script  # it is imported where it is installed
        # of how many steps the modules' outputs are recorded
        outputs = {"": 1, "frozen": self.size}.get(kind, 0)
        hidden = {} if self.device == "gpu" else CPU_VARIABLES
        run = self.workspace.run(
            RunRecord(script), program.with_size(size, name, planned.flags),
            record_folder, self.say,
            Budget(SECONDS, idle=RANKS_IDLE, patience=self.patience,
                   steps=planned.steps),
            sandbox=copy, fix=FIX,
            env=TORCHRUN | scratch.quiet_environment(temporary, hidden),
            world_size=size, module=program.module,
            place=str(cwd) if program.module else None,
            probes=training.probes(
                record_folder, size, planned.steps, kind, planned.gpus,
                self.device,
                outputs),
            nodes=2 if kind == "nodes" else 1,
            preload=self.preload, hashes=int(kind == "hashes"))
        if run.gave_up == "waits":
            raise NotCompared(self.describe_idle_run(size,
                                                     explain_failure(run)))
        if kind != "saved":
            shutil.rmtree(copy.top, ignore_errors=True)  # large checkpoints
        run.script, run.copy = program.script, copy.top
        for rank in run.ranks:
            rank.out = copy.as_known(rank.out)
            rank.err = copy.as_known(rank.err)
        return run

    def describe_idle_run(self, size: int, ended: Finding | None) -> str:
        """Say what the ranks of a run waited in."""
        text = ended.text if ended else ""
        return (f"{self.program.name}, {count_of(size, 'process')}: {text}. "
                "fix: --patience SECONDS, if it needs longer")
