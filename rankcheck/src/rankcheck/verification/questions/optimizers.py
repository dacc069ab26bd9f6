"""Questions about what the optimizers are told, beside the first rate."""

from collections.abc import Iterator
from dataclasses import dataclass

from rankcheck.engine.findings import Finding, fail, ok, warn
from rankcheck.verification.comparison import Comparison, question, rows

WORDS = {"lr": "learning rate", "weight_decay": "weight decay"}
UNNAMED = "parameter "  # a rank may have another in its place
SCALED = ("eps",)  # it may be multiplied as the gradients are


@dataclass(frozen=True)
class Difference:
    """A setting of parameters that is another one elsewhere."""

    setting: str
    mine: tuple[float, ...]
    other: tuple[float, ...]

    def words(self, names: str, whose: str) -> str:
        name = WORDS.get(self.setting, self.setting)
        verb = "are" if name == "betas" else "is"
        return (f"{name} {verb} {show(self.mine)}, {whose} {show(self.other)},"
                f" for {names}")


@question("the optimizers have the settings of one process")
def settings(case: Comparison) -> Iterator[Finding]:
    """Of each parameter, at the first update of its optimizer."""
    ranks = [by_parameter(seen) for seen in case.together.seen]
    for rank, mine in enumerate(ranks):
        found = differences(mine, ranks[0], between_ranks=True)
        if found:
            first, names = next(iter(found.items()))
            yield fail(
                f"on rank {rank} the "
                + first.words(case.named(names), "on rank 0"),
                "the ranks train the same weights, so all have to tell their "
                "optimizers the same", ranks=[rank])
            return
    if not case.alone:
        return
    good = by_parameter(case.alone.seen[0])
    found = differences(ranks[0], good)
    batches = [len(rows(updates)) for updates in (
        case.updates[0], case.single[:1])]
    same_batch = not case.still and batches[0] == batches[1] > 0
    for difference, names in found.items():
        words = difference.words(case.named(names), "with one process")
        text = f"the {words}"
        if difference.setting == "lr":
            yield warn(text, "other parameters have the rate of one process, "
                       "or the same multiple of it: does the rate of this "
                       "group depend on the number of processes?",
                       learned={"settings": text})
        elif not same_batch:
            yield ok(f"{text}: right if it follows the minibatch")
        elif difference.setting == "weight_decay" and close(
                case.rate * difference.mine[0], difference.other[0]):
            yield ok(f"{text}: times the learning rate it is the same")
        elif (case.rate != 1 or case.apart
              or difference.setting in SCALED):
            yield warn(text, "right if it makes up for gradients that are a "
                       "sum over the ranks", learned={"settings": text})
        else:
            yield fail(text, "with the same minibatch it has to be the same: "
                       "does it depend on the number of processes, as the "
                       "batch size of one rank does?",
                       learned={"settings": text})


def differences(mine: dict, other: dict, *, between_ranks: bool = False
                ) -> dict[Difference, list[str]]:
    """What is set otherwise for parameters that both have: their names."""
    found: dict[Difference, list[str]] = {}
    factor = rate_factor(mine, other)
    for name, values in mine.items():
        for setting, value in values.items():
            good = other.get(name, {}).get(setting)
            if good is None or len(good) != len(value):
                continue
            expected = good
            if setting == "lr":
                if between_ranks:  # a question of its own
                    continue
                expected = tuple(factor * one for one in good)
            if not all(map(close, value, expected)):
                found.setdefault(
                    Difference(setting, value, good), []).append(name)
    return found


def rate_factor(mine: dict, other: dict) -> float:
    """By how much the rate of the first parameter of both is multiplied."""
    for name, values in mine.items():
        good = other.get(name, {}).get("lr")
        if good and good[0] and "lr" in values:
            return values["lr"][0] / good[0]
    return 1.0


def by_parameter(seen: dict) -> dict[str, dict[str, tuple[float, ...]]]:
    """Name -> setting -> its numbers, of all optimizers of a rank."""
    return {name: {key: tuple(value)
                   for key, value in group["values"].items()}
            for groups in seen["settings"] for group in groups
            for name in group["names"] if not name.startswith(UNNAMED)}


def close(one: float, other: float) -> bool:
    return one == other or abs(one - other) <= 1e-3 * abs(other)


def show(values: tuple[float, ...]) -> str:
    return " and ".join(f"{value:.4g}" for value in values)
