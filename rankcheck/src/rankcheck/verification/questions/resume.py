"""What does a resume bring back?

The script runs as several processes until it has saved something and has the
gradients of the update after that. There it is ended, started again with the
flags that resume it, and compared: with itself in that update, and after it
with the run that was not interrupted.
"""

from collections import Counter

from rankcheck.engine.findings import fail, ok, percent, warn
from rankcheck.record.tensors import names as names_of
from rankcheck.record.tensors import put_together, relative_error
from rankcheck.verification.comparison import question

SAME = 1e-6  # relative: what was saved is to come back as it was
CLOSE = 1e-4  # of what is computed from it


@question("a resume brings everything back",
          where=lambda case: case.runs.resume_flags is not None)
def comes_back(case):
    first, ended = case.runs("saved")
    if ended:
        return [ended]
    places = {seen["saved"] for seen in first.seen}
    if None in places:
        return [fail("it has saved nothing by torch.save before update "
                     f"{case.runs.steps - 1}, the last that is watched", "let "
                     "it save earlier, by its flags, or watch more updates: "
                     "--steps")]
    if len(places) > 1:
        return [warn("the ranks save after different updates", "verify "
                     "cannot tell what a resume brings back")]
    at = places.pop()  # updates of all optimizers before that
    made = sum(update["optimizer"] == first.seen[0]["updates"][at]["optimizer"]
               for update in first.seen[0]["updates"][:at])
    again, ended = case.runs("resumed", case.runs.resume_flags, made)
    if ended:
        return [ended]
    stopped, back, whole = map(by_update, (first, again, case.together))
    before, good = stopped[:at], stopped[at:]
    same = error_of(stopped[0], whole[0], "before") <= SAME and all(
        samples(one) == samples(other) and all(
            a["rates"] == b["rates"] for a, b in zip(one, other, strict=True))
        for one, other in zip(stopped, whole, strict=False))
    if same:
        good = good + whole[len(stopped):]
    drawn = random_numbers(before, good, back)
    findings = [*weights(before, good, back), *kept(case, good, back),
                *learning_rates(before, good, back), *drawn,
                *position(before, good, back, drawn[0].ranks)]
    if not same:
        findings.append(warn(
            "only the next update was compared: two runs with the same flags "
            "differ", "set a seed, and write {run} into the flag that names "
            "its folder"))
    elif not any(finding.verdict == "FAIL" for finding in findings):
        findings += afterwards(good, back, drawn[0].ranks)
    for finding in findings:
        finding.sentence.insert(0, f"a resume after {made} updates: ")
    return findings


def by_update(trial):
    """What all ranks have recorded of each update."""
    return list(zip(*(seen["updates"] for seen in trial.seen), strict=False))


def samples(updates):
    return Counter(row for update in updates for row in update["rows"])


def error_of(updates, good, what):
    """How far off what they have recorded of it is, relatively."""
    return put_together(updates, what).error(put_together(good, what))


def firsts(good, back):
    """The first update of each optimizer: (uninterrupted, resumed)."""
    found = {}
    for one, other in zip(good, back, strict=False):
        if one[0]["before"] and other[0]["before"]:
            found.setdefault(one[0]["optimizer"], (one, other))
    return found.values()


def weights(before, good, back):
    for one, other in firsts(good, back):
        error = error_of(other, one, "before")
        if not error <= SAME:  # nan is not
            begin = next((updates for updates in before if updates[0][
                "optimizer"] == one[0]["optimizer"]), one)
            return [fail("the weights begin anew" if error_of(
                other, begin, "before") < SAME else
                f"the weights are off by {percent(error)}",
                "load them: model.load_state_dict(...)")]
    return [ok("the weights come back")]


def kept(case, good, back):
    """What the optimizers keep: moments, the number of their steps."""
    load = ("load it, once the optimizer has its parameters: "
            "optimizer.load_state_dict(...)")
    names = set()
    for one, other in firsts(good, back):
        lack = [rank for rank, (saved, mine) in enumerate(zip(
            one, other, strict=True))
            if names_of(saved["kept"]) - names_of(mine["kept"])]
        if 0 < len(lack) < len(one):
            return [fail("the optimizer's state does not come back on rank "
                         f"{lack[0]}", f"every rank: {load}", ranks=lack)]
        saved, mine = (put_together(updates, "kept").tensors
                       for updates in (one, other))
        for key, expected in saved.items():
            weight, _, name = key.rpartition(" ")
            names.add(name)
            state = f"{name} of {case.named([weight])}"
            value = mine.get(key)
            if value is None or value.shape != expected.shape:
                return [fail("the optimizer's state does not come back: no "
                             + state + " in that shape" * (value is not None),
                             load)]
            error = relative_error({key: value}, {key: expected})
            if not error <= SAME:
                return [fail(f"the optimizer's {state} is " + (
                    f"{value.item():g}, not {expected.item():g}"
                    if value.numel() == 1 else f"off by {percent(error)}"),
                    load)]
    return [ok("the optimizer's state comes back "
               f"({', '.join(sorted(names))})" if names else
               "the optimizer keeps no state")]


