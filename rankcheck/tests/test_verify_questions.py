"""verify's questions: what right scripts' runs saw is changed, as a mistake
would change it.

No process is started for a question. verify_cases.py has the mistakes
themselves.
"""

import collections
import copy
import functools
import itertools
import math
import pickle
import re
from pathlib import Path

import pytest
import torch
from torch.autograd.graph import get_gradient_edge
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    bf16_compress_hook,
)
from torch.func import functional_call, grad, vmap
from torch.nn import SyncBatchNorm, functional
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad
from torch.utils.data import DataLoader, IterableDataset

from rankcheck.engine.findings import LABELS
from rankcheck.engine.questions import Question
from rankcheck.engine.ranks import RankExit
from rankcheck.engine.run_record import RunRecord
from rankcheck.record.fingerprints import slice_fingerprints
from rankcheck.record.rank_record import RankRecord
from rankcheck.record.recorder import Log
from rankcheck.record.rows import Rows, persistent_buffers
from rankcheck.record.tensors import describe_tensors, whole_here
from rankcheck.record.torch_api import (
    watch_batchnorm,
    watch_clipping,
    watch_streams,
    watch_targets,
)
from rankcheck.record.training import Modules, hash_each
from rankcheck.verification import command, questions
from rankcheck.verification.comparison import Comparison, find_skips
from rankcheck.verification.questions import (
    QUESTIONS,
    initial_state,
    nodes,
    optimizers,
    resume,
    samples,
    side_effects,
    single_process,
    synchronization,
)
from rankcheck.verification.runs import Runs
from rankcheck_testing.expected import read_expected
from rankcheck_testing.verify_cases import CASES as SCRIPTS
from rankcheck_testing.verify_cases import outcome

