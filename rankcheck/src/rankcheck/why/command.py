"""rankcheck why [RUN|JOBID]: what is wrong, and what to do."""

from __future__ import annotations

import json
import shlex
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rankcheck.engine.findings import Finding, count_of
from rankcheck.system.command_line import Parser
from rankcheck.system.errors import UserError, require
from rankcheck.why import dumps, evidence, hang, start
from rankcheck.why.job_report import (
    JobReport,
    describe_missing,
    describe_ranks,
    describe_stacks,
    group_equal,
    name_job,
    report_job,
    sort_reports,
    to_json,
)
from rankcheck.why.ranks import Rank, RankNumbers

SCHEMA = 3  # of --json: another number if a field changes or goes
TIMED = 4  # ranks of which the lines are told that take the time
PROFILE_INTERVAL = 5  # seconds between two samples


def add_arguments(parser: Parser) -> None:
    parser.after = "those of the job's own command"
    parser.description = (f"{parser.description} `why run -- torchrun ...` "
                          "starts a job so that this is known.")
    parser.add_argument("job", nargs="?", metavar="RUN|JOBID", help="its "
                        "folder, or SLURM's number of it; without it, the job "
                        "that was started last")
    parser.add_argument("--json", action="store_true", help="print one JSON "
                        "document")
    parser.add_argument("--stacks", action="store_true", help="also print "
                        "whole stacks, equal ones once")
    parser.add_argument("--on-hang", metavar="COMMAND", help="of `why run`: "
                        "run this once, when no rank has made progress for "
                        "the time of --hang-after; {} in it is the folder")
    parser.add_argument("--hang-after", type=float, metavar="SECONDS",
                        default=hang.HANG_SECONDS, help="for --on-hang "
                        "(%(default)s)")


RUNS_FOLDER = Path("runs")  # where a job's folder is looked for by its number


def describe_nothing(folder: Path) -> str:
    return ""


def explain_nothing(folder: Path) -> Iterable[str]:
    return ()


@dataclass(frozen=True)
class Request:
    """What is asked, and by whom.

    Attributes:
        target: a run's folder, or a job's id; None: what was started last.
        runs: where a job's folder is looked for by its number.
        describe_run: says in a line how the run in a folder was started.
        explain_speed: says in several what its steps' time goes to; both say
            nothing if they do not know it.
    """

    target: str | None
    as_json: bool = False
    stacks: bool = False
    runs: Path = RUNS_FOLDER
    describe_run: Callable[[Path], str] = describe_nothing
    explain_speed: Callable[[Path], Iterable[str]] = explain_nothing


def main(args: Namespace, runs: Path = RUNS_FOLDER,
         describe_run: Callable[[Path], str] = describe_nothing,
         explain_speed: Callable[[Path], Iterable[str]] = explain_nothing
         ) -> int:
    """Answer a command line; returns 2 if there is nothing to see.

    Args:
        args: of `add_arguments`; other callers may leave out all but `job`.
        runs, describe_run, explain_speed: as `Request` has them.
    """
    given = vars(args)
    try:
        if args.job == "run" and args.flags:
            start_monitor = None
            if args.on_hang is not None:
                require(args.on_hang.strip(), "--on-hang needs a command; "
                        "fix: --on-hang 'rankcheck why {}'")
                require(args.hang_after > 0, "--hang-after must be more than "
                        "0 seconds; fix: name them, as in --hang-after 900")
                start_monitor = partial(
                    hang.start_monitor, command=args.on_hang,
                    seconds=args.hang_after)
            start.exec_command(args.flags, start_monitor)
        if args.job == "run" and not Path("run").is_dir():
            raise UserError("no command is named that starts the job; fix: "
                            "rankcheck why run -- torchrun ...")
        if given.get("on_hang") is not None:
            raise UserError("--on-hang belongs to a start: rankcheck why run "
                            "--on-hang COMMAND -- torchrun ...")
        return answer_request(Request(
            args.job, given.get("json", False), given.get("stacks", False),
            runs, describe_run, explain_speed))
    except UserError as error:
        if given.get("json"):
            candidates = []
            if isinstance(error, evidence.Ambiguous):
                candidates = [asdict(one) for one in error.candidates]
            print_job_document({"status": 2, "error": str(error),
                                "candidates": candidates})
        else:
            print(f"error: {error}", file=sys.stderr)
        return 2


