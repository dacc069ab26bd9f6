"""Questions about what is logged, printed and saved, and when."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import torch

from rankcheck.engine import exits
from rankcheck.engine.findings import Finding, counted, fail, percent, warn
from rankcheck.record.tensors import Whole, describe_tensors
from workshop.check.plan import LEARNING_RATE, STEPS
from workshop.check.questions.question import (
    assemble_tied,
    check_column,
    check_question,
    largest_difference,
    no_pipeline,
    read_number,
    several,
)
from workshop.check.stage_runs import Checkpoint, StageRun

PROMPT = "> Hello, I'm a language model,"


check_column("norm", "gradient norms agree", "gradient norm", 1e-4, "fsdp2")
check_column("loss", "losses agree at every step", "logged loss", 1e-5,
             "resumed", "fsdp2")
check_column("val_loss", "validation losses agree", "validation loss", 1e-5)


@check_question("no more samples are evaluated than on one device")
def check_evaluated(run: StageRun, reference: StageRun) -> Finding | None:
    expected, actual = (
        sum(record.evaluated for record in one.all_records) // one.mesh.tp
        for one in (reference, run))
    if actual > expected:
        return fail(f"{actual} samples are evaluated in all, where the single "
                    f"device evaluates {expected}",
                    kind="evaluated-repeatedly")
    return None


@check_question("the logged times are the step times")
def check_logged_seconds(run: StageRun, reference: StageRun) -> Finding | None:
    """Whether the logged seconds are plausible: the run took longer."""
    logged = sum(read_number(row, "seconds") for row in run.rows)
    if not 0 < logged <= run.seconds:
        return fail(f"the log says {logged:.1f} seconds for all steps, and "
                    f"the whole run took {run.seconds:.1f}", kind="seconds")
    return None


@check_question("only rank 0 logs and saves", where=several)
def check_writers(run: StageRun, reference: StageRun) -> Finding | None:
    written: dict[str, int] = {}  # file -> the rank that writes it
    for rank, record in enumerate(run.all_records):
        for path in record.writers:
            if written.setdefault(path, rank) != rank:
                return fail(f"rank {rank} also writes {Path(path).name}",
                            ranks=[rank], kind="second-writer")
        if rank and "| step" in run.ranks[rank].out:
            return fail(f"rank {rank} also prints the log line",
                        ranks=[rank], kind="second-writer")
    return None


@check_question("every rank generates its own text", where=no_pipeline)
def check_generated_texts(run: StageRun,
                          reference: StageRun) -> Finding | None:
    """Four of each, printed by rank 0; a TP group writes them together."""
    tp = run.mesh.tp
    for rank, record in enumerate(run.all_records):
        first = rank - rank % tp
        if rank and PROMPT in run.ranks[rank].out:
            return fail(f"rank {rank} prints its generated text itself, so "
                        "lines of several ranks may mix", ranks=[rank],
                        kind="second-writer")
        if record.continued != run.record_of(first).continued:
            return fail(f"ranks {first} and {rank} of a TP group generate "
                        "different text", kind="unequal-text")
    found = run.ranks[0].out.split(f"\n{PROMPT}")[1:]
    # after step 0 and after the last step
    right = 4 * run.mesh.dp * (1 if run.first_step else 2)
    if len(found) != right:
        return fail(f"{counted(found, 'generated text')} printed, not "
                    f"{right}, each on its own line", kind="text-count")
    if len({text[:20] for text in found}) < len(found):
        return fail("some ranks generate the same text", kind="same-text")
    return None


@check_question("the checkpoints match the single device's")
def check_checkpoint(run: StageRun, reference: StageRun) -> Finding | None:
    """The whole state by name: weights, and the optimizer's moments."""
    if run.state is None:
        return fail("there is no checkpoint", kind="no-checkpoint")
    if run.saved != reference.saved:
        return fail(f"the checkpoints are of steps "
                    f"{' and '.join(run.saved)}, not "
                    f"{' and '.join(reference.saved)}",
                    kind="checkpoint-steps")
    name = run.state.get("stage", run.stage)
    if name != run.stage:
        return fail(f"the run calls itself {name}, not {run.stage}",
                    kind="stage-name")
    if run.state["step"] != STEPS:
        return fail(f"the last checkpoint is of step {run.state['step']}",
                    kind="checkpoint-step")
    if reference.state is None:
        raise ValueError("the single device has left no checkpoint")
    actual, expected = run.state["model"], reference.state["model"]
    prefix = prefix_of(actual, expected)
    odd = sorted({name.removeprefix(prefix)
                  for name in actual} ^ expected.keys())
    if odd or "module." in prefix or "_orig_mod." in prefix:
        name = [*odd, *actual][0]
        return fail(f"the checkpoint has different names ({name})",
                    kind="checkpoint-names")
    off = largest_difference(whole(actual, prefix), whole(expected))
    if not off <= 0.02 * LEARNING_RATE:
        return fail(f"the checkpoint's weights differ by up to {off:.1e}",
                    kind="checkpoint-weights")
    off = whole(moments(run.state), prefix).error(
        whole(moments(reference.state)))
    if not off <= 0.01:
        return fail("the checkpoint's optimizer state has a relative error "
                    f"of {percent(off)}", kind="checkpoint-optimizer")
    if prefix:
        return warn(f"the checkpoint's names begin with {prefix}",
                    "save the model inside: other stages cannot resume from "
                    "this", kind="checkpoint-names")
    return None


def prefix_of(actual: Collection[str], expected: Collection[str]) -> str:
    """Return what all names have before the single device's; "" if that is
    not one thing.
    """
    found = {name.removesuffix(plain) for name in actual for plain in expected
             if name.endswith("." + plain)}
    if len(found) == 1 and len(actual) == len(expected):
        return min(found)
    return ""


def whole(tensors: Mapping[str, torch.Tensor | None], prefix: str = ""
          ) -> Whole:
    """Return the tensors of a checkpoint, without a prefix of their names."""
    return assemble_tied([describe_tensors((name.removeprefix(prefix), tensor)
                                           for name, tensor
                                           in tensors.items())])


def moments(state: Checkpoint) -> dict[str, torch.Tensor | None]:
    """Return the optimizer's running means of the gradients, by name."""
    return {name: kept.get("exp_avg") for name, kept
            in ((state.get("optimizer") or {}).get("state") or {}).items()}


@check_question("a signal to one rank ends all of them, after a checkpoint",
                ("stopped",), early=True)
def check_stopping(run: StageRun, reference: StageRun) -> Finding | None:
    """Whether a signal to rank 0 alone ends all of them, losing nothing."""
    ended = exits.explain_failure(run)
    if ended:
        return fail([f"with {' '.join(map(str, run.more))} and a signal to "
                     "rank 0: ", *ended.sentence], ended.fix, ended.error,
                    kind=f"signal-{ended.kind}")
    if len(run.rows) == STEPS:
        return fail("a signal to rank 0 does not end it",
                    kind="signal-ignored")
    if run.state is None or run.state["step"] != len(run.rows):
        return fail("a signal ends it without a checkpoint",
                    kind="signal-without-checkpoint")
    return None