RIGHT, MORE, AVERAGED = (
    "DDP: right", "DDP: minibatch multiplied", "local SGD: right")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Of a script {(size, kind): run}, as it is read again."""
    @functools.cache
    def record(name):
        script, = (one for one in SCRIPTS if one.name == name)
        runs, start = {}, command.Experiment.start

        def keep(experiment, planned):
            run = start(experiment, planned)
            runs[planned.size, planned.kind] = run
            return run

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(command.Experiment, "start", keep)
            outcome(script, tmp_path_factory.mktemp("script"))
        return pickle.dumps(runs)

    return lambda name: pickle.loads(record(name))


@pytest.fixture
def answers(recorded, monkeypatch):
    """{question's function: its first finding that is not "ok"}, in order.
    """
    def find(name, change):
        runs, found, ask = recorded(name), {}, Question.ask
        change(runs)

        def note(question, case):
            findings = ask(question, case)
            for finding in findings:
                if finding.verdict != "ok":
                    found.setdefault(question.find, finding)
            return findings

        def start(planned):
            return runs.get((planned.size, planned.kind)) or copy.deepcopy(
                runs[1, ""])

        monkeypatch.setattr(Question, "ask", note)
        answers = questions.ask_questions(Runs(start, 2, 4))
        assert answers.not_checked and not answers.internal_errors
        assert all(finding.kind for finding in answers.findings)
        return found

    return find


@pytest.mark.parametrize("dead", [0, 1])
def test_who_leaves_out_a_step_beside_a_rank_that_died(dead, tmp_path):
    """Its number is the rank's own: one that died has left no record."""
    makes = RankRecord(steps=[{}, {}])
    records = [makes, makes, RankRecord(steps=[{}, {}], skipped_steps=[0])]
    records[dead] = None
    found, = find_skips(RunRecord(tmp_path / "train.py", records=records))
    assert read_expected("FAIL skipped-step step=0 rank=2").matches(found)
    assert f"rank {1 - dead} " in found.text


def on(rank, kind="", size=2, step=None, **change):
    """A change of what that rank has recorded of a step, of all if None.

    change: of each value: a function of it, or another value.
    """
    def apply(runs):
        records = runs[size, kind].records[rank].steps
        for one in records if step is None else records[step:step + 1]:
            for key, value in change.items():
                one[key] = value(one[key]) if callable(value) else value
    return apply


def on_all(**change):
    return lambda runs: [on(rank, **change)(runs) for rank in (0, 1)]


def seen(rank, **change):
    """A change of what that rank has recorded of the whole run."""
    def apply(runs):
        of_rank = runs[2, ""].records[rank]
        for key, value in change.items():
            old = getattr(of_rank, key)
            setattr(of_rank, key, value(old) if callable(value) else value)
    return apply


def times(factor):
    return lambda state: {**state, "flat": factor * state["flat"]}


def sharded(state):
    """Other weights, each of which is in a sharded tensor."""
    return {"plain": [], "flat": torch.zeros(0), "sharded": {
        name: {"part": 1.5 * part, "mesh": torch.arange(2),
               "placements": [("Replicate", None)], "shape": part.shape}
        for name, part in whole_here(state).items()}}


def others_of(fingerprints):
    """Those of other values."""
    return {name: [hashes + 1 for hashes in of_dims]
            for name, of_dims in fingerprints.items()}


def fails_again(runs):
    """The run that would show whether one process begins alike fails."""
    again = runs[1, "repeated"] = copy.deepcopy(runs[1, ""])
    again.ranks = [RankExit(1, "", "error: the disk is full\n")]


def fails_together(runs):
    runs[2, ""].ranks = [RankExit(1, "", "error: the disk is full\n")] * 2


def together(*changes):
    return lambda runs: [change(runs) for change in changes]


def one_sample(runs):
    for run in runs.values():
        for of_rank in run.records:
            for record in of_rank.steps:
                for kind in ("rows", "columns"):
                    record[kind] = ["a"] * len(record[kind])


def shared(count):
    """So many of its 16 samples rank 1 shares with rank 0."""
    def apply(runs):
        for one, other in zip(*(of.steps for of in runs[2, ""].records),
                              strict=True):
            for kind in ("rows", "columns"):
                other[kind] = one[kind][:count] + other[kind][count:]
    return apply


def of_rank_0_alone(runs):
    for records in zip(*(of.steps for of in runs[2, ""].records),
                       strict=True):
        for record in records:
            record["gradients"] = records[0]["local"]


def summed_by_hooks(runs):
    """Before a rank's own is seen."""
    for of_rank in runs[2, ""].records:
        for record in of_rank.steps:
            record |= dict.fromkeys(("gradients", "local"), times(2.0)(
                record["gradients"]))


def one_summed(runs):
    """Of one parameter alone."""
    for of_rank in runs[2, ""].records:
        for record in of_rank.steps:
            _, shape = record["gradients"]["plain"][0]
            number = math.prod(shape)
            flat = record["gradients"]["flat"].clone()
            flat[:number] *= 2
            record["gradients"] = record["gradients"] | {"flat": flat}


def one_changed(runs):
    """Of the others one is neither the sum nor the mean."""
    one_summed(runs)
    for of_rank in runs[2, ""].records:
        for record in of_rank.steps:
            record["gradients"]["flat"][-1] *= 1.5


def own_gradients(runs):
    """Each rank has its own alone."""
    for of_rank in runs[2, ""].records:
        for record in of_rank.steps:
            record |= {"gradients": record["local"], "reduced": 0}


def instead(name, value):
    """A change of the facts: another value; None: the fact is missing."""
    return lambda log: [(key, value if key == name else other)
                        for key, other in log if (key, value) != (name, None)]


def without(name):
    """A change of the facts: none of that name."""
    return lambda log: [pair for pair in log if pair[0] != name]


def no_sampler(runs):
    of_all(runs, facts=without("sampler"))


def alone(runs):
    """No rank knows of another."""
    for rank in (0, 1):
        seen(rank, joined=False, facts=instead(
            "init_process_group", None))(runs)
        on(rank, reduced=0)(runs)


def begins_with_the_last(runs):
    for run in runs.values():
        run.records[0].files_written = ["/tmp/model.pt"]
    runs[2, ""].records[1].files_read.append("/tmp/model.pt")


def prints(runs):
    for rank in runs[2, ""].ranks:
        rank.out += "loss 1.5\n"


def copied(runs):
    for rank, of_rank in enumerate(runs[2, ""].records):
        of_rank.copies = [times(1.0 + rank)(
            of_rank.steps[0]["weights"])]


def buffered(rank, state):
    return {"plain": [("0.running_mean", (2,))], "sharded": {},
            "flat": torch.full((2,), float(rank))}


def later(runs):
    """Each step reads half of what the one before has read."""
    for of_rank in runs[2, ""].records:
        records = of_rank.steps
        for before, record in [*itertools.pairwise(records)][::-1]:
            for kind in ("rows", "columns"):
                record[kind] = before[kind][8:] + record[kind][:8]


def grows(runs):
    """From its second step on, each rank reads twice as much."""
    for of_rank in runs[2, ""].records:
        for record in of_rank.steps[1:]:
            for kind in ("rows", "columns"):
                record[kind] += [f"another {row}" for row in record[kind]]


def of_all(runs, **change):
    """Change what each rank has recorded of the run of several."""
    for rank in (0, 1):
        seen(rank, **change)(runs)


def untied(runs):
    """Each rank has a parameter of its own for what is one tensor."""
    one_more(runs)
    runs[1, ""].records[0].tied_names = {
        "Sequential:9.weight": "Sequential:0.weight"}


def one_more(runs):
    more = {"Sequential:9.weight": (4,)}
    of_all(runs, shapes=lambda shapes: shapes | more)


def half(state, place):
    """The same state, with one half of a bias."""
    kept = whole_here(state)
    kept["Sequential:0.bias"] = kept["Sequential:0.bias"].chunk(2)[place]
    return describe_tensors(kept.items())


def in_parts(*places):
    """Which half of a bias each rank holds from the start."""
    def apply(runs):
        for rank, place in enumerate(places):
            of_rank = runs[2, ""].records[rank]
            for shapes in of_rank.shapes, of_rank.model:
                shapes["Sequential:0.bias"] = (450,)
            first = of_rank.steps[0]
            first["before"] = half(first["before"], place)
    return apply


def average_of_each_microbatch(runs):
    for run, factor in (runs[1, ""], 1.1), (runs[2, ""], 1.2):
        for of_rank in run.records:
            last = whole_here(of_rank.steps[0]["weights"])
            of_rank.copies = [describe_tensors(
                (name.partition(":")[2], factor * part)
                for name, part in last.items())]


def drops_the_last(rank):
    """That rank has not come to its last step, nor to its end."""
    def apply(runs):
        runs[2, ""].records[rank].steps.pop()
        seen(rank, facts=without("left"))(runs)
    return apply


def draws_too_much(runs):
    for of_rank in runs[2, ""].records:
        for step, record in enumerate(of_rank.steps):
            record["drawn"] = {7: 32 * step + 32}


def told(rank, **settings):
    """A change of what that rank's optimizers are told."""
    def apply(runs):
        for groups in runs[2, ""].records[rank].settings:
            for group in groups:
                group["values"] |= settings
    return apply


def with_nodes(change):
    """The same of the run as two nodes."""
    def apply(runs):
        change({(2, ""): runs[2, "nodes"]})
    return apply


def local_writer(runs):
    for of_rank in runs[2, "nodes"].records:
        of_rank.writers["/home/me/last.pt"] = 7


def local_cache(runs):
    """The first node writes what the second reads."""
    first, second = runs[2, "nodes"].records
    first.writers["/tmp/tokens"] = 7
    second.files_read.append("/tmp/tokens")


def fails_on_nodes(runs):
    runs[2, "nodes"].ranks = [RankExit(1, "", "error: no such GPU\n")] * 2


def without_steps(runs):
    runs[2, "nodes"].records[1].steps = []
    runs[2, "nodes"].events[1] = []


# (script, what is changed, the question that sees it, what it finds first)
CASES = [
    (RIGHT, together(seen(1, discarded_steps=[1]), drops_the_last(1)),
     initial_state.verify_skipped_steps, 'FAIL skipped-step step=1 rank=1'),
    (RIGHT, together(seen(0, skipped_steps=[2, 2]), drops_the_last(0)),
     initial_state.verify_skipped_steps,
     'FAIL skipped-step step=2 rank=0 "GradScaler"'),
    (RIGHT, untied, initial_state.verify_parameters,
     'FAIL untied-weights "9.weight" "0.weight"'),
    (RIGHT, one_more, initial_state.verify_parameters,
     'warn extra-parameters "9.weight"'),
    (RIGHT, in_parts(0, 0), initial_state.verify_hand_sharded_parts,
     'FAIL equal-shards "0.bias"'),
    (RIGHT, average_of_each_microbatch, side_effects.verify_averaged_weights,
     "FAIL averaged-weights-differ"),
    (RIGHT, draws_too_much, samples.verify_samples,
     "warn dropped-samples rank=0 drawn=96 samples=48"),
    (RIGHT, begins_with_the_last, initial_state.verify_leftover_files,
     'FAIL reused-files "model.pt"'),
    (RIGHT, on(1, step=2, losses=[math.nan]), initial_state.verify_finite,
     "FAIL nonfinite-loss step=2"),
    (RIGHT, on(0, step=0, before=times(math.nan)), initial_state.verify_finite,
     'FAIL nonfinite-weights "0.weight"'),
    (RIGHT, on_all(gradients=times(0.0)), initial_state.verify_finite,
     "warn zero-gradients"),
    (RIGHT, alone, initial_state.verify_process_group,
     "FAIL no-process-group"),
    (RIGHT, on(1, step=0, before=times(1.5)),
     initial_state.verify_initial_weights,
     'FAIL unequal-initial-weights rank=1 "0.weight"'),
    (RIGHT, on_all(step=0, before=times(1.5)),
     initial_state.verify_initial_weights,
     "warn other-initial-weights"),
    (RIGHT, together(on_all(step=0, before=sharded), fails_again),
     initial_state.verify_initial_weights,
     'warn initial-weights-not-compared "the disk is full"'),
    (RIGHT, one_sample, samples.verify_samples, "warn identical-samples"),
    (RIGHT, together(shared(16), on_all(losses=[1.0])), samples.verify_samples,
     "FAIL same-samples"),
    (MORE, together(no_sampler, shared(9)), samples.verify_samples,
     "FAIL shared-samples shared=36 samples=256"),
    (MORE, together(no_sampler, later), samples.verify_samples,
     "warn repeated-samples percent=18.8"),
    (MORE, shared(9), samples.verify_samples, 'FAIL sampler-overlap "18"'),
    (MORE, lambda runs: None, samples.verify_samples,
     "warn batch-size samples=64 single=32 rate=1"),
    (RIGHT, grows, samples.verify_samples,
     "warn changed-batch-size step=1 samples=64 single=32"),
    (RIGHT, on_all(rates=[0.2]), samples.verify_samples,
     "warn learning-rate samples=32 single=32 rate=2"),
    (RIGHT, on(1, step=2, rates=[0.05]), samples.verify_samples,
     'warn unequal-learning-rates "rank 1" "0.05" "0.1"'),
    (RIGHT, seen(1, facts=instead("sampler", (2, 1, "", 1))),
     samples.verify_samplers,
     'FAIL unequal-samplers "seeds"'),
    (AVERAGED, lambda runs: None, synchronization.verify_weight_averaging,
     'warn averaged-weights "2"'),
    (AVERAGED, on_all(step=2, now=times(2.0)),
     synchronization.verify_weight_averaging, "FAIL summed-weights step=2"),
    (RIGHT, own_gradients, synchronization.verify_reductions,
     "FAIL not-reduced step=0 reduced=0 elements=10801"),
    (RIGHT, on_all(reduced=lambda number: 1.7 * number, calls=2),
     synchronization.verify_reductions,
     "warn reduced-repeatedly times=1.7"),
    (RIGHT, on(1, step=1, without=["Sequential:3.bias"]),
     synchronization.verify_unused_parameters,
     'warn unused-parameters "3.bias"'),
    (RIGHT, on(1, step=2, gradients=times(1.1)),
     synchronization.verify_equal_ranks,
     'FAIL unequal-gradients step=2 rank=1 "0.weight"'),
    (RIGHT, on(1, step=2, weights=times(1.1)),
     synchronization.verify_equal_ranks,
     'FAIL unequal-weights step=2 rank=1 "0.weight"'),
    (RIGHT, on_all(gradients=times(0.5)), synchronization.verify_mean_of_ranks,
     "warn scaled-gradients step=0 factor=0.5"),
    (RIGHT, summed_by_hooks, synchronization.verify_mean_of_ranks,
     "FAIL summed-gradients step=0"),
    (RIGHT, one_summed, synchronization.verify_mean_of_ranks,
     'warn partly-summed-gradients step=0 "0.weight"'),
    (RIGHT, one_changed, synchronization.verify_mean_of_ranks,
     "warn not-the-mean step=0"),
    (RIGHT, of_rank_0_alone, synchronization.verify_mean_of_ranks,
     "FAIL gradients-of-one-rank step=0 rank=0"),
    (RIGHT, on_all(step=1, losses=lambda losses: [2 * losses[0]]),
     single_process.verify_single_process, "FAIL losses-differ step=1"),
    (RIGHT, on_all(step=0, gradients=times(0.5), local=times(0.5)),
     single_process.verify_single_process,
     "FAIL gradients-differ step=0 factor=0.5"),
    (RIGHT, on_all(step=3, weights=times(1.01)),
     single_process.verify_single_process, "FAIL weights-differ step=3"),
    (RIGHT, together(on(0, buffers=functools.partial(buffered, 0)),
                     on(1, buffers=functools.partial(buffered, 1))),
     synchronization.verify_buffers,
     'warn unequal-buffers step=0 "BatchNorm"'),
    (RIGHT, copied, side_effects.verify_copies, "warn unequal-copies"),
    (RIGHT, together(seen(0, writers={"/tmp/log": 7}),
                     seen(1, writers={"/tmp/log": 7})),
     side_effects.verify_written_files, 'FAIL shared-files line=7 "log"'),
    (RIGHT, prints, side_effects.verify_written_files, "warn repeated-output"),
    (RIGHT, together(told(0, weight_decay=(0.05,)), told(
        1, weight_decay=(0.05,))), optimizers.verify_settings,
     'FAIL optimizer-setting "weight decay" "0.05" "0.weight, 0.bias, '
     '3.weight and 1 more"'),
    (RIGHT, told(1, momentum=(0.9,)), optimizers.verify_settings,
     'FAIL unequal-optimizer-settings rank=1 "momentum" "0.9" "0.weight"'),
    (RIGHT, together(seen(0, devices=[1]), seen(1, devices=[1])),
     nodes.verify_own_device, "FAIL shared-gpu rank=0 rank=1 gpu=1"),
    (RIGHT, with_nodes(shared(8)), nodes.verify_two_nodes,
     "FAIL nodes-shared-samples shared=8 samples=32"),
    (RIGHT, with_nodes(on_all(rows=lambda rows: rows[:8])),
     nodes.verify_two_nodes, "warn nodes-batch-size samples=16 single=32"),
    (RIGHT, with_nodes(on(1, step=0, before=times(1.5))),
     nodes.verify_two_nodes, 'FAIL nodes-unequal-ranks rank=1 "before"'),
    (RIGHT, with_nodes(on(1, step=1, gradients=times(1.5))),
     nodes.verify_two_nodes, 'FAIL nodes-unequal-ranks rank=1 "gradients"'),
    (RIGHT, with_nodes(on_all(gradients=times(0.5))), nodes.verify_two_nodes,
     "FAIL nodes-gradients-differ factor=0.5"),
    (RIGHT, with_nodes(on_all(rates=[0.05])), nodes.verify_two_nodes,
     'warn nodes-learning-rate "0.05"'),
    (RIGHT, with_nodes(together(told(0, nesterov=(1.0,)), told(
        1, nesterov=(1.0,)))), nodes.verify_two_nodes,
     'warn nodes-optimizer-setting "nesterov" "0.weight"'),
    (RIGHT, with_nodes(seen(1, facts=instead("sampler", (2, 1, "", 1)))),
     nodes.verify_two_nodes, 'FAIL nodes-sampler "seeds"'),
    (RIGHT, local_writer, nodes.verify_two_nodes,
     'warn nodes-shared-files line=7 rank=0 rank=1 "last.pt"'),
    (RIGHT, local_cache, nodes.verify_two_nodes,
     'warn nodes-local-file line=7 rank=1 "tokens" "/tmp"'),
    (RIGHT, with_nodes(seen(1, devices=[1])), nodes.verify_two_nodes,
     "FAIL nodes-no-such-gpu rank=1 gpu=1"),
    (RIGHT, fails_on_nodes, nodes.verify_two_nodes,
     'FAIL error rank=0 "no such GPU"'),
    (RIGHT, without_steps, nodes.verify_two_nodes, "FAIL no-step"),
]
# finds something with all of these bases
DRAWN = synchronization.verify_random_numbers


def name_case(value):
    """The ID of a case: what it finds, and the question."""
    return getattr(value, "__name__", None)


@pytest.mark.parametrize(("name", "change", "question", "finds"), CASES,
                         ids=name_case)
def test_a_mistake(answers, name, change, question, finds):
    found = answers(name, change)
    sharded = question is initial_state.verify_hand_sharded_parts
    assert (DRAWN in found) or name != RIGHT or sharded
    expected = read_expected(finds)
    assert expected, f"not of the form: {finds}"
    assert question in found and expected.matches(found[question]), found


@pytest.mark.whole
def test_the_words_of_the_findings(answers, snapshot):
    """A page with what is found in each case, to be read as text."""
    page = {}
    for name, change, question, _ in CASES:
        finding = answers(name, change)[question]
        label = LABELS.get(finding.verdict, finding.verdict)
        text = f"{label}  {finding.text}\n"
        if finding.fix_text:
            text += f"  fix: {finding.fix_text}\n"
        page[text] = None
    for question in QUESTIONS:
        page[f"ok  {question.title}"] = None
    # such digits are a machine's own
    snapshot("verify.txt", re.sub(r"\d+\.\d{3,}|[\d.]+(?=%)", "N",
                                  "\n".join(page)))


@pytest.mark.parametrize("change", [
    # left out by all ranks, or after the last step of another
    lambda runs: of_all(runs, discarded_steps=[1], skipped_steps=[2]),
    seen(0, discarded_steps=[4]), in_parts(0, 1),
    seen(0, discarded_steps=[0])])  # computed for itself, as for a profile
def test_what_is_no_mistake(answers, change):
    found = answers(RIGHT, change)
    assert not [one for one in found.values() if one.verdict == "FAIL"], found


def test_what_an_own_error_leaves(recorded):
    """Other questions are answered; the status is 2."""
    runs = recorded(RIGHT)
    on(0, rates=[None])(runs)
    made = questions.ask_questions(Runs(
        lambda planned: runs[planned.size, ""], 2, 4))
    error, = made.internal_errors
    titles = {question.find: question.title for question in QUESTIONS}
    assert error.startswith(f"{titles[samples.verify_samples]}: TypeError: ")
    assert made.findings and not made.uncompared


def test_an_average_follows_weights_that_differ(answers):
    """As those of a model with BatchNorm: the average is not to blame."""
    found = answers(RIGHT, together(
        average_of_each_microbatch, seen(0, batchnorm=True),
        on_all(step=3, weights=times(1.3))))
    assert side_effects.verify_averaged_weights not in found


def test_a_parameter_of_one_number_may_be_a_part(answers):
    def scalar(runs):
        for rank in (0, 1):
            of_rank = runs[2, ""].records[rank]
            of_rank.shapes["Sequential:0.bias"] = ()
            first = of_rank.steps[0]
            kept = whole_here(first["before"])
            kept["Sequential:0.bias"] = kept["Sequential:0.bias"][rank]
            first["before"] = describe_tensors(kept.items())
            of_rank.fingerprints["Sequential:0.bias"] = slice_fingerprints(
                torch.tensor(7.0))

    assert answers(RIGHT, scalar)  # and no error of its own


def backward(log, weights, microbatches=1):
    """What the probes note of backward passes."""
    for _ in range(microbatches):
        log.row.counts.append(8)
        log.row.losses.append(1.5)
        log.row.rows += ["a", "b"]
        for weight in weights:
            weight.grad = torch.ones(2)
            log.sums[id(weight)] = log.weighed[id(weight)] = torch.ones(2)


@pytest.mark.parametrize("many", [1, 2])
def test_what_is_thrown_away_belongs_to_no_step(many):
    log, rows = recorder()
    weight = torch.nn.Parameter(torch.ones(2))
    log.parameters[id(weight)] = weight
    for _ in range(many):
        backward(log, [weight])
        rows.on_zeroed([weight])
    backward(log, [weight])
    rows.on_gradients(torch.optim.SGD([weight]))
    record, = log.record.steps
    assert record["rows"] == ["a", "b"] and record["losses"] == [1.5]
    assert log.record.discarded_steps == [0] * many


def test_what_is_taken_elsewhere_before_is_not_thrown_away():
    """As by a script that adds up its microbatches itself."""
    log, rows = recorder()
    weight = torch.nn.Parameter(torch.ones(2))
    log.parameters[id(weight)] = weight
    for _ in range(3):
        backward(log, [weight])
        rows.on_zeroed([weight])
    weight.grad = torch.full((2,), 3.0)
    rows.on_gradients(torch.optim.SGD([weight]))
    record, = log.record.steps
    assert record["rows"] == ["a", "b"] * 3 and record["losses"] == [1.5] * 3
    assert record["sums"]["flat"].tolist() == [3, 3]
    assert not log.record.discarded_steps


def test_another_optimizers_gradients_stay():
    log, rows = recorder()
    one, two = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    log.parameters |= {id(one): one, id(two): two}
    backward(log, [one, two])
    rows.on_zeroed([two])
    rows.on_gradients(torch.optim.SGD([one]))
    record, = log.record.steps
    assert record["losses"] == [1.5] and not log.record.discarded_steps


def test_buffers_that_no_checkpoint_has_are_a_ranks_own():
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2))
    model[0].register_buffer("mine", torch.ones(1), persistent=False)
    assert [name for name, _ in persistent_buffers(model)] == [
        "0.running_mean", "0.running_var", "0.num_batches_tracked"]


