"""Questions about what is logged and printed."""

from pathlib import Path

from rankcheck.findings import fail
from workshop.check.questions.question import (
    ask_about,
    no_pipeline,
    number,
    question,
    several,
)

PROMPT = "> Hello, I'm a language model,"


ask_about("norm", "gradient norms agree", "gradient norm", 1e-4, "fsdp2")
ask_about("loss", "losses agree at every step", "logged loss", 1e-5,
          "resumed", "fsdp2")
ask_about("val_loss", "validation losses agree", "validation loss", 1e-5)


@question("no more is evaluated than by the single device")
def evaluated(trial, reference):
    good, mine = (sum(seen["evaluated"] for seen in one.seen) // one.mesh.tp
                  for one in (reference, trial))
    if mine > good:
        return fail(f"{mine} samples are evaluated in all, where the single "
                    f"device evaluates {good}")
    return None


@question("the logged seconds are those of the steps")
def logged_seconds(trial, reference):
    """They are in no doubt on a busy machine, either: the run took longer."""
    logged = sum(number(row, "seconds") for row in trial.rows)
    if not 0 < logged <= trial.seconds:
        return fail(f"the log says {logged:.1f} seconds for all steps, and "
                    f"the whole run took {trial.seconds:.1f}")
    return None


@question("rank 0 alone logs and saves", where=several)
def writers(trial, reference):
    written = {}  # file -> the rank that writes it
    for rank, seen in enumerate(trial.seen):
        for path in seen["written"]:
            if written.setdefault(path, rank) != rank:
                return fail(f"rank {rank} writes {Path(path).name} too")
        if rank and "| step" in trial.ranks[rank].out:
            return fail(f"rank {rank} prints the log line too")
    return None


@question("every rank writes texts of its own", where=no_pipeline)
def texts(trial, reference):
    """Four of each, printed by rank 0; a TP group writes them together."""
    tp = trial.mesh.tp
    for rank, seen in enumerate(trial.seen):
        first = rank - rank % tp
        if rank and PROMPT in trial.ranks[rank].out:
            return fail(f"rank {rank} prints its texts itself: they may end "
                        "up between one another's lines")
        if seen["continued"] != trial.seen[first]["continued"]:
            return fail(f"ranks {first} and {rank} of a TP group write "
                        "different texts")
    found = trial.ranks[0].out.split(f"\n{PROMPT}")[1:]
    # after step 0 and after the last step
    right = 4 * trial.mesh.dp * (1 if trial.first_step else 2)
    if len(found) != right:
        return fail(f"{len(found)} texts are printed, not {right}, each on a "
                    "line of its own")
    if len({text[:20] for text in found}) < len(found):
        return fail("some ranks write the same texts")
    return None
