"""Questions about what the optimizers are told, beside the first rate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from rankcheck.engine.findings import Finding, fail, ok, warn
from rankcheck.record.rank_record import RankRecord
from rankcheck.verification.comparison import (
    Comparison,
    are_close,
    question,
    samples_of,
)

WORDS = {"lr": "learning rate", "weight_decay": "weight decay"}
UNNAMED = "parameter "  # a rank may have another in its place
SCALED = ("eps",)  # it may be multiplied as the gradients are

# Name of a parameter -> setting -> its numbers: one, or two as of betas.
OptimizerSettings: TypeAlias = dict[str, dict[str, tuple[float, ...]]]


@dataclass(frozen=True)
class Difference:
    """A setting of parameters that is another one elsewhere."""

    setting: str
    value: tuple[float, ...]
    other: tuple[float, ...]

    def describe(self, names: str, whose: str) -> str:
        """Return the difference in words.

        Args:
            names: the parameters.
            whose: the other setting is, such as "on rank 0".
        """
        name = WORDS.get(self.setting, self.setting)
        verb = "is"
        if name == "betas":
            verb = "are"
        return (f"{name} of {names} {verb} {format_values(self.value)}, but "
                f"{format_values(self.other)} {whose}")


@question("optimizer settings are those of the single-process run")
def verify_settings(case: Comparison) -> Iterator[Finding]:
    """Answer whether each parameter is trained with the same settings.

    They are those of the first step of its optimizer.
    """
    ranks = [settings_of_rank(case, rank) for rank in range(case.size)]
    for rank, own in enumerate(ranks):
        found = find_other_settings(own, ranks[0], between_ranks=True)
        if found:
            first, names = next(iter(found.items()))
            text = first.describe(case.named(names), "on rank 0")
            yield fail(
                f"on rank {rank} the {text}",
                "use the same settings on all ranks, which train the same "
                "weights", ranks=[rank],
                kind="unequal-optimizer-settings")
            return
    if not case.single_process_run:
        return
    single = by_parameter(case.single_process_run.record_of(0))
    own = ranks[0]
    if case.hand_sharded:  # each rank may have parameters of its own
        for others in ranks[1:]:
            own = {**others, **own}
    for difference, names in find_other_settings(own, single).items():
        yield explain_setting(case, difference, names)


def settings_of_rank(case: Comparison, rank: int) -> OptimizerSettings:
    """Return a rank's settings, of hand-sharded parameters by the names of
    what they are parts of.

    Those of which that is not known are left out: another rank may have
    another one under this name.
    """
    places = {}
    if case.parts.of_ranks:
        places = case.parts.of_ranks[rank]
    record = case.multi_process_run.all_records[rank]
    settings: OptimizerSettings = {}
    for name, values in by_parameter(record).items():
        if name in places:
            settings[places[name].name] = values
        elif name not in case.hand_sharded:
            settings[name] = values
    return settings


def explain_setting(case: Comparison, difference: Difference, names: list[str]
                    ) -> Finding:
    """Say whether a setting may be another one than with one process."""
    text = f"the {difference.describe(case.named(names), 'with 1 process')}"
    if difference.setting == "lr":
        return warn(text, "check whether the learning rate of this group "
                    "depends on the number of processes: the others have "
                    "that of 1 process, or the same multiple of it",
                    learned={"settings": text}, kind="optimizer-setting")
    if not has_same_batch(case):
        return ok(f"{text}: fine if it follows the batch size",
                  kind="optimizer-setting")
    if difference.setting == "weight_decay" and are_close(
            case.rate * difference.value[0], difference.other[0]):
        return ok(f"{text}: the same, multiplied by the learning rate",
                  kind="optimizer-setting")
    if case.rate != 1 or case.skip_reason or difference.setting in SCALED:
        return warn(text, "check that it compensates for gradients that are "
                    "a sum over the ranks", learned={"settings": text},
                    kind="optimizer-setting")
    return fail(text, "keep it unchanged: the global batch size is the "
                "same, so it must not depend on the number of processes, or "
                "on the batch size of one rank",
                learned={"settings": text}, kind="optimizer-setting")


def has_same_batch(case: Comparison) -> bool:
    """Return whether the first step has as many samples as one process's.
    """
    count = len(samples_of(case.steps[0]))
    single_count = len(samples_of(case.single_steps[:1]))
    return not case.frozen_run and count == single_count > 0


def find_other_settings(own: OptimizerSettings, other: OptimizerSettings, *,
                        between_ranks: bool = False) -> dict[Difference,
                                                             list[str]]:
    """Return what is set otherwise for parameters that both have.

    Rates are the same if all are the same multiple of the others': that of
    the first parameter is a question of its own.

    Args:
        between_ranks: whether both are ranks. Their rates are not compared, as
            another question does that.

    Returns:
        For each difference the names of its parameters.
    """
    found: dict[Difference, list[str]] = {}
    factor = rate_factor(own, other)
    for name, values in own.items():
        for setting, value in values.items():
            known = other.get(name, {}).get(setting)
            if known is None or len(known) != len(value):
                continue
            expected = known
            if setting == "lr":
                if between_ranks:
                    continue
                expected = tuple(factor * number for number in known)
            if not all(map(are_close, value, expected)):
                found.setdefault(
                    Difference(setting, value, known), []).append(name)
    return found


def rate_factor(own: OptimizerSettings, other: OptimizerSettings) -> float:
    """Return by how much the rate of the first parameter is multiplied.

    The first is that of both which has a rate other than 0.
    """
    for name, values in own.items():
        known = other.get(name, {}).get("lr")
        if known and known[0] and "lr" in values:
            return values["lr"][0] / known[0]
    return 1.0


def by_parameter(record: RankRecord) -> OptimizerSettings:
    """Return the settings of all optimizers of a rank, by parameter."""
    found: OptimizerSettings = {}
    for groups in record.settings:  # of one optimizer
        for group in groups:
            for name in group["names"]:
                if not name.startswith(UNNAMED):
                    found[name] = group["values"]
    return found


def format_values(values: tuple[float, ...]) -> str:
    """Return the numbers of a setting in words."""
    return " and ".join(f"{value:.4g}" for value in values)
