"""What each process holds of the model, and that the lessons say just that.

Where a lesson says what the reader has now, it may say who holds the model.
Each such sentence is in `CLAIMS`, with the measurement that it needs.
"""

from __future__ import annotations

import functools
import gc
import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import train_gpt2_std as std
from stages import train
from torch.distributed.fsdp._fully_shard import _fsdp_init
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import style
from torch.nn.modules.module import register_module_forward_pre_hook

from backstage.flops import num_parameters, padded_vocab_size
from rankcheck.record import recorder
from rankcheck.record.rank_record import RankRecord
from slides.text import cells
from workshop.results.arithmetic import FP32

CONFIG = replace(std.MODELS["tiny"], block_size=32, vocab_size=257)
MODEL = FP32 * num_parameters(CONFIG)
EMBEDDING = FP32 * padded_vocab_size(CONFIG.vocab_size) * CONFIG.n_embd
TIED = "lm_head.weight"  # the other name of the embedding
SCALARS = 64  # bytes, at most, of what is there besides: the sum of the losses


@dataclass
class Held:
    """What one process holds, in bytes of fp32 numbers."""

    made: int = 0  # at most, until the last weight has its first values
    kept: int = 0  # when the first microbatch comes
    largest_piece: int = 0  # what goes to the device at once
    whole: tuple[str, ...] = ()  # the matrices of which it keeps all
    saved: int = 0  # what it writes into a checkpoint

    @property
    def on_device(self) -> int:
        """At most, while the model is made, and until it trains."""
        return self.kept + self.largest_piece


@dataclass
class MemoryRecord(RankRecord):
    """A rank's record with the fields of what it holds."""

    held: dict[str, Any] = field(default_factory=dict)


def held_bytes() -> int:
    """The bytes of all fp32 tensors of this process, each storage once."""
    storages = {}
    for thing in gc.get_objects():
        # by its type: some objects answer isinstance() with an import
        if not issubclass(type(thing), torch.Tensor):
            continue
        if type(thing) is DTensor or thing.dtype != torch.float32:
            continue  # the part that a DTensor has is a tensor, too
        storage = thing.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def watch_memory(log: recorder.Log) -> None:
    """A probe: fills in what the process holds.

    On a CPU the device's memory is the host's, so nothing moves: noted is
    what FSDP and tensor parallelism would move, before they drop all of it
    but the rank's part.
    """
    held = Held()

    @recorder.replace(torch.nn.init, "normal_")
    def normal_(normal_, *args, **kwargs):
        filled = normal_(*args, **kwargs)
        held.made = max(held.made, held_bytes())
        return filled

    @recorder.replace(_fsdp_init, "_move_states_to_device")
    def move(move, params, *args):
        # tensor parallelism has made DTensors of its own, there already
        piece = sum(weight.nbytes for weight in params
                    if type(weight) is not DTensor)
        held.largest_piece = max(held.largest_piece, piece)
        return move(params, *args)

    @recorder.replace(style, "distribute_tensor")
    def distribute(distribute, tensor, *args, **kwargs):
        held.largest_piece = max(held.largest_piece, tensor.nbytes)
        return distribute(tensor, *args, **kwargs)

    @recorder.replace(torch, "save")
    def save(save, content, *args, **kwargs):
        if isinstance(content, dict) and "model" in content:  # a checkpoint
            held.saved = sum(weight.nbytes for name, weight
                             in content["model"].items() if name != TIED)
        return save(content, *args, **kwargs)

    def first_microbatch(module, inputs):
        hook.remove()
        gc.collect()
        held.kept = held_bytes()
        held.whole = tuple(
            name for name, weight in module.named_parameters()
            if weight.dim() == 2 and local(weight).shape == weight.shape)

    hook = register_module_forward_pre_hook(first_microbatch)

    def keep() -> None:
        log.record.held = asdict(held)

    log.on("end", keep)