def learning_rates(before, good, back):
    for i, (one, other) in enumerate(zip(good, back, strict=False)):
        mine, saved = other[0]["rates"], one[0]["rates"]
        if len(mine) != len(saved) or not all(
                abs(a - b) <= SAME * abs(b) for a, b in zip(mine, saved,
                                                           strict=True)):
            anew = i < len(before) and mine == before[i][0]["rates"]
            return [fail(
                f"the learning rate is {mine[0]:.6g}, not {saved[0]:.6g}, "
                f"{later(i)}" + ", as at the start" * anew, "it follows from "
                "the step: scheduler.load_state_dict(...), or count the "
                "steps on")]
    return [ok(f"the learning rate goes on ({good[0][0]['rates'][0]:.4g})"
               if good[0][0]["rates"] else "no learning rate was seen")]


def later(i):
    return f"{i} updates later" if i > 1 else (
        "in the update after the next" if i else "in the next update")


def severity(good, lost):
    """Of what other random numbers may change: `warn` if all ranks draw
    others, `fail` if only some do (lost), or none.
    """
    return warn if len(lost) == len(good[0]) else fail


def position(before, good, back, lost):
    """Does it go on in the data where it was? lost: as in `severity`."""
    if not samples(good[0]):
        return [warn("its position in the data was not seen", "no samples "
                     "were seen: a sample is a row of what the model gets")]
    for i, (one, other) in enumerate(zip(good, back, strict=False)):
        if samples(one) == samples(other):
            continue
        old = next((j for j, updates in enumerate(before)
                    if samples(updates) == samples(other)), None)
        hint = ("save the position in the data, with the seed of its order, "
                "and skip what was read")
        if old is not None:
            return [fail(f"{later(i)} it reads the samples of update {old} "
                         "again", hint)]
        return [severity(good, lost)(
            f"{later(i)} it reads other samples than without the stop", hint
            + "; or the other random numbers are all of it" * bool(lost))]
    return [ok("it goes on in the data where it was")]


def random_numbers(before, good, back):
    """Only of generators that the script has used between two updates."""
    if len(before) < 2:
        return [warn("whether random numbers are drawn was not seen: it has "
                     "saved after the first update", "let it save later")]
    texts = []
    for name in good[0][0]["random"]:
        if all(len({update["random"][name] for update in updates}) == 1
               for updates in zip(*before, strict=True)):
            continue  # on each rank
        wrong = [rank for rank, update in enumerate(back[0])
                 if update["random"][name] != good[0][rank]["random"][name]]
        if wrong:
            return [warn(f"{name} random numbers do not go on (rank "
                         f"{wrong[0]})", "dropout, augmentation and sampling "
                         "draw others then: save each rank's generators, or "
                         "seed them from the step", ranks=wrong)]
        texts.append(ok(f"{name} random numbers go on"))
    return texts or [ok("no random numbers are drawn from one update to the "
                        "next")]


def afterwards(good, back, lost=()):
    """Is what is computed from it the same, too? lost: as in `severity`."""
    count, fault = 0, severity(good, lost)
    hint = ("the other random numbers may be all of it" if lost else
            "something else does not come back: BatchNorm's statistics, a "
            "setting of the optimizer, the scale of a GradScaler, the seed?")
    for i, (one, other) in enumerate(zip(good, back, strict=False)):
        mine, expected = (sum(sum(update["losses"]) for update in updates)
                          for updates in (other, one))
        if not abs(mine - expected) <= CLOSE * max(abs(expected), 1e-30):
            return [fault(f"{later(i)} the loss is {mine / len(one):.6g}, not "
                          f"{expected / len(one):.6g}", hint)]
        for what in ("weights", "buffers"):
            if what in one[0] and what in other[0]:
                count += what == "weights"
                error = error_of(other, one, what)
                if not error <= CLOSE:
                    return [fault(f"{later(i)} the {what} are off by "
                                  f"{percent(error)}", hint)]
    if not count:
        return [warn("no update after it was compared", "let it save "
                     "earlier, or watch more updates: --steps")]
    return [ok(f"the {count} updates after it are those of the run that was "
               "not stopped")]
