"""Questions about the data: who reads which samples."""

from rankcheck.findings import fail
from workshop.check.plan import MINIBATCH, STEPS, B
from workshop.check.questions.question import question


@question("each step reads its minibatch, each sample once",
          ("whole", "resumed"))
def samples(trial, reference):
    """Distinct over data-parallel ranks, equal over tensor-parallel ones."""
    for step in range(trial.first_step, STEPS):
        good = reference.seen[0]["samples"][step]
        read = [tuple(seen["samples"][step - trial.first_step])
                for seen in trial.seen]
        parts = set(read) if trial.mesh.tp > 1 else read
        if sorted(i for part in parts for i in part) == sorted(good):
            continue
        for rank, mine in enumerate(read):
            own = share(trial, rank, good)
            if mine and len(mine) != len(own):
                return fail(f"samples of step {step}: rank {rank} reads "
                            f"{len(mine)} of them, not {len(own)}")
            if mine and mine != own:
                return fail(f"samples of step {step}: rank {rank} reads "
                            f"{shorten(mine)}, not {shorten(own)}")
        return fail(f"samples of step {step} are not {shorten(good)}, each "
                    "once")
    return None


def shorten(numbers):
    """Some numbers of samples, in words."""
    begin, end = (numbers[0], numbers[-1]) if numbers else (0, 0)
    if len(numbers) > 2 and list(numbers) == list(range(begin, end + 1)):
        return f"{begin} to {end}"
    return ", ".join(map(str, numbers[:8])) + (
        ", ..." if len(numbers) > 8 else "")


def share(trial, rank, minibatch):
    """What a rank of the course's stages reads of the minibatch."""
    dp, tp = trial.mesh.dp, trial.mesh.tp
    size = MINIBATCH // dp if trial.about.split == "layers" else B
    return tuple(i for k, i in enumerate(minibatch)
                 if k // size % dp == rank // tp % dp)