def test_a_model_that_is_wrapped_is_not_to_be_wrapped(answers):
    found = answers(RIGHT, own_gradients)
    fix = found[synchronization.verify_reductions].fix_text
    assert "no_sync()" in fix and "model.module(" not in fix


def test_another_name_of_a_run_is_no_other_error():
    """With a CPU in a GPU's place it fails alike, but for {run} in a flag."""
    def start(planned):
        run = "run-1-gpus" if planned.gpus else "run-1"
        return RunRecord(Path("x.py"), [RankExit(
            2, "", f"x.py: error: what is {run}?")], records=[None],
            events=[[]])

    _, ended = Runs(start, 2, 4).of_first("single")
    assert ended.text.endswith("what is run-1?") and not ended.fix_text


def test_a_rate_that_falls_once_is_no_schedule(answers):
    """Of step 3, one process that had made twice as many tells nothing."""
    found = answers(RIGHT, on_all(step=3, rates=[0.05]))
    finding = found[samples.verify_samples]
    assert finding.kind == "learning-rate" and "rate" not in finding.numbers


@pytest.mark.parametrize(("change", "named"), [
    (on_all(step=1, rates=[0.05]), True),
    (on_all(step=3, rates=[0.05]), False),
    (on(1, step=1, rates=[0.05]), True)])