def answer_request(request: Request) -> int:
    """Print the answer; returns the exit status, 1 if a fault is proven.

    Raises:
        UserError: if there is nothing to see.
    """
    target = request.target
    try:
        folder = evidence.find_evidence(target, request.runs)
    except UserError:  # flight-recorder dumps may be all that there is
        files = dumps.find_files(target) if target else {}
        if not files:
            raise
        return answer_dumps(files, request)
    starts = start.starts_of(folder)
    begun = starts[-1] if starts else None
    commands = {one.token: one.command for one in starts}
    name = target or str(folder)
    if target is None and not request.as_json:
        print(f"last start: {folder}",
              *(begun.command if begun else ()))
    found = evidence.gather(folder)
    if not found.jobs or (begun and is_unseen(begun, found.jobs)):
        raise UserError(f"{name}: {evidence.say_begin(folder)}")
    if found.refused and any(rank.alive is not False and not rank.ended
                             for rank in found.ranks):
        raise UserError(say_refused(folder, found))
    reports = sort_reports([
        report_job(ranks, partial(sample_again, folder, ranks))
        for ranks in found.jobs], begun.token if begun else None)
    status = int(any(one.is_fault for one in reports))
    if request.as_json:
        first, *others = [to_json(one, request.stacks) for one in reports]
        print_job_document({
            "status": status, "folder": str(folder),
            "command": find_command(reports[0], commands), **first,
            "other_jobs": others,
            "slurm": evidence.ask_about_job(name)})
        return status
    if len(reports) == 1:
        print_report(reports[0], request, folder)
    else:
        print_reports(reports, request, folder, commands)
    if not all(one.runs for one in reports):
        print_outputs(starts, found.jobs)
    if reports[0].finding.kind in ("", "straggler"):
        for line in request.explain_speed(find_run_folder(request, folder)):
            print(line)
    return status


def answer_dumps(files: dict[int, Path], request: Request) -> int:
    """Print what flight-recorder dumps show; returns the exit status."""
    read = [dumps.load_dump(rank, file) for rank, file in files.items()]
    folder = read[0].file.parent
    findings = sorted(dumps.judge_dumps(read),
                      key=lambda found: not found.kind)
    status = int(any(found.kind for found in findings))
    if request.as_json:
        document: dict[str, Any] = {
            "status": status, "folder": str(folder), "blamed": []}
        if findings:
            first = findings[0]
            document |= {"kind": first.kind, "verdict": first.verdict,
                         "text": first.text, "fix": first.fix_text,
                         "blamed": [*first.ranks]}
        print_job_document(document)
        return status
    print(f"{len(read)} flight-recorder dumps, of {RankNumbers(files)}: "
          f"{folder}")
    for found in findings:
        print_finding(found)
    if not findings:
        print("no fault is proven: no collective waits in any group")
    print("dumps show collectives only: `rankcheck why run -- COMMAND` "
          "records what else ranks do")
    return status


def print_finding(finding: Finding) -> None:
    print(f"{finding.kind or 'no fault is proven'}: {finding.text}")
    if finding.fix_text:
        label = "fix" if finding.kind else "inspect"
        print(f"{label}: {finding.fix_text}")


def find_command(found: JobReport,
                 commands: Mapping[str, list[str]]) -> list[str] | None:
    """Return by which command a job was started; None if it is not known.

    Args:
        commands: what each start has started, by its token.
    """
    if found.token is None:
        return None
    return commands.get(found.token)


def print_job_document(fields: dict[str, Any]) -> None:
    """Print one JSON document, with all fields: what is not known is null."""
    document = dict.fromkeys((
        "schema", "status", "error", "folder", "command", "kind", "verdict",
        "text", "fix", "blamed", "world_size", "missing", "ranks",
        "other_jobs", "slurm", "candidates"))
    print(json.dumps({**document, "schema": SCHEMA, **fields}, indent=2,
                     allow_nan=False))


