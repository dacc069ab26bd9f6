"""Questions about the data: who reads which samples."""

from workshop.check.causes import miscounted, misread
from workshop.check.findings import fail, ok, shorten
from workshop.check.questions.question import has_pipeline, question
from workshop.check.trial import MINIBATCH, STEPS


def first_of_each(trial):
    """What each data-parallel rank read: [(rank, its samples a step)].

    Ranks that read the same because they share a sample are one; those that
    get no samples, as later pipeline stages, are none.
    """
    lists = [(rank, seen["samples"]) for rank, seen in enumerate(trial.seen)
             if any(seen["samples"])]
    if trial.mesh.tp == 1:
        return lists
    groups = {}
    for rank, one in lists:
        groups.setdefault(repr(one), (rank, one))
    return list(groups.values())


@question("all pipeline stages read the same samples",
          ("whole", "resumed"), has_pipeline)
def targets(trial, reference):
    """Whether the last stage has the targets of what the first one reads.
    """
    for step in range(trial.first_step, STEPS):
        read, aimed = (
            {i for seen in trial.seen for i in seen[name][
                step - trial.first_step]} for name in ("samples", "targets"))
        if aimed and read != aimed:
            return fail(
                f"in step {step} the first pipeline stage reads samples "
                f"{shorten(sorted(read))}, but the last one has the targets "
                f"of {shorten(sorted(aimed))}", "the ranks of a pipeline "
                "have the same dp_rank: pass dp_rank and dp_size to "
                "DataIterator")
    return ok("all pipeline stages read the same samples")


@question("each step reads its minibatch, each sample once",
          ("whole", "resumed"))
def samples(trial, reference):
    """Distinct over data-parallel ranks, equal over tensor-parallel ones."""
    ranks = first_of_each(trial)
    for step in range(trial.first_step, STEPS):
        expected = reference.seen[0]["samples"][step]
        read = [one[step - trial.first_step] for _, one in ranks]
        together = sorted(i for part in read for i in part)
        if together == sorted(expected):
            continue
        lists = [seen["samples"][step - trial.first_step]
                 for seen in trial.seen]
        said = (misread(trial, lists, step * MINIBATCH)
                or miscounted(trial, max(map(len, lists))))
        if said:
            text, hint = said
            return fail(f"samples of step {step}: {text}", hint)
        said = "; ".join(f"rank {rank}: {shorten(part)}" for (rank, _), part
                         in zip(ranks, read, strict=True))
        return fail(f"samples of step {step} are not {shorten(expected)}, "
                    f"each once ({said})", "they come in another order: no "
                    "sampler, shuffle or worker may deal them out again")
    return ok("each step reads its minibatch, each sample once")