def test_weights_that_differ_as_a_later_rate_does(change, named, answers):
    """As with a schedule that counts the samples of its own rank."""
    found = answers(RIGHT, together(
        change, on_all(step=2, weights=times(1.1))))
    finding = found[single_process.verify_single_process]
    assert finding.kind == "weights-differ" and finding.numbers["step"] == 2
    rate = "in step 1 the learning rate is 0.05, not 0.1 as with 1 process"
    assert (rate in finding.fix_text) == named
    assert ("clipping" in finding.fix_text) != named


def test_a_rate_of_0_is_one_schedule_of_all_ranks(answers):
    finding = answers(RIGHT, on_all(rates=[0.0]))[samples.verify_samples]
    assert finding.kind == "learning-rate" and finding.numbers["rate"] == 0


def test_what_is_right_is_not_refused(answers):
    """Nor what is read twice by chance: samples are drawn at random."""
    assert set(answers(RIGHT, lambda runs: None)) == {DRAWN}
    # nor parameters of an optimizer that no rank has come to, if they failed
    def first_is_gone(shapes):
        return dict([*shapes.items()][1:])

    fewer = [seen(rank, shapes=first_is_gone, model=first_is_gone,
                  fingerprints=first_is_gone) for rank in (0, 1)]
    for change, split in ((fewer, True), ([*fewer, fails_together], False)):
        found = answers(RIGHT, together(*change)).values()
        sharded = read_expected("warn hand-sharded-parameters parameters=1")
        assert split == sharded.is_in(found), found
    # a part that another rank has is no copy
    assert side_effects.verify_copies not in answers(RIGHT,
                                                     together(*fewer, copied))
    found = answers(MORE, shared(1)).values()
    assert {finding.verdict for finding in found} == {"warn"}
    assert read_expected("warn shared-samples shared=4 samples=256").is_in(
        found)
    # of samples that are alike, a gradient may be nothing but rounding
    found = answers(RIGHT, together(one_sample, on_all(
        gradients=times(2.0), local=times(2.0)))).values()
    assert {finding.verdict for finding in found} == {"warn"}


