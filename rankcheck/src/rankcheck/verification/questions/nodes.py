"""A question about several nodes, answered by a run as two nodes.

All processes are on this machine. The environment says otherwise: of N ranks,
each half has the local ranks from 0 on, as torchrun gives them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rankcheck.engine.exits import in_brackets
from rankcheck.engine.findings import (
    Finding,
    counted,
    fail,
    ok,
    percent,
    warn,
)
from rankcheck.engine.run_record import RunRecord
from rankcheck.record.tensors import put_together
from rankcheck.verification.comparison import (
    GRADIENT,
    Comparison,
    are_close,
    flat,
    off,
    question,
    samples_of,
)
from rankcheck.verification.questions.initial_state import SAME_START
from rankcheck.verification.questions.optimizers import (
    by_parameter,
    find_other_settings,
    format_values,
)
from rankcheck.verification.questions.records import (
    Opener,
    StepRecords,
    flatten,
    places_of,
    sampler_starts,
)
from rankcheck.verification.questions.single_process import LATER_GRADIENT
from rankcheck.verification.questions.vectors import are_parallel, ratio_of
from rankcheck.verification.runs import ON_TWO, compare_step_counts

NOT_YET = "not tried"

# Steps that are watched: one with the first weights, and one with what the
# first step has made of them.
WATCHED_STEPS = 2

# Share of a step's samples that may repeat beyond those on one node. Random
# draws repeat some by chance. A choice, not a measurement: of fewer than 20
# samples, a single repeat is reported.
CHANCE = 0.05

# Relative difference above which a step has another number of samples than
# on one node. A choice, not a measurement.
OTHER_NODE_SIZE = 0.1

# Folders that each node usually has for itself. A guess: a site may share one
# of them, or have local folders elsewhere.
LOCAL_FOLDERS = ("/tmp/", "/var/tmp/", "/dev/shm/", "/local/",
                 "/scratch/local/")
GLOBAL_RANKS = ("RANK and WORLD_SIZE are global, LOCAL_RANK and "
                "LOCAL_WORLD_SIZE are per node")


def why_not(case: Comparison) -> str:
    """Say why nothing is known of the script on two nodes, "" if it is."""
    if case.nodes is not None:
        return case.nodes
    if case.size % 2:
        return (f"not tested, because {case.size} processes are not two equal "
                "nodes; fix: use -n 2 or another even number")
    if case.runs.device == "gpu":
        return "tested on the CPU only, without --device gpu"
    if case.failed:
        return "tested only if nothing fails on one"
    if case.facts("join"):
        return "not tested, because ranks end at different times"
    if not case.steps:
        return "not tested, because no step was made by all ranks"
    return NOT_YET


@dataclass(frozen=True)
class TwoNodes:
    """The same ranks on one node and as two.

    Attributes:
        case: with the run on one node.
        run: the run as two.
    """

    case: Comparison
    run: RunRecord

    @cached_property
    def pairs(self) -> list[tuple[StepRecords, StepRecords]]:
        """What the ranks recorded as two nodes, and on one, by step."""
        records = zip(*self.case.view(self.run), strict=False)
        return list(zip(records, self.case.steps, strict=False))

    def node(self, rank: int) -> int:
        """Return the node of a rank: 0 or 1."""
        return rank * 2 // self.case.size


@dataclass(frozen=True)
class WrittenFile:
    """A file that ranks write, all of them opening it at the same place."""

    path: str
    opener: Opener
    ranks: list[int]


@question("each rank of a node uses its own GPU")
def verify_own_device(case: Comparison) -> list[Finding]:
    """Answer whether two ranks take the same GPU.

    It is seen where the script names one by number, as in "cuda:0".
    """
    if all_on_the_first(case):
        return []
    taken: dict[int, int] = {}  # number of a GPU -> the rank that takes it
    for rank, record in enumerate(case.multi_process_run.all_records):
        numbers = record.devices
        if len(numbers) != 1:
            continue
        other = taken.setdefault(numbers[0], rank)
        if other != rank:
            return [fail(f"ranks {other} and {rank} both use GPU "
                         f"{numbers[0]}", "select it by LOCAL_RANK: "
                         "torch.cuda.set_device(local_rank)",
                         ranks=[other, rank], numbers={"gpu": numbers[0]},
                         kind="shared-gpu")]
    return []


def all_on_the_first(case: Comparison) -> bool:
    """Return whether all take GPU 0.

    Each may see one alone, as srun can have it.
    """
    return all(record.devices == [0]
               for record in case.multi_process_run.all_records)


@question("the ranks train on two nodes as on one",
          where=lambda case: why_not(case) == NOT_YET)
def verify_two_nodes(case: Comparison) -> Iterator[Finding]:
    """Answer whether the ranks train as two nodes as they do on one."""
    run, ended = case.runs("nodes",
                           fewer=max(0, case.runs.steps - WATCHED_STEPS))
    if ended and run.gave_up == "waits":
        yield ended
        return
    if ended and refuses(ended, case.multi_process_run.script):
        yield ok("the script is for one node: " + ended.text,
                 learned={"nodes": "the script refuses them"},
                 kind="nodes-refused")
        return
    if not ended:
        uneven = compare_step_counts(run)
        if uneven:
            ended = uneven[0]
            ended.sentence.insert(0, f"{ON_TWO}, ")
    if ended:
        # that it trains with these flags is known: it does on one node
        if not ended.fix_text or ended.kind == "no-step":
            ended.fix = [
                "check what depends on the node: on one node it runs; "
                f"{GLOBAL_RANKS}"]
        ended.learned = {"nodes": ""}
        yield ended
        return
    both = TwoNodes(case, run)
    found = [*compare_samples(both), *compare_samplers(both),
             *compare_weights(both),
             *compare_settings(both)]
    if not found:
        found = compare_gradients(both)
    if not found:
        found = [ok(f"{ON_TWO} the ranks' weights and gradients are as "
                    "equal as on one, and no more samples are read twice, in "
                    f"{counted(both.pairs, 'step')}",
                    kind="nodes-equal")]
    found[0].learned = {"nodes": ""}
    yield from (*found, *compare_files(both), *compare_caches(both),
                *compare_devices(both))


def refuses(ended: Finding, script: Path) -> bool:
    """Return whether the script itself says that it is for one node.

    It does by the words of its error, or by an assertion about the number of
    nodes: a search for words, which an error about something else may have.
    """
    text = ended.text.removeprefix(f"{ON_TWO}, ")
    if "AssertionError" in text:
        lines = script.read_text(errors="replace").splitlines()
        text += " ".join(lines[line - 1] for line in ended.lines
                         if line <= len(lines))
    return bool(re.search(
        r"\b(single|one|multi(ple)?|several|two|1|2)[ -]?nodes?\b|"
        r"\bn_?nodes\b|\bGROUP_(WORLD_SIZE|RANK)\b", text, re.IGNORECASE))


def compare_samples(both: TwoNodes) -> list[Finding]:
    """Say whether more of them are read by several ranks, or others at all."""
    for step, pair in enumerate(both.pairs):
        two, one = samples_of(pair[0]), samples_of(pair[1])
        if not two or not one:
            continue
        twice = len(two) - len(set(two))
        twice_before = len(one) - len(set(one))
        if twice / len(two) > twice_before / len(one) + CHANCE:
            return [fail(
                f"{ON_TWO}, in step {step}, {twice} of {len(two)} samples "
                f"are read by several ranks (on one node: {twice_before})",
                f"divide the data by global numbers: {GLOBAL_RANKS}", numbers={
                    "shared": twice, "samples": len(two)},
                kind="nodes-shared-samples")]
        if abs(len(two) / len(one) - 1) > OTHER_NODE_SIZE:
            return [warn(
                f"{ON_TWO} the global batch size is {len(two)}, but on "
                f"one node {len(one)}", "derive the batch size and the "
                "accumulation from WORLD_SIZE, not LOCAL_WORLD_SIZE: "
                f"{GLOBAL_RANKS}",
                numbers={"samples": len(two), "single": len(one)},
                kind="nodes-batch-size")]
    return []


def compare_samplers(both: TwoNodes) -> list[Finding]:
    """Say whether they have other seeds, or take parts of other data."""
    for name, kind in ("seed", "seeds"), ("subset", "subsets of the data"):
        one = sampler_values(both.case.multi_process_run, both.case.size, name)
        two = sampler_values(both.run, both.case.size, name)
        if len(two) > 1 >= len(one):
            return [fail(
                f"{ON_TWO} the ranks' DistributedSamplers have different "
                f"{kind}, so together they do not read each sample once",
                f"check whether that depends on the node: {GLOBAL_RANKS}",
                kind="nodes-sampler")]
    return []


def sampler_values(run: RunRecord, size: int, name: str) -> set[object]:
    """Return what each rank's first DistributedSampler has recorded.

    Args:
        size: the number of ranks.
        name: of a field of `SamplerStart`.
    """
    firsts = flatten(sampler_starts(run, rank)[:1] for rank in range(size))
    return {getattr(start, name) for start in firsts}


def compare_weights(both: TwoNodes) -> list[Finding]:
    """Say whether the ranks have different ones, or different gradients."""
    for key, name, when in (("before", "weights", "before"),
                            ("gradients", "gradients", "in"),
                            ("weights", "weights", "after")):
        for step, (two, one) in enumerate(both.pairs):
            if not all(record.get(key) for record in two):
                continue
            whole = put_together(two, key)
            known = [record for record in one if record.get(key)]
            if whole.unequal and not put_together(known, key).unequal:
                rank = min(whole.differing)
                return [fail(
                    f"{ON_TWO}, {when} step {step}, the {name} of rank "
                    f"{rank} differ from rank 0's: "
                    f"{both.case.named(whole.unequal)}",
                    "look for code that depends on LOCAL_RANK where it "
                    f"should depend on RANK: {GLOBAL_RANKS}",
                    ranks=sorted(whole.differing), kind="nodes-unequal-ranks")]
    return []


def compare_settings(both: TwoNodes) -> list[Finding]:
    """Say whether the optimizers are told something else."""
    for step, (two, one) in enumerate(both.pairs):
        for record, expected in zip(two, one, strict=True):
            rates, good_rates = record["rates"], expected["rates"]
            if rates and good_rates and not are_close(rates[0], good_rates[0]):
                return [warn(
                    f"{ON_TWO} the learning rate is {rates[0]:.3g} in "
                    f"step {step}, but {good_rates[0]:.3g} on one node",
                    "check whether it depends on LOCAL_WORLD_SIZE: "
                    f"{GLOBAL_RANKS}",
                    kind="nodes-learning-rate")]
    one_node = both.case.multi_process_run.record_of(0)
    found = find_other_settings(by_parameter(both.run.record_of(0)),
                                by_parameter(one_node))
    for difference, names in found.items():
        return [warn(
            f"{ON_TWO} the {difference.setting} of "
            f"{both.case.named(names)} is {format_values(difference.value)}, "
            f"but {format_values(difference.other)} on one node",
            f"use the same settings: {GLOBAL_RANKS}",
            kind="nodes-optimizer-setting")]
    return []


def compare_gradients(both: TwoNodes) -> list[Finding]:
    """Say whether they are the same for the same weights and samples.

    Only where a single process and the ranks on one node agree: so nothing
    else is drawn at random.
    """
    case = both.case
    if case.skip_reason or case.hand_sharded or any(
            record.draws_random for record in both.run.all_records):
        return []
    pairs = both.pairs[:case.compared_steps]
    for step, (two, one) in enumerate(pairs):
        samples, of_one = samples_of(two), samples_of(one)
        if not samples or sorted(samples) != sorted(of_one):
            return []
        if step == 0 and not have_same_weights(two, one):
            return []
        on_two = put_together(two, "gradients").tensors
        on_one = put_together(one, "gradients").tensors
        keys = [key for key in on_one if key in on_two
                and on_two[key].shape == on_one[key].shape]
        if not keys:
            return []
        vector, expected = flat(on_two, keys), flat(on_one, keys)
        limit = GRADIENT * case.tolerance_factor
        if step:
            limit *= LATER_GRADIENT
        error = off(vector, expected)
        if not error <= limit:  # nan is not
            difference = f"differ by {percent(error)} from those on one node"
            numbers = {"error": error, "limit": limit}
            if are_parallel(vector, expected, limit):
                factor = ratio_of(vector, expected)
                difference = f"are {factor:.3g} times those on one node"
                numbers["factor"] = factor
            return [fail(
                f"{ON_TWO}, in step {step}, the gradients {difference}, "
                "for the same samples", "look for a factor, or a process "
                f"group, that depends on LOCAL_WORLD_SIZE: {GLOBAL_RANKS}",
                numbers=numbers,
                kind="nodes-gradients-differ")]
    return [ok(f"{ON_TWO} the gradients match those on one, in "
               f"{counted(pairs, 'step')}",
               numbers={"steps": len(pairs)},
               kind="nodes-gradients-match")]


def have_same_weights(two: StepRecords, one: StepRecords) -> bool:
    """Return whether the ranks have the same weights before a step."""
    known_two = [record for record in two if record["before"]]
    known_one = [record for record in one if record["before"]]
    error = put_together(known_two, "before").error(
        put_together(known_one, "before"))
    return error <= SAME_START  # neither nan nor infinity is


def compare_files(both: TwoNodes) -> Iterator[Finding]:
    """Yield a warning for the files of which each node has a writer.

    Only of openers that write as one rank on one node.
    """
    known = {file.opener for file in find_written(both.case.multi_process_run)
             if len(file.ranks) > 1}
    found: dict[Opener, list[WrittenFile]] = {}
    for file in find_written(both.run):
        nodes = {both.node(rank) for rank in file.ranks}
        if len(nodes) > 1 and file.opener not in known and not is_local(
                file.path, both.run):
            found.setdefault(file.opener, []).append(file)
    for opener, written in found.items():
        names = ", ".join(sorted({Path(file.path).name
                                  for file in written})[:3])
        ranks = " and ".join(map(str, written[0].ranks[:4]))
        text = f"{ON_TWO}, ranks {ranks} write the same {names}"
        if isinstance(opener, str):
            text = f"{opener}: {text}"
        finding = warn(
            text, "let one global rank write it (RANK 0, not LOCAL_RANK 0); "
            "fine if each node has its own folder", ranks=written[0].ranks,
            kind="nodes-shared-files")
        finding.sentence += in_brackets(places_of(opener))
        yield finding


def find_written(run: RunRecord) -> list[WrittenFile]:
    """Return the files that ranks write, one for each opener of each."""
    found: dict[tuple[Opener, str], list[int]] = {}
    for rank, record in enumerate(run.all_records):
        for path, opener in record.writers.items():
            found.setdefault((opener, path), []).append(rank)
    return [WrittenFile(path, opener, ranks)
            for (opener, path), ranks in found.items()]


def is_local(path: str, run: RunRecord) -> bool:
    """Return whether a file is where each node usually has its own."""
    if path.startswith(f"{run.copy}/"):
        return False
    temporary = f"{Path(run.copy).parent}/tmp-nodes/"
    return path.startswith((*LOCAL_FOLDERS, temporary))


def compare_caches(both: TwoNodes) -> list[Finding]:
    """Say whether a rank reads what the other node alone has written.

    Only of files in a folder that each node usually has for itself.
    """
    nodes: dict[str, set[int]] = {}  # by path: which have written it
    openers: dict[str, int] = {}
    for file in find_written(both.run):
        if isinstance(file.opener, int) and is_local(file.path, both.run):
            nodes.setdefault(file.path, set()).update(
                map(both.node, file.ranks))
            openers[file.path] = file.opener
    for rank, record in enumerate(both.run.all_records):
        for path in record.files_read:
            if path in nodes and both.node(rank) not in nodes[path]:
                return [reads_of_other_node(both.run, rank, path,
                                            openers[path])]
    return []


def reads_of_other_node(run: RunRecord, rank: int, path: str, opener: int
                        ) -> Finding:
    """Say that a rank reads what the other node alone has written."""
    place = Path(path)
    shown = str(place)
    if shown.startswith(f"{Path(run.copy).parent}/"):
        shown = f"{place.name} in the temporary folder"
    finding = warn(
        f"{ON_TWO}, rank {rank} reads {shown}, "
        "but only the other node has written it", "write it on each node "
        "(LOCAL_RANK 0), or where all nodes can read it", ranks=[rank],
        kind="nodes-local-file")
    finding.sentence += in_brackets(places_of(opener))
    return finding


def compare_devices(both: TwoNodes) -> list[Finding]:
    """Say whether a rank takes the number of a GPU that its node lacks.

    It is seen where a CPU stands in for GPUs: a node has one for each of its
    ranks. A real one may have more, where a larger number is no error.
    """
    count = both.case.size // 2
    for rank, record in enumerate(both.run.all_records):
        beyond = [number for number in record.devices if number >= count]
        if beyond:
            return [fail(
                f"{ON_TWO} with one GPU per rank, rank {rank} uses "
                f"GPU {beyond[0]}, but its node has "
                f"{counted(range(count), 'GPU')}",
                "select the GPU by LOCAL_RANK, not by RANK", ranks=[rank],
                numbers={"gpu": beyond[0]},
                kind="nodes-no-such-gpu")]
    return []
