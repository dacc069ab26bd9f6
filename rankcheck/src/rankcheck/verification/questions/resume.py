"""Questions about a resume: what it restores.

The script runs as several processes until it has saved something and has the
gradients of the step after that. There it is ended, started again with the
flags that resume it, and compared: with itself in that step, and after it
with the run that was not interrupted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from rankcheck.engine.findings import (
    Finding,
    count_of,
    counted,
    fail,
    ok,
    percent,
    warn,
)
from rankcheck.engine.run_record import RunRecord
from rankcheck.record.tensors import names as names_of
from rankcheck.record.tensors import put_together, relative_error
from rankcheck.verification.comparison import Comparison, question
from rankcheck.verification.questions.records import StepRecords, flatten

# Relative error up to which a state is the one that was saved. A checkpoint
# keeps the bits, so only rounding is left; one step of fp32 is 1.2e-7. A
# choice, not a measurement: weights that are saved in bf16 are reported.
SAME_STATE = 1e-6

# Relative error up to which losses, weights and buffers after the resume are
# those of the run that was not interrupted. A choice, not a measurement.
CLOSE_LATER = 1e-4


@question("a resume restores everything",
          where=lambda case: case.runs.resume_flags is not None)
def verify_resume(case: Comparison) -> list[Finding]:
    """Answer whether a resume continues the run that was ended."""
    first, ended = case.runs("saved")
    if ended:
        return [ended]
    places = {record.saved_before_step for record in first.all_records}
    at = next(iter(places))  # steps of all optimizers before that
    if at is None or None in places:
        return [fail("torch.save saves nothing before step "
                     f"{case.runs.steps - 1}, the last that is watched",
                     "save earlier, by the script's flags, or watch more "
                     "steps: --steps", kind="nothing-saved")]
    if len(places) > 1:
        return [warn("the ranks save after different steps", "save after the "
                     "same step, so that a resume can be checked",
                     kind="uneven-saves")]
    made = count_made(first.record_of(0).steps, at)
    again, ended = case.runs("resumed", case.runs.resume_flags, made)
    if ended:
        return [ended]
    stopped, back = records_by_step(first), records_by_step(again)
    whole = records_by_step(case.multi_process_run)
    before, good = stopped[:at], stopped[at:]
    repeats = are_alike(stopped, whole)
    if repeats:
        good = good + whole[len(stopped):]
    drawn = restored_generators(before, good, back)
    lost = drawn[0].ranks
    findings = [*restored_weights(before, good, back),
                *restored_states(case, good, back),
                *restored_rates(before, good, back), *drawn,
                *restored_position(before, good, back, lost)]
    if not repeats:
        findings.append(warn(
            "only the next step was compared: two runs with the same flags "
            "differ", "set a seed, and use {run} in the flag that names the "
            "run's folder", kind="resume-next-step-only"))
    elif not any(finding.verdict == "FAIL" for finding in findings):
        findings += later_steps(good, back, lost)
    for finding in findings:
        finding.sentence.insert(
            0, f"resuming after {count_of(made, 'step')}: ")
        finding.numbers = {**finding.numbers, "saved": made}
    return findings


def count_made(records: StepRecords, at: int) -> int:
    """Count the steps before one that are of the same optimizer.

    Args:
        records: of all optimizers of a rank.
        at: the number of the one.
    """
    number = records[at]["optimizer"]
    return sum(record["optimizer"] == number for record in records[:at])


def records_by_step(run: RunRecord) -> list[StepRecords]:
    """Return what all ranks have recorded of each step."""
    return list(zip(*(record.steps for record in run.all_records),
                    strict=False))


def are_alike(stopped: Sequence[StepRecords],
              whole: Sequence[StepRecords]) -> bool:
    """Return whether two runs from the beginning do the same.

    They do if they begin with the same weights, and then have the same samples
    and rates: losses and weights that differ by then are not looked at.
    """
    if not record_error(stopped[0], whole[0], "before") <= SAME_STATE:
        return False
    for records, others in zip(stopped, whole, strict=False):
        if count_samples(records) != count_samples(others):
            return False
        for record, other in zip(records, others, strict=True):
            if record["rates"] != other["rates"]:
                return False
    return True


def count_samples(records: StepRecords) -> Counter[str]:
    """Return how often the ranks read each sample."""
    return Counter(flatten(record["rows"] for record in records))


def record_error(records: StepRecords, good: StepRecords, key: str) -> float:
    """Return the relative error of what the ranks have recorded.

    Args:
        key: of a step: "before", "weights" or "buffers".
    """
    return put_together(records, key).error(put_together(good, key))


def first_step_records(
        good: Sequence[StepRecords], back: Sequence[StepRecords]
        ) -> list[tuple[StepRecords, StepRecords]]:
    """Return the first step of each optimizer: uninterrupted, resumed."""
    found: dict[int, tuple[StepRecords, StepRecords]] = {}
    for records, resumed in zip(good, back, strict=False):
        if records[0]["before"] and resumed[0]["before"]:
            found.setdefault(records[0]["optimizer"], (records, resumed))
    return [*found.values()]


def restored_weights(before: Sequence[StepRecords],
                     good: Sequence[StepRecords],
                     back: Sequence[StepRecords]) -> list[Finding]:
    """Say whether the weights are restored.

    Args:
        before: the steps before the one in which the run was ended.
        good: those from there on, of the run that was not resumed.
        back: those of the resumed run. So below.
    """
    for records, resumed in first_step_records(good, back):
        error = record_error(resumed, records, "before")
        if error <= SAME_STATE:  # nan is not
            continue
        begin = first_of_optimizer(before, records)
        text = f"the weights have a relative error of {percent(error)}"
        if record_error(resumed, begin, "before") < SAME_STATE:
            text = "the weights were re-initialized, not restored"
        return [fail(text, "load them: model.load_state_dict(...)",
                     kind="weights-not-restored")]
    return [ok("weights are restored", kind="weights-restored")]


def first_of_optimizer(before: Sequence[StepRecords], records: StepRecords
                       ) -> StepRecords:
    """Return the first step of the same optimizer, else the one itself."""
    number = records[0]["optimizer"]
    for earlier in before:
        if earlier[0]["optimizer"] == number:
            return earlier
    return records


def restored_states(case: Comparison, good: Sequence[StepRecords],
                    back: Sequence[StepRecords]) -> list[Finding]:
    """Say whether the optimizers' states are restored.

    That are moments, and the number of their steps.
    """
    load = ("load the state once the optimizer has its parameters: "
            "optimizer.load_state_dict(...)")
    names: set[str] = set()
    for records, resumed in first_step_records(good, back):
        lack = [rank for rank, (record, other) in enumerate(zip(
            records, resumed, strict=True))
            if names_of(record["kept"]) - names_of(other["kept"])]
        if 0 < len(lack) < len(records):
            return [fail("the optimizer's state is not restored on rank "
                         f"{lack[0]}", f"on every rank, {load}", ranks=lack,
                         kind="optimizer-not-restored")]
        saved = put_together(records, "kept").tensors
        loaded = put_together(resumed, "kept").tensors
        for key, expected in saved.items():
            weight, _, name = key.rpartition(" ")
            names.add(name)
            state = f"{name} of {case.named([weight])}"
            value = loaded.get(key)
            if value is None:
                return [fail("the optimizer's state is not restored: no "
                             f"{state}", load, kind="optimizer-not-restored")]
            if value.shape != expected.shape:
                return [fail("the optimizer's state is not restored: "
                             f"{state} has another shape", load,
                             kind="optimizer-not-restored")]
            error = relative_error({key: value}, {key: expected})
            if not error <= SAME_STATE:
                text = f"has a relative error of {percent(error)}"
                if value.numel() == 1:
                    text = f"is {value.item():g}, not {expected.item():g}"
                return [fail(f"the optimizer's {state} {text}", load,
                             kind="optimizer-not-restored")]
    if not names:
        return [ok("the optimizer has no state",
                   kind="optimizer-without-state")]
    return [ok("the optimizer's state is restored "
               f"({', '.join(sorted(names))})", kind="optimizer-restored")]


def restored_rates(before: Sequence[StepRecords], good: Sequence[StepRecords],
                   back: Sequence[StepRecords]) -> list[Finding]:
    """Say whether the learning rate schedule is restored."""
    for i, (records, resumed) in enumerate(zip(good, back, strict=False)):
        rates = resumed[0]["rates"]
        difference = describe_rates(rates, records[0]["rates"])
        if not difference:
            continue
        text = f"{difference}, {name_step(i)}"
        if i < len(before) and rates == before[i][0]["rates"]:
            text += ", as at the start"
        return [fail(text, "restore the schedule: "
                     "scheduler.load_state_dict(...), or derive the rate from "
                     "the step", kind="learning-rate-not-restored")]
    rates = good[0][0]["rates"]
    if not rates:
        return [ok("no learning rate was seen", kind="no-learning-rate")]
    return [ok(f"the learning rate is restored ({rates[0]:.4g})",
               kind="learning-rate-restored")]


def describe_rates(rates: Sequence[float], expected: Sequence[float]) -> str:
    """Say how the rates of an optimizer's groups differ, "" if they do not.

    Rounding is no difference.
    """
    if len(rates) != len(expected):
        return (f"the optimizer has {counted(rates, 'learning rate')}, not "
                f"{len(expected)}")
    for rate, good in zip(rates, expected, strict=True):
        if not abs(rate - good) <= SAME_STATE * abs(good):  # nan is not
            return f"the learning rate is {rate:.6g}, not {good:.6g}"
    return ""


def name_step(i: int) -> str:
    """Say how long after the resume a step is. i: counted from 0."""
    if i == 0:
        return "in the next step"
    if i == 1:
        return "one step later"
    return f"{i} steps later"


def severity(good: Sequence[StepRecords], lost: Sequence[int]
             ) -> Callable[..., Finding]:
    """Return how severe a difference is that random numbers may explain.

    Args:
        lost: the ranks that draw other random numbers after the resume.

    Returns:
        `warn` if all ranks do; `fail` if only some do, or none.
    """
    if len(lost) == len(good[0]):
        return warn
    return fail


def restored_position(before: Sequence[StepRecords],
                      good: Sequence[StepRecords],
                      back: Sequence[StepRecords], lost: Sequence[int]
                      ) -> list[Finding]:
    """Say whether the data position is restored.

    Args:
        lost: as in `severity`.
    """
    if not count_samples(good[0]):
        return [warn("the data position was not seen", "give the model "
                     "tensors whose rows are samples",
                     kind="position-not-seen")]
    for i, (records, resumed) in enumerate(zip(good, back, strict=False)):
        read = count_samples(resumed)
        if count_samples(records) == read:
            continue
        fix = ("save the data position and the seed of the order, and skip "
               "what was read")
        for number, earlier in enumerate(before):
            if count_samples(earlier) == read:
                return [fail(f"{name_step(i)} it reads the samples of "
                             f"step {number} again", fix,
                             numbers={"repeats": number},
                             kind="position-not-restored")]
        if lost:
            fix += "; or restore the RNG state, which may be all of it"
        say = severity(good, lost)
        return [say(f"{name_step(i)} it reads other samples than the "
                    "uninterrupted run", fix, kind="position-not-restored")]
    return [ok("the data position is restored",
               kind="position-restored")]


def restored_generators(before: Sequence[StepRecords],
                        good: Sequence[StepRecords],
                        back: Sequence[StepRecords]) -> list[Finding]:
    """Say whether the RNG states are restored.

    Only of those that the script has used between two steps: a generator is
    not compared if its state stays the same on each rank. Those of a worker or
    of the script's own are not seen.
    """
    if len(before) < 2:
        return [warn("whether random numbers are drawn was not seen: the "
                     "script saved after the first step", "save later",
                     kind="rng-not-seen")]
    findings = []
    for name in good[0][0]["random"]:
        if is_unused(name, before):
            continue
        wrong = [rank for rank, record in enumerate(back[0])
                 if record["random"][name] != good[0][rank]["random"][name]]
        if wrong:
            return [warn(f"{name} RNG state is not restored (rank "
                         f"{wrong[0]})", "save each rank's RNG state, or seed "
                         "it from the step: dropout, augmentation and "
                         "sampling differ otherwise", ranks=wrong,
                         kind="rng-not-restored")]
        findings.append(ok(f"{name} RNG state is restored",
                           kind="rng-restored"))
    if not findings:
        return [ok("no random numbers are drawn between steps",
                   kind="rng-unused")]
    return findings


def is_unused(name: str, before: Sequence[StepRecords]) -> bool:
    """Return whether a generator's state stays the same on each rank."""
    for records in zip(*before, strict=True):  # of a rank
        if len({record["random"][name] for record in records}) > 1:
            return False
    return True