@pytest.mark.parametrize(("change", "finds"), [
    # each rank has its part of the loss, as with a sequence that is divided
    (shared(16), "warn same-samples"),
    (together(on(1, step=0, before=times(1.5), gradients=times(1.5)),
              seen(1, fingerprints=others_of),
              lambda runs: runs[2, ""].events[0].append(
                  {"call": "alltoall_base"})),
     "warn hand-sharded-parameters parameters=4"),  # experts
    (on_all(gradients=times(2.0), rates=[0.05]),
     "warn summed-gradients step=0")])
def test_what_is_done_in_another_way_is_not_refused(answers, change, finds):
    found = answers(RIGHT, change).values()
    assert {finding.verdict for finding in found} == {"warn"}
    assert read_expected(finds).is_in(found), found


def test_a_loss_that_follows_from_weights_that_differ(answers):
    """Those of one rank are others after the step before."""
    found = answers(RIGHT, together(
        on(1, step=0, weights=times(1.1)),
        on_all(step=1, losses=lambda losses: [2 * losses[0]])))
    finding = found[single_process.verify_single_process]
    assert read_expected("FAIL losses-differ step=1").matches(finding)
    assert "0" in finding.fix_text and "weights" in finding.fix_text


@pytest.mark.parametrize(("step", "verdict"), [(0, None), (2, "FAIL")])
def test_a_sum_that_is_one_processs_gradient_is_right(
        answers, step, verdict):
    """Each rank's loss is a sum over its samples, divided by all of them."""
    halves = {"local": times(0.5), "sums": times(0.5)}
    wrong = {"gradients": times(1.1), "local": times(0.55),
             "sums": times(0.55)}
    changes = [on_all(step=number, **halves) for number in range(4)]
    if verdict:
        changes[step] = on_all(step=step, **wrong)
    found = answers(RIGHT, together(*changes)).get(
        synchronization.verify_mean_of_ranks)
    assert (found and found.verdict) == verdict, found
    assert not found or found.numbers["step"] == step