def local(weight: torch.Tensor) -> torch.Tensor:
    """What this process has of a weight."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


@dataclass(frozen=True)
class Case:
    """A run of a stage. mesh: (pipeline, data, tensor) parallel."""

    stage: str
    mesh: tuple[int, int, int]
    flags: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        return math.prod(self.mesh)


@dataclass(frozen=True)
class Claim:
    """A sentence of a lesson, and what it says of a process."""

    lesson: str
    sentence: str
    cases: tuple[Case, ...]
    is_true: Callable[[Held, Case], bool]


def keeps_all(held: Held, case: Case) -> bool:
    return MODEL <= held.kept < MODEL + SCALARS


def keeps_its_share(held: Held, case: Case) -> bool:
    share = MODEL // case.size
    return share <= held.kept < share + SCALARS


def makes_all_in_host_memory(held: Held, case: Case) -> bool:
    return held.made == MODEL


def never_whole_on_device(held: Held, case: Case) -> bool:
    return 0 < held.largest_piece and held.on_device < MODEL


DDP, FSDP = Case("ddp", (1, 2, 1)), Case("fsdp", (1, 2, 1))
LIT, FSDP2 = Case("lit", (1, 2, 1)), Case(
    "lit", (1, 2, 1), ("--strategy", "fsdp2"))
TP, TP_FSDP = Case("tp", (1, 1, 2)), Case("tp", (1, 2, 2))
CUT, ALL_THREE = Case("3d", (2, 1, 1)), Case("3d", (2, 2, 2))
HEADINGS = {"diff_lit": "Change the strategy in a word"}  # else WHAT_THERE_IS
WHAT_THERE_IS = "What you have now"
# A sentence with one of these words says who holds what.
HOLDS = re.compile(r"\b(holds?|keeps?|whole|memory|host)\b")

CLAIMS = (
    Claim("diff_ddp", "Each process makes the whole model, and keeps it.",
          (DDP,), lambda held, case: keeps_all(held, case)
          and makes_all_in_host_memory(held, case)),
    Claim("diff_lit", "With DDP every GPU keeps all parameters, their "
          "gradients and the *moments*, AdamW's two averages of the "
          "gradients.", (LIT,), keeps_all),
    Claim("diff_lit", "Other strategies keep only a *shard* of some of them, "
          "and send the rest when it is needed.", (FSDP2,), keeps_its_share),
    Claim("diff_fsdp", "No device holds the whole model at any time; each "
          "process has it in the host's memory while it is made.", (FSDP,),
          lambda held, case: keeps_its_share(held, case)
          and never_whole_on_device(held, case)
          and makes_all_in_host_memory(held, case)),
    Claim("diff_tp", "While the model is made, a device has one matrix at a "
          "time whole, and the host's memory has all of them.",
          (TP, TP_FSDP), lambda held, case: held.largest_piece == EMBEDDING
          and makes_all_in_host_memory(held, case)),
    Claim("diff_tp", "Afterwards no matrix is whole but that of the "
          "positions, which only FSDP divides.",
          (TP, TP_FSDP), lambda held, case: held.whole == (
              () if case is TP_FSDP else ("transformer.wpe.weight",))),
    Claim("diff_3d", "You have a script for models that are larger than a "
          "node's devices: none holds the whole model, while it is made or "
          "trained.", (CUT, ALL_THREE), never_whole_on_device),
    Claim("diff_3d", "Each process makes all of it in the host's memory, and "
          "rank 0 puts a checkpoint together there.", (CUT, ALL_THREE),
          lambda held, case: makes_all_in_host_memory(held, case)),
)


@pytest.fixture(scope="module")
def measure(data: Path, tmp_path_factory: pytest.TempPathFactory
            ) -> Callable[[Case], list[Held]]:
    """What each process of a run holds."""
    @functools.lru_cache
    def run(case: Case) -> list[Held]:
        folder = tmp_path_factory.mktemp("held")
        (folder / "seen").mkdir()
        train(case.stage, folder / "run", "--max-steps", 1,
              "--microbatch-size", 1, "--eval-minibatches", 1, *case.flags,
              data=data, mesh=case.mesh, log=folder / "seen",
              probes=[watch_memory], record=MemoryRecord)
        records = [MemoryRecord.read_from(folder / "seen", rank)
                   for rank in range(case.size)]
        return [Held(**record.held) for record in records]
    return run


@pytest.mark.whole
@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.sentence)
def test_what_a_lesson_says_of_memory_was_measured(claim, measure):
    assert claim.sentence in sentences(claim.lesson)
    for case in claim.cases:
        for rank, held in enumerate(measure(case)):
            assert claim.is_true(held, case), (rank, held)


@pytest.mark.whole
@pytest.mark.parametrize("case", [DDP, FSDP, LIT, ALL_THREE], ids=str)
def test_rank_0_alone_has_the_whole_model_to_save(case, measure):
    """Also where it has to be put together."""
    saved = [held.saved for held in measure(case)]
    assert saved == [MODEL] + [0] * (case.size - 1)


@pytest.mark.parametrize("lesson", [
    f"diff_{stage}" for stage in ("ddp", "lit", "fsdp", "tp", "3d")])
def test_no_sentence_about_memory_is_left_out(lesson):
    known = {claim.sentence for claim in CLAIMS if claim.lesson == lesson}
    assert known == set(filter(HOLDS.search, sentences(lesson)))


def sentences(lesson: str) -> list[str]:
    """The sentences of the section that says what the reader has now."""
    heading = HEADINGS.get(lesson, WHAT_THERE_IS)
    _, text = "\n\n".join(cells(lesson)).split(f"## {heading}\n", 1)
    text = re.split(r"^(?:## |\*\*|from lesson|<details>|- \*\*)", text,
                    maxsplit=1, flags=re.MULTILINE)[0]
    return re.split(r"(?<=[.:])\s(?=[A-Z])", " ".join(text.split()))