def later_steps(good: Sequence[StepRecords], back: Sequence[StepRecords],
                lost: Sequence[int] = ()) -> list[Finding]:
    """Say whether what is computed from it is the same, too.

    Args:
        lost: as in `severity`.
    """
    count = 0
    say = severity(good, lost)
    fix = ("look for what else is not restored: BatchNorm's statistics, an "
           "optimizer's settings, the scale of a GradScaler, a seed")
    if lost:
        fix = "restore the RNG state first, which may be all of it"
    for i, (records, resumed) in enumerate(zip(good, back, strict=False)):
        loss, expected = total_loss(resumed), total_loss(records)
        if not abs(loss - expected) <= CLOSE_LATER * max(abs(expected), 1e-30):
            return [say(
                f"{name_step(i)} the loss is {loss / len(records):.6g}, "
                f"not {expected / len(records):.6g}", fix,
                kind="resumed-run-differs")]
        for key in ("weights", "buffers"):
            if key not in records[0] or key not in resumed[0]:
                continue
            if key == "weights":
                count += 1
            error = record_error(resumed, records, key)
            if not error <= CLOSE_LATER:
                return [say(f"{name_step(i)} the {key} have a relative "
                            f"error of {percent(error)}", fix,
                            kind="resumed-run-differs")]
    if not count:
        return [warn("no later step was compared", "save earlier, or watch "
                     "more steps: --steps",
                     kind="resumed-run-not-compared")]
    return [ok("later steps match the uninterrupted run "
               f"({count_of(count, 'step')})",
               kind="resumed-run-matches")]


def total_loss(records: StepRecords) -> float:
    """Return the sum of the losses of all ranks."""
    return sum(sum(record["losses"]) for record in records)
