"""The runs of a check, in turn, until one is wrong.

Trying a script (`run_and_ask`) prints nothing; what is printed follows from
the `Outcome` of each run.
"""

from __future__ import annotations

import re
import time
import tokenize
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from backstage.errors import UserError, require
from rankcheck.engine import exits
from rankcheck.engine.findings import Finding, Report, count_of
from rankcheck.engine.progress import Reminder
from rankcheck.engine.report import Quiet
from rankcheck.engine.scratch import remove
from workshop.board import CheckTerminal
from workshop.check import localise
from workshop.check.lines import NameLine, lines_as_in, name_lines
from workshop.check.plan import STEPS, Mesh, StageRunPlan, plan_runs
from workshop.check.questions import ask_about_run
from workshop.check.questions.question import read_number
from workshop.check.stage_runs import Bench, StageRun
from workshop.diff import documents
from workshop.diff.diff import Diff, RemainingChange
from workshop.diff.render import next_command, saved_at
from workshop.stages import FIRST_STAGE, STAGES

references: dict[object, StageRun] = {}  # by the solution's path


@dataclass(frozen=True)
class Mistake:
    """The first thing that is wrong in a run.

    Attributes:
        title: of the question.
        text: what the attendee reads.
        lines: that it names, of the script that was tried.
        error: with which that ended, without the numbers in it.
    """

    title: str
    text: str
    lines: frozenset[int]
    error: str


@dataclass(frozen=True)
class Outcome:
    """The findings of a run.

    Attributes:
        planned: what was to be tried.
        run: its records.
        findings: in the order of the questions, with lines as the attendee
            knows them. If there is a failure, the verdict of all else that
            is not right is "and": it may follow from that.
        mistake: the first failure, if there is one.
        internal_errors: a line for each question that raised an exception.
    """

    planned: StageRunPlan
    run: StageRun
    findings: list[Finding]
    mistake: Mistake | None
    internal_errors: list[str]

    @property
    def is_right(self) -> bool:
        return not self.mistake and not self.internal_errors


def run_and_ask(bench: Bench, planned: StageRunPlan,
                name: NameLine) -> Outcome:
    """Make a run, and ask all questions about it.

    name: what a `Line` of the script that is tried is called.
    """
    run = bench.make(planned)
    results = ask_about_run(run, reference_of(bench), planned.kind)
    failures = [one for one in results.findings if one.verdict == "FAIL"]
    mistake = None
    if failures:
        first = failures[0]
        mistake = Mistake(first.question, name_lines(first, name).text,
                          frozenset(first.lines),
                          re.sub(r"\d+", "0", first.error))
    findings = []
    for finding in results.findings:
        named = name_lines(finding, name)
        if failures and finding.verdict != "ok" and finding is not first:
            named = replace(named, verdict="and")
        findings.append(named)
    return Outcome(planned, run, findings, mistake, results.internal_errors)


def reference_of(bench: Bench) -> StageRun:
    """Return the single device's run, made once for all checks of this
    program.
    """
    if bench.reference:
        return bench.reference
    solution = STAGES[FIRST_STAGE].solution
    if solution not in references:
        one = bench.with_script(solution.read_bytes(), FIRST_STAGE).make(
            StageRunPlan("1", "whole", Mesh()))
        reason = exits.explain_rank(one, 0).text
        require(len(one.rows) == STEPS and one.records[0], "the single-device "
                f"stage does not run here: it {reason}")
        references[solution] = one
    bench.reference = references[solution]
    return bench.reference