def test_gradients_that_a_script_has_reduced_before_its_copies_get_them(
        answers):
    """Of an optimizer's own weights no backward pass is seen."""
    nothing = {"plain": [], "flat": torch.zeros(0), "sharded": {}}
    found = answers(RIGHT, on_all(reduced=0, sums=nothing, local=nothing))
    assert set(found) == {DRAWN}


def test_a_CPU_compresses_gradients_too(monkeypatch):
    for owner, name in ((DDP, "_check_comm_hook"), (SyncBatchNorm, "forward"),
                        (DDP, "_passing_sync_batchnorm_handle"),
                        (functional, "batch_norm")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    watch_batchnorm(recorder()[0])
    DDP._check_comm_hook(None, bf16_compress_hook)


def test_unused_parameters_of_which_DDP_was_told(answers):
    found = answers(RIGHT, together(
        on(1, step=1, without=["Sequential:3.bias"]),
        seen(1, facts=instead("DistributedDataParallel", True))))
    assert synchronization.verify_unused_parameters not in found


def of_few(runs):
    """Each step reads the samples of the first, with one process, too."""
    for run in runs.values():
        for of_rank in run.records:
            first, *later = of_rank.steps
            for record in later:
                record |= {kind: first[kind] for kind in ("rows", "columns")}


STREAM = seen(0, facts=lambda log: [*log, ("stream with workers", 2)])


@pytest.mark.parametrize(("change", "warns"), [
    (of_few, False), (together(of_few, STREAM), True), (STREAM, False)])
def test_samples_that_one_process_reads_again_as_well(answers, change, warns):
    """The dataset is that small; or each worker of a loader reads all."""
    found = answers(RIGHT, change)
    again = [one for one in found.values()
             if one.kind == "repeated-samples"]
    assert [one.verdict for one in again] == ["warn"] * warns
    assert all("get_worker_info" in one.fix_text for one in again)


class Synchronised(torch.nn.BatchNorm1d):
    """As scripts write it: the mean over all ranks."""

    def forward(self, x):
        mean = x.mean(0)
        torch.distributed.all_reduce(mean)
        return x - mean


class InFloat(torch.nn.BatchNorm1d):
    """As scripts write it for bf16: the statistics are of this process."""

    def forward(self, x):
        return super().forward(x.float())


class Averaged(torch.nn.BatchNorm1d):
    """It normalises by what the ranks have averaged before."""

    def forward(self, x):
        return functional.batch_norm(x, self.running_mean, self.running_var)


@pytest.fixture
def alone():
    """A process group of this process."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("layer", "own"), [
    (torch.nn.BatchNorm1d(2), True), (torch.nn.BatchNorm1d(2).eval(), False),
    (torch.nn.Linear(2, 2), False), (InFloat(2), True),
    (InFloat(2).eval(), False), (Averaged(2), False),
    (Synchronised(2), False), (SyncBatchNorm(2), False),
    (torch.nn.Sequential(SyncBatchNorm(2), InFloat(2)), True)])
def test_statistics_of_one_process(
        monkeypatch, alone, layer, own):
    for owner, name in ((DDP, "_check_comm_hook"), (SyncBatchNorm, "forward"),
                        (DDP, "_passing_sync_batchnorm_handle"),
                        (functional, "batch_norm")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    log, _ = recorder()
    watch_batchnorm(log)
    with torch.no_grad():
        layer(torch.randn(4, 2))
    assert not log.record.batchnorm  # it does not train
    layer(torch.randn(4, 2))
    assert log.record.batchnorm == own


@pytest.mark.parametrize(("stream", "workers"), [
    (True, 2), (True, 1), (False, 2)])
def test_workers_that_iterate_over_a_stream(monkeypatch, stream, workers):
    class Stream(IterableDataset):
        def __iter__(self):
            yield from range(4)

    log, _ = recorder()
    monkeypatch.setattr(DataLoader, "__iter__", DataLoader.__iter__)
    watch_streams(log)
    read = [*DataLoader(Stream() if stream else range(4), None,
                        num_workers=workers)]
    several = stream and workers > 1
    assert sorted(read) == sorted([*range(4)] * (1 + several))
    assert log.record.facts == [("stream with workers", 2)] * several


@pytest.mark.parametrize(("error", "refused"), [
    ("error: this is for a single node", True),
    ("error: no GPU 1 among the nodes' own", False),
    ('  File "{script}", line 8, in <module>\nAssertionError', False),
    ('  File "{script}", line 2, in <module>\nAssertionError', True)])
def test_a_script_that_refuses_several_nodes(
        recorded, error, refused, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import os\nassert os.environ['GROUP_RANK'] == '0'\n")
    runs = recorded(RIGHT)
    runs[2, "nodes"].script = runs[2, ""].script = script
    runs[2, "nodes"].ranks = [RankExit(1, "", error.format(script=script))] * 2
    answers = questions.ask_questions(Runs(
        lambda planned: runs[planned.size, planned.kind], 2, 4))
    assert refused == any("several nodes: the script refuses them" in text
                          for text in answers.not_checked)
    assert refused != any(finding.verdict == "FAIL"
                          for finding in answers.findings)


def test_all_ranks_may_see_one_gpu_alone(answers, recorded):
    change = together(seen(0, devices=[0]), seen(1, devices=[0]))
    assert set(answers(RIGHT, change)) == {DRAWN}
    runs = recorded(RIGHT)
    change(runs)
    made = questions.ask_questions(Runs(
        lambda planned: runs[planned.size, planned.kind], 2, 4))
    assert any("all use GPU 0" in text for text in made.not_checked)


@pytest.mark.parametrize(("runs", "says"), [
    (Runs(None, 3, 4), "-n 2 or another even number"),
    (Runs(None, 2, 4, "gpu"), "without --device gpu")])
def test_why_two_nodes_are_not_tried(recorded, runs, says):
    watched = recorded(RIGHT)
    together = watched[2, ""]
    together.records *= 2
    del together.records[runs.size:]
    case = Comparison(runs, watched[1, ""], together)
    assert says in questions.nodes.why_not(case)


def test_samples_that_one_process_does_not_show(answers):
    """With what is not seen, nothing is compared."""
    def hides(runs):
        for record in runs[1, ""].records[0].steps:
            record.update(rows=[], columns=[])

    assert samples.verify_samples not in answers(RIGHT, hides)


def test_a_factor_of_one_is_none(answers):
    found = answers(RIGHT, on_all(step=0, gradients=times(1.002)))
    finding = found[single_process.verify_single_process]
    assert finding.kind == "gradients-differ" and "0.2%" in finding.text


def recorder():
    """A process's `Log` that nothing is written to, and its `Rows`."""
    log = Log(None, 0)
    rows = Rows(log, 2, 4, "")
    return log, rows


def test_a_decorators_wrapper_is_not_what_a_line_calls():
    log, _ = recorder()
    log.script = __file__
    place, *_ = torch.compiler.disable(log.place)()
    assert place[2] == ""


@pytest.fixture
def watched(monkeypatch):
    """A process's `Log`, with the probe that sees its modules."""
    for owner, name in ((torch.nn.Module, "__call__"),
                        (torch.autograd, "backward")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    log, _ = recorder()
    Modules()(log)
    return log


def pass_within(x):
    """A backward pass of x, and within it one of another scalar."""
    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.sum()

        @staticmethod
        def backward(ctx, gradient):
            inner = torch.ones((), requires_grad=True)
            with torch.enable_grad():
                (5 * inner).backward()
            return gradient.expand(2)

    Nested.apply(x).backward()


@pytest.mark.parametrize(("run", "losses"), [
    (lambda x: x.sum().backward(), [3.0]),
    (lambda x: torch.autograd.backward(x.sum()), [3.0]),
    (lambda x: torch.autograd.backward(tensors=[x.sum(), x.prod()]), [5.0]),
    (lambda x: torch.autograd.backward(y for y in (x.sum(), x[0])), [4.0]),
    (lambda x: x.backward(torch.ones(2)), []),  # of a pipeline's stage
    (lambda x: torch.autograd.backward(get_gradient_edge(x.sum())), []),
    (lambda x: torch.autograd.backward(  # of a stage with a loss of its own
        [x.sum(), 2 * x], [None, torch.ones(2)]), [3.0]),
    (lambda x: torch.autograd.backward(  # and a sum that it has sent on
        [x.prod(), x.sum()], grad_tensors=[None, torch.ones(())]), [2.0]),
    (pass_within, [3.0])])
def test_which_losses_of_backward_passes_are_seen(run, losses, watched):
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    run(x)
    assert watched.row.losses == losses and x.grad is not None


class Stage(torch.nn.Module):
    """A part of a model, whose forward() may be called directly."""

    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)

    def forward(self, x, *, scale=None, **others):
        x = self.first(x)
        return self.last(x if scale is None else scale * x)


@pytest.mark.parametrize("forward", [
    lambda model, x: model(x, scale=x),
    lambda model, x: model.forward(x, scale=x),
    lambda model, x: model.forward(x=x, scale=x, other=None)])
def test_a_direct_call_of_forward_is_one_of_the_module(forward, watched):
    """Its samples are the module's, once for each call."""
    model, x = Stage(), torch.randn(4, 3)
    for _ in range(2):
        forward(model, x)
    (rows, _), again = watched.notes.pending
    assert len(rows) == 4 and again[0] == rows
    assert {name.partition(":")[0]
            for name in watched.names.values()} == {"Stage"}
    assert rows == hash_each([x, x], 0)
    forward(model, x).sum().backward()
    assert watched.row.counts == [12] and not watched.inside


def read_rows(use):
    """What `use(model, x, y)` lets a model be given, as its rows' hashes."""
    log, _ = recorder()
    probe = Modules()
    probe.log, probe.record = log, log.record
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 1)
    model.register_forward_pre_hook(
        lambda *given: Modules.on_root(probe, *given))
    use(model, torch.randn(4, 3), torch.randn(4, 1))
    return [rows for rows, _ in log.notes.pending]


