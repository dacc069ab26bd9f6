"""Questions about what is logged and printed."""

from pathlib import Path

import numpy as np

from workshop.check.causes import misread
from workshop.check.findings import differs, fail, number, ok, values
from workshop.check.questions.question import (
    first_difference,
    question,
    several,
)
from workshop.check.trial import EVALUATED, EVERY, MINIBATCH

LOSS = 1e-5  # relative
PROMPT = "> Hello, I'm a language model,"


@question("losses agree at every step", ("whole", "resumed", "fsdp2"))
def losses(trial, reference):
    step, largest = first_difference(trial, reference, "loss", LOSS)
    if step is None:
        return ok(f"losses agree at every step (to {largest:.0e})")
    value, good = values(trial, reference, "loss", step)
    return differs(f"the logged loss of step {step}", value, good,
                   "it is the mean over the whole minibatch and all ranks, "
                   "before the update")


@question("the logged seconds are those of the steps", ("whole",))
def logged_seconds(trial, reference):
    """They are in no doubt on a busy machine, either: the run took longer."""
    logged = sum(number(row, "seconds") for row in trial.rows)
    if 0 < logged <= trial.seconds:
        return ok("the logged seconds are those of the steps")
    return fail(f"the log says {logged:.1f} seconds for all steps, and the "
                f"whole run took {trial.seconds:.1f}",
                "a step lasts time.perf_counter() - start_time seconds")


@question("validation losses agree")
def validation(trial, reference):
    step, largest = first_difference(trial, reference, "val_loss", LOSS)
    if step is None:
        good, mine = (sum(seen["evaluated"] for seen in one.seen)
                      // one.mesh.tp for one in (reference, trial))
        if mine > good:
            return fail(f"{mine} samples are evaluated in all, where the "
                        f"single device evaluates {good}",
                        "every --eval-every steps, and after the last one")
        return ok(f"validation losses agree (to {largest:.0e})")
    value, good = values(trial, reference, "val_loss", step)
    if np.isnan(value):
        return fail(f"there is no validation loss at step {step}",
                    "it is evaluated every --eval-every steps and after the "
                    "last one, and logged")
    if np.isnan(good):
        return fail(f"step {step} has a validation loss, which the single "
                    "device has not", "it is evaluated every --eval-every "
                    "steps and after the last one")
    count = EVALUATED * MINIBATCH // trial.mesh.dp
    said = step == EVERY - 1 and misread(
        trial, [seen["validated"][:count] for seen in trial.seen], 0)
    if said:
        return fail(f"validation after step {step}: {said[0]}", said[1])
    return differs(f"the validation loss of step {step}", value, good,
                   "it is the mean over all ranks, and over the first "
                   "--eval-minibatches minibatches of the validation split")


@question("rank 0 alone logs and saves", meshes=several)
def writers(trial, reference):
    alone = "rank 0 alone logs and saves: `if rank == 0:`"
    for r, seen in enumerate(trial.seen):
        for path in seen["written"]:
            others = [q for q in range(trial.mesh.size)
                      if q != r and path in trial.seen[q]["written"]]
            if others:
                rank = max(r, *others)
                return fail(f"rank {rank} writes {Path(path).name} too",
                            alone)
    for r in range(1, trial.mesh.size):
        if "| step" in trial.ranks[r].out:
            return fail(f"rank {r} prints the log line too", alone)
    return ok("rank 0 alone logs and saves")


@question("every rank writes texts of its own")
def texts(trial, reference):
    for r in range(1, trial.mesh.size):
        if PROMPT in trial.ranks[r].out:
            return fail(f"rank {r} prints its texts itself",
                        "gather them, and print them on rank 0: they would "
                        "end up between one another's lines")
    written = trial.ranks[0].out.split(PROMPT)[1:]
    mesh = trial.mesh
    if not written and mesh.pp == 1 and PROMPT in reference.ranks[0].out:
        return fail("no text is printed", "rank 0 prints them every "
                    "--generate-every steps and after the last one")
    if mesh.tp > 1 and written:
        for rank, seen in enumerate(trial.seen):
            first = rank - rank % mesh.tp
            if seen["continued"] != trial.seen[first]["continued"]:
                return fail(f"ranks {first} and {rank} of a TP group write "
                            "different texts", "a TP group writes one text "
                            "together: its ranks need the same seed, with "
                            "dp_rank in it and not rank")
        if len(written) == 4 * mesh.size:
            return fail(f"each text is printed {mesh.tp} times", "all ranks "
                        "of a TP group have written the same: print "
                        "texts[::tp_size]")
    lines = trial.ranks[0].out.count(f"\n{PROMPT}")
    if written and lines != 4 * mesh.dp:
        return fail(f"{lines} texts are printed, not {4 * mesh.dp}",
                    "rank 0 prints four of each rank, each on a line of its "
                    'own: print(*texts, sep="\\n")')
    if mesh.dp == 1:
        return None
    count = len({text[:20] for text in written})
    if count == len(written):
        return ok("every rank writes texts of its own")
    return fail(f"{'all' if count <= 4 else 'some'} ranks write the same "
                "texts",
                "add the rank to the seed of the generation")
