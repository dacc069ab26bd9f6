"""The runs that verify makes of a script, each when it is first asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rankcheck.engine.exits import RUN_ON_CPU, explain_failure
from rankcheck.engine.findings import Finding, count_of, fail, warn
from rankcheck.engine.run_record import RunRecord
from rankcheck.system.errors import NotCompared

STOOD_IN = ("check whether this happens on GPUs as well: they were simulated "
            "on the CPU, as the script does not run without them")
NAME_RUNS = ("put {run} in the path, as in --run-dir /tmp/run-{run}: verify "
             "replaces {run} with a new name in each of its runs")
ERROR_FIXES = (  # words of the error with which the script has ended
    ("finished reduction in the prior iteration", "remove parameters that "
     "get no gradient, for which DDP waits, or set "
     "find_unused_parameters=True"),
    ("FileExistsError", NAME_RUNS),
    ("attempted relative import", "run it as a module, from the "
     "folder that holds the package: rankcheck verify -- -m package.module"))
ON_TWO = "on two simulated nodes"
SPAWNS = ("read RANK and WORLD_SIZE from the environment, and do not call "
          "mp.spawn: verify starts the processes, as torchrun does")


@dataclass(frozen=True)
class RunKind:
    """A run that the questions may ask for.

    Attributes:
        is_multi_process: whether it is of several processes.
        prefix: how a sentence about its end begins.
    """

    is_multi_process: bool
    prefix: str = ""


RUN_KINDS = {
    "single": RunKind(False, "with 1 process, "),
    "multi": RunKind(True, "with {size} processes, "),
    # with frozen weights, and with as many steps as read the same samples:
    # where several processes read that many minibatches of one
    "frozen": RunKind(False),
    # with other hashes of strings, or as it was: where one process reads other
    # samples, or begins with other weights
    "hashes": RunKind(False), "repeated": RunKind(False),
    # on two nodes, as far as the environment says it: where all else is right
    "nodes": RunKind(True, f"{ON_TWO}, "),
    # where the script is resumed
    "saved": RunKind(True, "run to be resumed: "),
    "resumed": RunKind(True, "resumed run: "),
}


@dataclass(frozen=True)
class PlannedRun:
    """One start of the script.

    Attributes:
        size: the number of processes.
        steps: steps of the first optimizer, after which it ends.
        kind: of `Rows`; "nodes" if the processes believe that they are on two.
        flags: of the script, beside its own.
        gpus: whether a CPU stands in for GPUs.
    """

    size: int
    steps: int
    kind: str = ""
    flags: Sequence[str] = ()
    gpus: bool = False


class RunOutcome(NamedTuple):
    """The result of a run, and what is to be said of its end, if anything.

    Of a run in which the ranks were idle for too long nothing is known, but
    that its run gave up, as it "waits".
    """

    run: RunRecord
    ended: Finding | None


class Runs:
    """The runs of a script, each made when it is first asked for.

    Attributes:
        size: the number of processes in the runs of several.
        steps: steps that are watched.
        device: "gpu" where there are GPUs, else "cpu".
        gpus: whether a CPU stands in for GPUs in the next run.
        resume_flags: those that resume a run, if that is asked for, or None.
        idle_error: that of a run without which the others were compared, or
            None.
    """

    def __init__(self, start: Callable[[PlannedRun], RunRecord], size: int,
                 steps: int, device: str = "cpu",
                 resume_flags: Sequence[str] | None = None) -> None:
        """start: starts the script, watches it and returns the result."""
        self.start, self.size, self.steps = start, size, steps
        self.device, self.resume_flags = device, resume_flags
        self.gpus = False
        self.outcomes: dict[tuple[str, bool], RunOutcome] = {}
        self.idle_error: NotCompared | None = None

    def __call__(self, name: str, flags: Sequence[str] | None = None,
                 fewer: int = 0) -> RunOutcome:
        """Return a run, and make it unless that was done.

        Args:
            name: of `RUN_KINDS`.
            flags: of the script, beside its own.
            fewer: by how many steps it ends earlier than others.

        Raises:
            NotCompared: the ranks were idle for too long, in a run without
                which nothing is compared.
        """
        kind, key = RUN_KINDS[name], (name, self.gpus)
        if key in self.outcomes:
            return self.outcomes[key]
        size = self.size if kind.is_multi_process else 1
        steps = self.steps
        if name == "frozen":
            steps *= self.size
        is_compared = name in ("single", "multi")
        planned = PlannedRun(size, steps - fewer, "" if is_compared else name,
                             flags or (), self.gpus)
        try:
            run = self.start(planned)
            outcome = RunOutcome(
                run, explain_end(run, kind.prefix.format(size=size)))
        except NotCompared as error:
            if is_compared and (name, False) not in self.outcomes:
                raise  # nothing is compared without it
            self.idle_error = error
            outcome = RunOutcome(RunRecord(Path(), gave_up="waits"),
                                 warn(str(error), "", kind="idle"))
        self.outcomes[key] = outcome
        return outcome

    def of_first(self, name: str) -> RunOutcome:
        """Return the first run of a script, as it is or else with a CPU in a
        GPU's place, where it fails only as it is.
        """
        run, ended = self(name)
        if (not ended or run.gave_up or run.killed
                or self.device == "gpu"):
            return RunOutcome(run, ended)
        self.gpus = True
        other, fails = self(name)
        self.gpus = not fails
        if not fails:
            return RunOutcome(other, None)
        # {run} in a flag is another name there
        if (other.gave_up == "waits"
                or fails.text.replace("-gpus", "") == ended.text):
            return RunOutcome(run, ended)  # it came no farther
        fix = fails.fix_text.replace(RUN_ON_CPU, "")
        if fix:
            fix += " " if fix.endswith("?") else "; "
        fails.fix = [fix + STOOD_IN]
        return RunOutcome(other, fails)


def explain_end(run: RunRecord, prefix: str = "") -> Finding | None:
    """Return a finding if a run failed or made no step, else None.

    prefix: how the finding's sentence begins.
    """
    finding = explain_failure(run)
    if finding:
        finding.sentence.insert(0, prefix)
        for error, fix in ERROR_FIXES:
            if error in finding.error:
                finding.fix = [fix]
                break
        if any(record and run.facts("spawn", rank)
               for rank, record in enumerate(run.records)):
            finding.fix = [SPAWNS]
        return finding
    if all(record and record.steps for record in run.records):
        return None
    text = f"{prefix}no PyTorch optimizer takes a step"
    lines = [line for line in run.ranks[0].out.splitlines() if line.strip()]
    if lines:
        text += f'; last line of output: "{lines[-1][:200]}"'
    return fail(text, "check that the script trains with these flags, and "
                "that it does not start processes itself", kind="no-step")


def reduces(run: RunRecord) -> bool:
    """Return whether a rank sends others anything of which they take a mean.
    """
    steps = [step for record in run.records if record
             for step in record.steps]
    return any(step["reduced"] or step.get("within")
               for step in steps)


def compare_step_counts(run: RunRecord) -> list[Finding]:
    """Return a failure if the ranks have not made as many steps."""
    if any(record and run.facts("join", rank)
           for rank, record in enumerate(run.records)):
        return []  # they need not
    made = [run.count_steps(rank) for rank in range(len(run.records))]
    for rank, count in enumerate(made):
        if abs(count - made[0]) > 1 or min(made[0], count) == 0 < max(made):
            return [fail(f"rank {rank} makes {count_of(count, 'step')}, "
                         f"rank 0 {made[0]}", "call optimizer.step() on every "
                         "rank after every minibatch", ranks=[rank],
                         numbers={"steps": count}, kind="uneven-steps")]
    return []