def test_samples_within_a_transform():
    """torch.func's tensors stand for others."""
    def loss(weights, model, x, y):
        return torch.nn.functional.mse_loss(
            functional_call(model, weights, x), y)

    def gradient(model, x, y):
        grad(loss)(dict(model.named_parameters()), model, x, y)

    def of_each(model, x, y):
        vmap(grad(loss), (None, None, 0, 0))(
            dict(model.named_parameters()), model, x, y)

    plain = read_rows(lambda model, x, y: model(x))
    assert len(plain[0]) == 4
    assert read_rows(gradient) == read_rows(of_each) == plain


def test_targets_within_a_transform(monkeypatch):
    """Those of each sample are counted, where a transform maps over them."""
    log, _ = recorder()
    for name in "cross_entropy", "nll_loss":
        monkeypatch.setattr(functional, name, getattr(functional, name))
    watch_targets(log)
    x, y = torch.randn(4, 3), torch.tensor([0, 2, -100, 1])

    def loss(weights, x, y):
        return functional.cross_entropy((x @ weights)[None], y[None])

    vmap(grad(loss), (None, 0, 0))(torch.ones(3, 3), x, y)
    assert log.notes.targets == 3


def test_what_tells_a_stage_of_its_shapes_is_no_sample():
    """A PipelineStage calls its module with an empty tensor at first."""
    probe, (received, model) = Modules(), (torch.ones(4, 3),
                                           torch.nn.Linear(3, 1))
    probe.log, _ = recorder()
    probe.record = probe.log.record
    for x in torch.empty(4, 3), received:
        probe.log.notes.received = [received]
        probe.on_root(model, x)
    assert not probe.log.notes.pending