@dataclass(frozen=True)
class StageCheck:
    """The check of one script.

    Attributes:
        bench: where the runs are made.
        out: is told how far it has come, and the findings.
        name: what a `Line` of the script that is tried is called.
        change: the one that is tried alone, or None.
        verbose: whether the answers that are right are told, too.
    """

    bench: Bench
    out: Quiet
    name: NameLine
    change: localise.OneChange | None = None
    verbose: bool = False

    def execute(self) -> Report:
        """Make the runs, tell what is found, and return that.

        Raises:
            UserError: the script could not be run.
        """
        plan = plan_runs(self.bench.stage, quickly=bool(self.change))
        self.announce(plan)
        reference_of(self.bench)
        outcomes: list[Outcome] = []
        for place, planned in enumerate(plan, 1):
            self.out.report(run=planned.name)
            self.out.say(f"\nRun {place} of {len(plan)}: "
                         f"{planned.mesh.description}{planned.about}")
            outcome = run_and_ask(self.bench, planned, self.name)
            outcomes.append(outcome)
            self.tell(outcome)
            if not outcome.is_right:
                break
        report = make_report(self.bench, outcomes)
        self.conclude(report, outcomes, len(plan))
        return report

    # ------------------------------------------------------ what is printed

    def announce(self, plan: Sequence[StageRunPlan]) -> None:
        """Tell what will be tried."""
        names = [planned.name for planned in plan]
        self.out.report(columns=names)
        shown = [name for name in names if "x" in name[1:2]]
        if shown:
            self.out.report(
                about=f"{shown[0]}: pipeline x data x tensor parallel.")
        script = self.bench.script
        self.out.say(f"Comparing {script.name}, last {saved_at(script)}, with "
                     "the single-device stage, which the check runs first. "
                     f"Settings: preset tiny, fp32, {STEPS} steps")

    def tell(self, outcome: Outcome) -> None:
        """Tell what a run has shown."""
        for finding in outcome.findings:
            self.out.report(answer=[finding.question, finding.verdict])
        run = outcome.run
        if outcome.planned.kind == "whole" and all(run.records):
            picture = draw_reading(run, reference_of(self.bench))
            self.out.report(picture=picture)
        if outcome.mistake:
            self.out.report(table=None)
        tell_findings(self.out, outcome.findings, run.seconds,
                      verbose=self.verbose)

    def conclude(self, report: Report, outcomes: Sequence[Outcome],
                 planned: int) -> None:
        """Tell what is wrong and why, or that all is right.

        planned: the number of runs if none is wrong.
        """
        last = outcomes[-1]
        if report.internal_errors:
            self.out.say("\nThe check itself failed, so this is not a "
                         "verdict.")
        elif last.mistake:
            if self.change:
                self.blame_change(self.change)
            else:
                name_faulty_changes(self.bench, self.out, last, last.mistake)
            verdict = "\nNot correct yet."
            if len(outcomes) < planned:
                verdict += (" The check stopped after run "
                            f"{len(outcomes)} of {planned}.")
            if isinstance(self.out, CheckTerminal) and not self.verbose:
                verdict += " Use -v for details."
            self.out.say(verdict)
        elif self.change:
            sizes = sizes_of(outcomes)[-1:]
            self.out.say(f"\nCorrect on {name_sizes(sizes)}. Without a "
                         "number, the check covers everything.")
        else:
            self.out.report(table=None)
            verdict = (f"Correct on {name_sizes(sizes_of(outcomes))}: the "
                       "same training as on one device.")
            if report.warnings:
                noun = "warning"
                if len(report.warnings) > 1:
                    noun = "warnings"
                verdict += f" See the {noun} above."
            self.out.say(verdict)
        self.out.report(right=report.ok)

    def blame_change(self, change: localise.OneChange) -> None:
        """Name the change that was tried alone, and say why it is made."""
        tried = documents.load_changes(self.bench.stage)[change.number - 1]
        if change.place:
            self.out.say(
                f"           The error is in change {change.number}"
                f"{change.place}.")
        text = f"Change {change.number} ({tried.title}){change.place}"
        give_reason(self.out, text, first_sentences(tried.why), tried.hint)
        self.out.say(f"           {fix_of(self.bench.stage, change.number)}")