def is_unseen(begun: start.Start, found: list[list[Rank]]) -> bool:
    """Whether the folder's last start has no rank yet, and all that it holds
    is over, of earlier ones.
    """
    ranks = [rank for some in found for rank in some]
    tokens = {rank.token for rank in ranks}
    if begun.token in tokens or None in tokens:
        return False
    return not any(
        rank.runs or rank.written > begun.time for rank in ranks)


def say_refused(folder: Path, found: evidence.Evidence) -> str:
    """Return that the ranks could not be asked, and what they wrote before.
    """
    lines = [f"{folder} cannot be written to ({found.refused}), so the ranks "
             "could not be asked where they are",
             "fix: ask as the user who started the job, or free space on that "
             "disk", "what they wrote before:"]
    for rank in found.ranks:
        lines.append(f"  rank {rank.rank} on {rank.host}, process {rank.pid}: "
                     f"last wrote at {rank.last_report}")
    return "\n".join(lines)


def print_outputs(starts: list[start.Start], found: list[list[Rank]]) -> None:
    """Print how the outputs of those starts end of which ranks were found."""
    tokens = {rank.token for ranks in found for rank in ranks}
    known = [one for one in starts if one.token in tokens]
    for begun in known or starts[-1:]:
        output = evidence.say_output(begun)
        if output:
            print(f"  {output}")


def find_run_folder(request: Request, folder: Path) -> Path:
    """Return the run's folder: the evidence is in RUN/why or in
    RUN/why/JOB-START.
    """
    return next(filter(request.describe_run, [*folder.parents][:2]),
                folder.parent)


def print_reports(reports: list[JobReport], request: Request, folder: Path,
                  commands: dict[str, list[str]]) -> None:
    """Print of several jobs in full those with a fault, those that run, and
    the last one; of the others a line.

    Args:
        commands: what each start has started, by its token.
    """
    tokens = {one.token for one in reports}
    count = sum(one.runs for one in reports)
    print(f"{len(reports)} jobs were started here, {count} still running; "
          "the most important is first")
    newest = max(reports, key=lambda one: one.ranks[0].began)
    for number, one in enumerate(reports, 1):
        name = name_job(one)
        command = find_command(one, commands)
        if len(tokens) > 1 and command is not None:
            name += f", of {shlex.join(command)}"
        print(f"\njob {number} of {len(reports)}: {name}")
        if one.is_fault or one.runs or one is newest:
            print_report(one, request, folder)
        else:
            print(f"no fault is proven: {one.finding.text}")


def print_report(found: JobReport, request: Request, folder: Path) -> None:
    finding = found.finding
    print_finding(finding)
    for line in evidence.ask_about_job(request.target or str(folder)):
        print(f"  SLURM: {line}")
    about = request.describe_run(find_run_folder(request, folder))
    if about:
        print(f"  {about}")
    for group in group_equal(found.ranks):
        print(f"  {describe_ranks(group)}")
    missing = describe_missing(found)
    if missing:
        print(f"  {missing}")
    timed = [rank for rank in found.ranks if rank.runs and (
        rank is found.ranks[0] or rank in finding.ranks)]
    for rank in timed[:TIMED]:
        print_times(rank)
    if request.stacks:
        print(*describe_stacks(found.ranks), sep="\n")


def sample_again(folder: Path, ranks: list[Rank]) -> list[Rank]:
    """Return the ranks of the same job, sampled again some seconds later."""
    time.sleep(PROFILE_INTERVAL)
    first = {(rank.host, rank.pid) for rank in ranks}
    for later in evidence.gather(folder).jobs:
        if first & {(rank.host, rank.pid) for rank in later}:
            return later
    return []


def print_times(rank: Rank, most: int = 4) -> None:
    """Print the lines of the script that the rank spends its time in.

    On a GPU these are the lines that wait for it, or keep it waiting.

    Args:
        most: how many lines, at most.
    """
    lines: Counter[str] = Counter()
    for sample in rank.stack_samples:
        place = str(rank.find_place(sample.stack))
        if rank.sources.find_wait(sample.stack):
            place += " (waits for other ranks)"
        lines[place] += sample.times
    whole = sum(lines.values())
    if whole:
        print(f"rank {rank.rank}, {count_of(whole, 'stack sample')} over 2 s:")
    for line, times in lines.most_common(most):
        print(f"  {100 * times / whole:3.0f}%  {line}")