def test_a_gradient_that_the_scripts_hook_has_used_up():
    probe = Modules()
    probe.log, _ = recorder()
    weight = torch.nn.Parameter(torch.ones(2))
    weight.register_post_accumulate_grad_hook(
        lambda weight: setattr(weight, "grad", None))
    weight.register_post_accumulate_grad_hook(
        functools.partial(Modules.on_gradient, probe))
    weight.sum().backward()
    assert not probe.log.local


@pytest.mark.parametrize("before", [None, torch.zeros(1, 3)])
def test_what_the_scripts_hook_reduces_is_a_gradient(before):
    """It was registered first, and gets what this rank has computed later."""
    probe, model = Modules(), torch.nn.Linear(3, 1, bias=False)
    probe.count = 1
    (probe.log, rows), probe.classes = recorder(), collections.Counter()
    probe.record = RankRecord()
    probe.log.modules, model.weight.grad = {}, before

    def reduce(gradient):
        rows.on_message("allreduce", [gradient / 2])
        return 0 * gradient

    model.weight.register_hook(reduce)
    probe.meet(model)
    model(torch.arange(3.0)).backward()
    assert probe.log.sums[id(model.weight)].tolist() == [0, 1, 2]
    assert probe.log.row.reduced == 3


def test_sparse_gradients_are_counted():
    """The bytes that are sent, and all elements of the parameters."""
    log, rows = recorder()
    one = torch.sparse_coo_tensor(
        [[7]], torch.ones(1, 5), (100, 5), check_invariants=True)
    rows.on_message("allreduce", [one, torch.ones(2)])
    assert (log.row.reduced, log.row.bytes) == (502, 8 + 5 * 4 + 2 * 4)


@pytest.mark.parametrize(("message", "counts"), [
    (lambda one, two: one / 2, True), (lambda one, two: -one, False),
    (lambda one, two: torch.cat([two, one]), True),
    (lambda one, two: torch.ones(9), False), (lambda one, two: two, True),
    (lambda one, two: one.bfloat16(), True)])
def test_a_reduction_counts_if_it_carries_a_gradient(message, counts):
    log, rows = recorder()
    one, two = torch.linspace(-3, 2, 7), torch.tensor([0.5])
    for part in one, two:
        weight = torch.nn.Parameter(torch.zeros_like(part))
        log.parameters[id(weight)], log.sums[id(weight)] = weight, part
    rows.on_message("allreduce", [message(one, two)])
    assert bool(log.row.reduced) == counts


@pytest.mark.parametrize("shown", [True, False])
def test_what_is_reduced_before_backward_is_no_gradient(shown):
    """As the statistics of a codebook; unless torch.func computes them."""
    log, rows = recorder()
    rows.on_message("allreduce", [torch.ones(5)])
    assert not log.row.reduced
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    log.parameters[id(weight)] = weight
    log.sums = {id(weight): weight.grad} if shown else {}
    log.notes.unclipped[id(weight)] = weight.grad  # only then
    rows.on_gradients(torch.optim.SGD([weight]))
    record, = log.record.steps
    assert (record["reduced"], record["late"]) == (0 if shown else 5, 0)


@pytest.mark.parametrize(("message", "counts"), [
    (torch.zeros(9), True), (torch.ones(9), False), (torch.zeros(5), False)])
def test_gradients_that_are_all_0_are_carried_as_0(message, counts):
    log, rows = recorder()
    weight = torch.nn.Parameter(torch.ones(7))
    log.parameters[id(weight)], log.sums[id(weight)] = weight, 0 * weight
    rows.on_message("allreduce", [message])
    assert bool(log.row.reduced) == counts


def test_what_is_clipped_is_kept_as_it_was(monkeypatch):
    """Also where no module has shown that it is a parameter."""
    for place in (torch.nn.utils, clip_grad):
        for name in ("clip_grad_norm_", "clip_grad_value_",
                     "clip_grads_with_norm_"):
            monkeypatch.setattr(
                place, name, getattr(torch.nn.utils, name), raising=False)
    log, _ = recorder()
    watch_clipping(log)
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.full((1,), 4.0)
    torch.nn.utils.clip_grad_value_(iter([weight]), 2.0)
    torch.nn.utils.clip_grad_value_(weight, 1.0)
    assert (log.notes.unclipped[id(weight)], weight.grad) == (4, 1)


@pytest.mark.parametrize("change", [
    on_all(step=3, calls=0),
    together(*(on_all(step=step, optimizer=step % 2, reduced=(
        lambda number, step=step: 2 * (1 - step % 2) * number))
        for step in range(4)))])
def test_an_optimizer_that_reduces_nothing_more(recorded, change):
    """As the second of two, after which a backward pass comes anew."""
    runs = recorded(RIGHT)
    change(runs)
    found = questions.synchronization.verify_reductions(
        Comparison(None, runs[1, ""], runs[2, ""]))
    assert read_expected("ok reduced times=1").matches(found[0])


def test_what_is_gathered_or_sent_is_no_reduction(recorded):
    runs = recorded(RIGHT)
    on_all(reduced=0)(runs)
    found, = questions.synchronization.verify_reductions(
        Comparison(None, runs[1, ""], runs[2, ""]))
    assert found.kind == "reduced-by-script"


def test_a_sharded_parameter_has_no_gradient_before_it_is_reduced(recorded):
    """However it was sent: the script did nothing of its own."""
    runs = recorded(RIGHT)
    together(on_all(reduced=0, gradients=sharded),
             seen(0, facts=lambda log: [*log, ("fully_shard", True)]))(runs)
    found, = questions.synchronization.verify_reductions(
        Comparison(None, runs[1, ""], runs[2, ""]))
    assert found.kind == "reduced-by-fsdp"


def test_each_question_is_answered_with_a_no():
    asked = {DRAWN, resume.verify_resume,
             *(question for *_, question, _ in CASES)}
    assert asked == {question.find for question in QUESTIONS}