def make_report(bench: Bench, outcomes: Sequence[Outcome]) -> Report:
    """Return the findings of all runs."""
    findings: list[Finding] = []
    errors: list[str] = []
    for outcome in outcomes:
        findings += outcome.findings
        errors += outcome.internal_errors
    return Report(bench.script, tuple(findings),
                  internal_errors=tuple(errors))


def tell_findings(out: Quiet, findings: Sequence[Finding], seconds: float, *,
                  verbose: bool) -> None:
    """Tell a run's findings, and how many of them a terminal leaves out."""
    for finding in findings:
        if finding.verdict != "ok" or verbose:
            out.report(finding=[finding.verdict, finding.text,
                                finding.fix_text])
    count = Counter(finding.verdict for finding in findings)
    if count["FAIL"] and count["and"]:
        noun, verb = "findings", "follow"
        if count["and"] == 1:
            noun, verb = "finding", "follows"
        out.report(summary=f"           ({count['and']} further {noun} "
                           f"{verb} from this one)")
    elif not count["FAIL"]:
        text = f"{count_of(count['ok'], 'property')} correct ({seconds:.1f} s)"
        if len(findings) == 1:
            text = findings[0].text
        out.report(summary=f"  ok       {text}")


def sizes_of(outcomes: Sequence[Outcome]) -> list[int]:
    """Return the numbers of processes; two meshes may have the same."""
    sizes = [outcome.planned.mesh.size for outcome in outcomes
             if outcome.planned.kind == "whole"]
    return list(dict.fromkeys(sizes))


def name_sizes(sizes: Sequence[int]) -> str:
    """Return "1 process", or "1, 2 and 4 processes"."""
    if [*sizes] == [1]:
        return "1 process"
    *others, last = map(str, sizes)
    if not others:
        return f"{last} processes"
    return f"{', '.join(others)} and {last} processes"


