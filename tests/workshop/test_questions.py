"""The check's questions: what right runs saw is changed, as a mistake would.

No process is started for a question. The runs are those of the solutions.
"""

import copy
import functools
import json
import math
import pickle
from dataclasses import replace

import pytest
import torch
from conftest import needs

from backstage.files import PART
from rankcheck.engine.ranks import RankExit
from rankcheck.engine.workspace import Workspace
from rankcheck_testing.expected import read_expected
from workshop.check.experiment import reference_of
from workshop.check.plan import MINIBATCH, STEPS, plan_runs
from workshop.check.questions import QUESTIONS, ask_about_run
from workshop.check.questions.question import LAST_PARAMETERS, TIED_WEIGHTS
from workshop.check.stage_runs import Bench
from workshop.stages import STAGES

# Columns of a check, each of a kind or sharded in a way of its own
RECORDED = {"ddp": ("1", "2", "uneven", "resumed", "stopped"),
            "mpi": ("2",), "lit": ("2", "bf16", "fsdp2"), "fsdp": ("2",),
            "tp": ("1x1x2",)}


def of_whole(cases):
    """All but DDP's take long: their runs have to be recorded."""
    return [pytest.param(*case, marks=() if case[0] == "ddp" else
                         pytest.mark.whole) for case in cases]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Of a stage {column: (kind, run)}, and the reference, as read again."""
    @functools.cache
    def record(stage):
        solution = STAGES[stage].solution
        bench = Bench(Workspace(tmp_path_factory.mktemp("bench")), stage,
                      solution, solution.read_bytes())
        reference = reference_of(bench)
        runs = {}
        for planned in plan_runs(stage):
            if planned.name in RECORDED[stage]:
                if stage != "ddp":  # two microbatches: DTensors take long
                    size = MINIBATCH // planned.mesh.dp // 2
                    planned = replace(planned, flags=(
                        *planned.flags, "--microbatch-size", size))
                runs[planned.name] = planned.kind, bench.make(planned)
        return pickle.loads(pickle.dumps((runs, reference)))

    return record


def answers(recorded, stage, column, change):
    """{title: `Finding`} of what is wrong, in the order of the questions.

    change: of the run; what it returns, if anything, is its kind.
    """
    runs, reference = recorded(stage)
    kind, run = runs[column]
    run = copy.deepcopy(run)
    kind = change(run) or kind
    found = ask_about_run(run, reference, kind)
    assert not found.internal_errors
    return {finding.question: finding for finding in found.findings
            if finding.verdict != "ok"}


@pytest.mark.whole
@pytest.mark.parametrize("stage", of_whole((stage,) for stage in RECORDED))
def test_the_solutions_are_right(recorded, stage):
    if stage == "mpi":
        needs("mpirun")
    runs, _ = recorded(stage)
    for column in runs:
        assert not answers(recorded, stage, column, lambda run: None)
    # a file that is written beside its name has that name
    written = {path for _, run in runs.values()
               for record in run.records for path in record.writers}
    assert written and not [
        path for path in written if path.endswith(PART)]


def on(rank, **values):
    """A change of what a rank has recorded."""
    def apply(run):
        for name, value in values.items():
            setattr(run.records[rank], name, value)
    return apply


def having(**changes):
    """A change of what a run has: each a value, or a function of it."""
    def apply(run):
        for name, value in changes.items():
            setattr(run, name, value(getattr(run, name)) if callable(
                value) else value)
    return apply


def each(what, change):
    """A change of what each rank has recorded of that."""
    def apply(run):
        for record in run.records:
            setattr(record, what, change(getattr(record, what)))
    return apply


def logged(column, change):
    def apply(run):
        run.rows[-1][column] = str(change(float(run.rows[-1][column])))
    return apply


def scaled(described, factor):
    return {**described, "flat": described["flat"] * factor}


def gradient(step, factor, rank=1):
    """The gradients of these ranks, from this one on, in one step."""
    def apply(run):
        for record in run.records[rank:]:
            record.gradients[step] = scaled(record.gradients[step], factor)
    return apply


def twice(run):
    """Two microbatches, and a reduction after each."""
    run.events = [[event for one in events
                   for event in [one] * (1 + ("reduce" in str(one)))]
                  for events in run.events]


def crashed(run):
    run.records[1] = None
    run.ranks = [RankExit(1, "", "RuntimeError: Connection closed by peer\n"),
                 RankExit(1, "", f'Traceback\n  File "{run.script}", '
                          "line 12, in main\nKeyError: 'b'\n")]


def other_checkpoint(run):
    model = run.state["model"]
    run.state["model"] = {name: tensor * 1.01
                          for name, tensor in model.items()}


def wrapped(run):
    run.state["model"] = {f"module.{name}": tensor for name, tensor
                          in run.state["model"].items()}


def sleeps(run):
    """Rank 1 is in a barrier that rank 0 does not come to."""
    run.gave_up = "hangs"
    for rank, (name, line) in enumerate((("all_reduce", 9), ("barrier", 7))):
        run.events[rank] = [{"call": name, "elements": 1, "step": 1,
                             "lines": [[line, "main", name]]}]
        run.ranks[rank] = RankExit(None, "", "")


def asks(what, value, rank=1):
    def apply(run):
        run.records[rank].facts = [
            (name, value if name == what else known)
            for name, known in run.records[rank].facts]
    return apply


def forgets(what):
    """Nothing of this name is known of any rank."""
    return each("facts", lambda facts: [one for one in facts
                                        if one[0] != what])


def writes(run):
    run.records[1].writers = run.records[0].writers


def prints(text):
    def apply(run):
        run.ranks[1].out += text
    return apply


def same_texts(run):
    first, *texts = run.ranks[0].out.split("\n> Hello, I'm a language")
    run.ranks[0].out = "\n> Hello, I'm a language".join(
        [first] + texts[:1] * len(texts))


def untied(run):
    """The last matrix is a copy of the first."""
    for start in (record.start for record in run.records):
        (name, shape), *_ = start["plain"]
        assert name == TIED_WEIGHTS
        start["plain"].append((LAST_PARAMETERS, shape))
        start["flat"] = torch.cat([
            start["flat"], start["flat"][:math.prod(shape)]])


def whole_matrices(words):
    """What a rank holds, but of some matrices all, as without a plan."""
    def change(start):
        return {**start, "sharded": {
            name: entry | {"part": torch.zeros(entry["shape"])}
            if words in name else entry
            for name, entry in start["sharded"].items()}}

    return each("start", change)


def whole_model(run):
    """No rank shares anything: each has a plain tensor."""
    for record in run.records:
        record.start["plain"] = [("transformer.h.0.ln_1.weight", (1,))]


def gathers(run):
    """The whole model comes at once."""
    whole = sum(call["elements"] for call in run.calls(0)
                if call["call"] == "allgather_base" and call["step"] == 1)
    run.events[0].append({"call": "allgather_base", "elements": whole,
                          "step": 1, "lines": []})


def kernels(**said):
    """A run of the operations alone, in which they came out so."""
    def apply(run):
        run.ranks[0].out = json.dumps(said)
        return "operations"
    return apply


def no_decay(optimizers):
    return [{**group, "weight_decay": 0.0} for group in optimizers]


def larger(described):
    return scaled(described, 1.01)


def apart(run):
    """The last rank starts from other weights."""
    run.records[1].start = larger(run.records[1].start)


CASES = [  # the stage, the column, the change; the question, what it finds
    ("ddp", "2", on(1, optimizers=[{"names": ["?"]}]),
     "the optimizer updates the model", "FAIL other-model"),
    ("ddp", "2", crashed, "the script runs to the end",
     "FAIL error rank=1 line=12 \"KeyError: 'b'\""),
    ("ddp", "2", having(gave_up="endless"), "the script runs to the end",
     'FAIL endless-training "step 5"'),
    ("ddp", "2", having(rows=lambda rows: rows[:4]),
     "the script runs to the end", "FAIL ends-early"),
    ("ddp", "2", sleeps, "the script runs to the end",
     "FAIL collective-mismatch line=9 line=7"),
    ("ddp", "2", on(1, samples=[[0, 1]] * STEPS), "each step reads its",
     "FAIL batch-size rank=1 step=0 samples=2 single=8"),
    ("ddp", "2", each("samples", lambda steps: steps[1:] + steps[:1]),
     "each step reads its", "FAIL other-samples rank=0 step=0"),
    ("ddp", "2", each("optimizers", no_decay), "the optimizer matches",
     'FAIL optimizer-setting "weight_decay=0.0"'),
    ("ddp", "2", apart, "every rank starts from the same",
     "FAIL unequal-initial-weights rank=1"),
    ("ddp", "2", logged("lr", lambda rate: 2 * rate), "learning rates agree",
     'FAIL log step=5 "learning rate"'),
    ("ddp", "2", gradient(3, 0.5, 0), "gradients match the",
     "FAIL gradients-differ step=3 error=0.5"),
    ("ddp", "2", gradient(2, 1.1), "gradients match the",
     "FAIL unequal-gradients step=2 rank=1"),
    ("ddp", "2", twice, "gradients are reduced at",
     "warn reduced-repeatedly times=2"),
    ("ddp", "2", logged("norm", lambda norm: 2 * norm), "gradient norms agree",
     'FAIL log step=5 "gradient norm"'),
    ("ddp", "2", logged("loss", lambda loss: 1.1 * loss), "losses agree at",
     'FAIL log step=5 "loss"'),
    ("ddp", "2", logged("val_loss", lambda loss: 1.1 * loss),
     "validation losses agree", 'FAIL log step=5 "validation loss"'),
    ("ddp", "2", each("evaluated", lambda number: 2 * number),
     "no more samples are", "FAIL evaluated-repeatedly"),
    ("ddp", "2", logged("seconds", lambda _: 1e6), "the logged times",
     "FAIL seconds"),
    ("ddp", "2", each("weights", larger), "final weights match",
     "FAIL weights-differ"),
    ("ddp", "2", having(saved=["6"]), "the checkpoints match",
     'FAIL checkpoint-steps "6" "3 and 6"'),
    ("ddp", "2", other_checkpoint, "the checkpoints match",
     "FAIL checkpoint-weights"),
    ("ddp", "2", wrapped, "the checkpoints match",
     'FAIL checkpoint-names "module."'),
    ("ddp", "2", having(state=None), "the checkpoints match",
     "FAIL no-checkpoint"),
    ("ddp", "2", writes, "only rank 0 logs", "FAIL second-writer rank=1"),
    ("ddp", "2", prints("| step 0"), "only rank 0 logs",
     "FAIL second-writer rank=1"),
    ("ddp", "2", prints("> Hello, I'm a language model,"),
     "every rank generates", "FAIL second-writer rank=1"),
    ("ddp", "2", same_texts, "every rank generates", "FAIL same-text"),
    ("ddp", "2", on(1, joined=True), "the process group is destroyed",
     "warn no-destroy"),
    ("ddp", "2", asks("local_rank", 0), "each process asks for its own",
     "FAIL wrong-device rank=1"),
    ("ddp", "2", having(source=lambda text: text.replace(
        b"use_device(hp.device, local_rank)", b"torch.device('cpu')")),
     "each process asks for its own", "FAIL fixed-device \"'cpu'\""),
    ("ddp", "2", having(source=lambda text: text.replace(
        b"run.finish()", b"runs.finish()")),
     "all names that", 'FAIL undefined-name "runs"'),
    ("ddp", "2", on(0, compiled="model"), "the model is compiled",
     "FAIL compiled"),
    ("ddp", "2", each("precision", lambda _: "bf16"),
     "the model trains in", 'FAIL precision "fp32" "bf16"'),
    ("ddp", "2", asks("pytorch", "gelu"), "", ""),  # that is right
    ("ddp", "2", untied, "the embedding and lm_head", "FAIL untied-weights"),
    ("ddp", "uneven", having(ranks=[RankExit(0, "", "")] * 2),
     "a minibatch that cannot", 'FAIL uneven-minibatch "18"'),
    ("ddp", "stopped", having(rows=lambda rows: rows[:1] * STEPS),
     "a signal to one rank", "FAIL signal-ignored"),
    ("ddp", "stopped", having(state=None), "a signal to one rank",
     "FAIL signal-without-checkpoint"),
    ("ddp", "stopped", on(0, recomputed=False), "--recompute keeps few",
     "FAIL no-recompute"),
    ("ddp", "stopped", on(0, compiled=None), "the model is compiled",
     "FAIL not-compiled"),
    ("ddp", "resumed", apart, "every rank starts from the same",
     "FAIL unequal-initial-weights rank=1"),
    ("lit", "2", forgets("fit"), "the script trains with Lightning",
     "FAIL no-lightning"),
    ("lit", "2", forgets("plugins"), "the script trains with Lightning",
     "warn no-launcher"),
    ("lit", "bf16", each("precision", lambda _: "fp32"),
     "the model trains in", 'FAIL precision "fp32" "bf16"'),
    ("lit", "fsdp2", each("start", lambda start: {**start, "sharded": {}}),
     "--strategy fsdp2 leaves", "FAIL not-sharded"),
    ("fsdp", "2", gathers, "weights are gathered block",
     "warn gathered-at-once"),
    ("ddp", "1", kernels(gelu=None), "each operation computes",
     'FAIL no-kernel "gelu"'),
    ("ddp", "1", kernels(gelu=["TypeError: no", [9], True]), "each operation "
     "computes", 'FAIL kernel line=9 "gelu: TypeError: no"'),
    ("ddp", "1", kernels(gelu=""), "", ""),
    ("ddp", "1", having(stage="kernels"),
     "the script trains with its own kernels", "FAIL no-kernel"),
    ("tp", "1x1x2", whole_model, "each rank holds its part",
     "FAIL not-sharded rank=0"),
    ("tp", "1x1x2", whole_matrices(".attn.c_attn.weight"), "each rank holds "
     "its part", 'warn not-split "transformer.h.0.attn.c_attn.weight"'),
    ("tp", "1x1x2", whole_matrices(".h."), "each rank holds its part",
     "FAIL not-split"),
    ("tp", "1x1x2", on(1, continued=[[5]]), "every rank generates",
     "FAIL unequal-text"),
]


@pytest.mark.parametrize(
    ("stage", "column", "change", "title", "finds"), of_whole(CASES))
def test_a_mistake(recorded, stage, column, change, title, finds):
    found = answers(recorded, stage, column, change)
    first = next(iter(found), "")
    assert first.startswith(title) and bool(first) == bool(title), found
    assert not first or read_expected(finds).matches(found[first]), found


@pytest.mark.parametrize(("text", "error", "fix"), [
    ("NameError: name 'INTERPRETED' is not defined", True, ""),
    ("its output is off by 0.3 of its largest number", False, "masks"),
    ("its output overflows: it is not finite", False, "an exponential"),
])
def test_advice_on_tiles_is_for_wrong_numbers(recorded, text, error, fix):
    """Not for an exception: no mask or sum is its cause."""
    found, = answers(recorded, "ddp", "1",
                     kernels(gelu=[text, [9], error])).values()
    assert fix in found.fix_text and bool(fix) == bool(found.fix_text)


def test_each_question_is_answered_with_a_no():
    titles = [title for *_, title, _ in CASES if title]
    assert not [question.title for question in QUESTIONS
                if not question.title.startswith(tuple(titles))]