def draw_reading(run: StageRun, reference: StageRun) -> dict[str, Any]:
    """Return who read what, and the losses, for a notebook's picture."""
    def losses(rows: Sequence[dict[str, str]]) -> list[float | None]:
        values = [read_number(row, "loss") for row in rows]
        return [value if value == value else None for value in values]

    dp, tp = run.mesh.dp, run.mesh.tp
    return {"read": [record.samples for record in run.all_records],
            "readers": [rank // tp % dp for rank in range(run.mesh.size)],
            "expected": reference.record_of(0).samples,
            "loss": losses(run.rows), "single": losses(reference.rows)}


# ------------------------------------------------------- which change it is


def name_faulty_changes(bench: Bench, out: Quiet, outcome: Outcome,
                        mistake: Mistake) -> None:
    """Name the changes without which it would be right, as far as found.

    Scripts with a part of the differences are tried as in the run that
    failed.

    Args:
        bench: of the attendee's script.
        out: is told.
        outcome: of the run that failed.
        mistake: in it.
    """
    stage, script = bench.stage, bench.script
    try:
        mine = Diff(stage, script)
        diff = Diff(stage, script, localise.rename_symbols(
            script.read_text("utf-8-sig"),  # there may be a mark
            STAGES[stage].solution.read_text("utf-8")).encode())
    except (UnicodeDecodeError, UserError, tokenize.TokenError):
        return  # it cannot be compared
    if 2 * len(diff.remaining) > diff.total or mine.other_stage:
        left = f"{len(diff.remaining)} of {diff.total} changes are left"
        out.say(f"           {left}. {next_command(mine)}")
        out.report(cause=[left, next_command(mine), ""])
        return
    out.say("           Looking for the faulty change by testing variants of "
            "your script ...")
    items = localise.in_order(diff, mistake.lines)
    # what a script with these differences shows; None: it is right, or no
    # Python
    known: dict[frozenset[int], Mistake | None] = {
        frozenset(map(id, items)): mistake}

    reminder = Reminder()

    def symptom(part: Sequence[RemainingChange]) -> tuple[str, str] | None:
        key = frozenset(map(id, part))
        if key not in known:
            data = localise.make_without(diff, part)
            known[key] = None
            if data and reminder.is_due(time.monotonic()):
                out.say("           still looking: "
                        f"{count_of(len(known) - 1, 'variant')} tried")
            if data:
                known[key] = try_part(bench, outcome.planned, data,
                                      diff.script.data)
        found = known[key]
        # two scripts that are wrong in the same way have these in common
        return (found.title, found.error) if found else None

    try:
        for part in localise.find_breaking(items, symptom):
            tell_cause(out, diff, part, known[frozenset(map(id, part))],
                       mistake)
    except NotKnown:
        return  # no change is named on a guess


class NotKnown(Exception):
    """The check itself failed at a version of the script: whether that is
    right is not known.
    """


def try_part(bench: Bench, planned: StageRunPlan, data: bytes, yours: bytes
             ) -> Mistake | None:
    """Return the first mistake of another version of the script.

    Args:
        bench: of the attendee's script.
        planned: the run in which that is wrong.
        data: the other version.
        yours: the attendee's.

    Raises:
        NotKnown: see there.
    """
    other = bench.with_script(data)
    name = lines_as_in(yours, data)
    plan = [planned]
    if planned.kind == "resumed":  # there has to be a run
        plan.insert(0, StageRunPlan("1", "whole", Mesh()))
    try:
        for one in plan:
            outcome = run_and_ask(other, one, name)
            if outcome.mistake:
                return outcome.mistake
            if outcome.internal_errors:
                raise NotKnown
        return None
    finally:
        remove(other.folder)


def tell_cause(out: Quiet, diff: Diff, part: Sequence[RemainingChange],
               found: Mistake | None, mistake: Mistake) -> None:
    """Tell which differences are the mistake, and what the lesson does."""
    text = f"The error is in {localise.name_changes(part)}"
    if found and found.text != mistake.text:
        # a moved line is two differences, of which one breaks it otherwise
        noun = "this difference" if len(part) == 1 else "these differences"
        text += f". With {noun} alone, {found.text}"
    out.say(f"           {text}.")
    kept = localise.kept_lines(diff, part)
    moved = localise.find_moved(diff, part)
    changes = [item for item in part if item.number]
    reason, hint = "", ""
    if changes:
        hint = changes[0].hint
    if moved:
        noun = "this line"
        if len(moved.lines) > 1:
            noun = f"these {len(moved.lines)} lines"
        lines = ", ".join(f"`{line}`" for line in moved.lines)
        reason = (f"Your script has {noun} {moved.where} than the lesson: "
                  f"{lines}.")
        if changes and not kept:
            reason += f" {first_sentences(changes[0].why)}"
    elif kept:  # a change's reason would be another
        reason = ("The lesson keeps this line, at most indenting it "
                  "differently, but your script changes or omits it: "
                  f"`{kept}`.")
    elif changes:
        reason = first_sentences(changes[0].why)
    give_reason(out, text, reason, hint)
    if changes:
        out.say(f"           {fix_of(diff.stage, changes[0].number)}")


def fix_of(stage: str, number: int) -> str:
    """Return where to read about a change that is wrong."""
    return (f"fix: `python -m workshop diff {stage} {number}` shows the "
            "change and its reason")


def first_sentences(why: str) -> str:
    """Return the first two sentences of why the lesson makes a change."""
    paragraph = why.split("\n")[0]
    return " ".join(re.split(r"(?<=[.!?]) ", paragraph)[:2])


def give_reason(out: Quiet, text: str, reason: str, hint: str = "") -> None:
    """Tell why the lesson makes a change.

    Args:
        out: is told.
        text: what was found, for a notebook.
        reason: "" where the script differs from the lesson otherwise.
        hint: the lesson's, in words, which comes first; "" where it has none.
    """
    for label, line in ("hint", hint), ("reason", reason):
        if line:
            out.say(f"           {label}: {line}")
    out.report(cause=[text, reason, hint])
