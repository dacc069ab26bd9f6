"""The FSDP stage: each rank holds a part, and what that costs is sent."""

import pytest
from conftest import edit
from stages import (
    CollectivesSeen,
    agree,
    agree_compiled,
    agree_in_bf16,
    train,
)

from workshop.processes import Launch
from workshop.stages import STAGES

FSDP = STAGES["fsdp"].solution
SYNC = (
    "            raw_model.set_requires_gradient_sync(is_last_microbatch)\n")


@pytest.fixture(scope="module")
def sizes(single):
    """(all parameters, those in blocks), each counted once."""
    weights = {name: weight.numel() for name, weight
               in single.checkpoint()["model"].items()
               if name != "lm_head.weight"}  # it is tied
    return (sum(weights.values()),
            sum(weights[name] for name in weights if ".h." in name))


# ------------------------------------------------ what a rank keeps


class ShardsSeen:
    """Says how many elements a rank keeps: of weights, gradients, moments."""

    def __call__(self, rank):
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(self.step)

    def step(self, optimizer, *_):
        weights = [weight for group in optimizer.param_groups
                   for weight in group["params"]]
        kept = {"weights": weights,
                "gradients": [weight.grad for weight in weights],
                **{name: [optimizer.state[weight][name] for weight in weights]
                   for name in ("exp_avg", "exp_avg_sq")}}
        print("kept:", {name: sum(one.to_local().numel() for one in tensors)
                        for name, tensors in kept.items()})


@pytest.mark.whole
def test_each_rank_keeps_a_part_of_everything(data, sizes, tmp_path):
    n = 4
    result = train("fsdp", tmp_path / "run", "--max-steps", 3, data=data,
                   world_size=n, observe=ShardsSeen())
    assert result.status == 0, result.err
    P, _ = sizes
    assert P % n == 0
    each = dict.fromkeys(("weights", "gradients", "exp_avg", "exp_avg_sq"),
                         P // n)
    kept = [line for line in result.out.splitlines() if "kept:" in line]
    assert kept == [f"kept: {each}"] * (3 * n)


# ------------------------------------------------ what a step sends


FLAGS = ("--preset", "tiny", "--device", "cpu", "--max-steps", 5)
SHARD = "fully_shard(module, mesh=mesh)"
KEEP = SHARD, "fully_shard(module, mesh=mesh, reshard_after_forward=False)"
KEEP_LONGER = SYNC, (
    SYNC + SYNC.replace("requires_gradient_sync", "reshard_after_backward"))
L = 4  # blocks of preset tiny


@pytest.mark.whole
@pytest.mark.parametrize(("changes", "gathers", "scatters"), [
    (((SYNC, ""),), lambda A: A * (2 * L + 1), lambda A: A * (L + 1)),
    ((KEEP,), lambda A: A * (L + 1), lambda A: L + 1),
    ((KEEP, KEEP_LONGER), lambda A: L + 1, lambda A: L + 1),
], ids=["no-sync", "zero-2", "zero-2-kept"])
def test_what_other_scripts_send(
        data, sizes, tmp_path, changes, gathers, scatters):
    """Bytes that go in, on each rank, by the formulas of the lesson.

    The norm is an all-reduce of one number for each parameter.
    """
    n = A = 2
    script = tmp_path / "train_gpt2.py"
    script.write_text(edit(FSDP.read_text(), *changes))
    ranks = Launch(
        script, *FLAGS, "--run", tmp_path / "run", "--data", data,
        "--microbatch-size", 8 // (n * A), world_size=n,
        observe=CollectivesSeen()).wait(120)
    P, P_b = sizes
    gathered = 4 * P // n * (gathers(A) // (L + 1))
    if gathers(A) == A * (2 * L + 1):  # blocks twice, the rest once
        gathered = 4 * A * (2 * P_b + (P - P_b)) // n
    expected = (
        f"sent:; all_reduce 1 {4 * (12 * L + 4)}; "
        f"allgather_base {gathers(A)} {gathered}; allreduce 1 8; "
        f"reduce_scatter_base {scatters(A)} {4 * P * scatters(A) // (L + 1)}")
    for rank in ranks:
        assert rank.status == 0, rank.err
        lines = [line for line in rank.out.splitlines() if "sent:" in line]
        assert lines[1:] == [expected] * 4  # before the first, the run begins


# ------------------------------------------------ the same training


@pytest.mark.whole
def test_in_bf16_it_is_the_single_device(data, tmp_path):
    """Autocast computes in bf16; weights and reductions stay in fp32."""
    agree_in_bf16("fsdp", tmp_path, data, 1e-4, 1e-2, world_size=4)


@pytest.mark.whole
def test_sizes_that_do_not_divide_evenly(data, tmp_path):
    """Three ranks: FSDP pads what they do not share evenly."""
    flags = ("--minibatch-size", 6, "--microbatch-size", 1, "--max-steps", 8)
    std = train("std", tmp_path / "std", *flags, data=data)
    agree(train("fsdp", tmp_path / "fsdp", *flags, data=data, world_size=3),
          std)


def test_rank_0_alone_cannot_save(data, tmp_path):
    """It would wait for the others' parts: they have gone on."""
    script = tmp_path / "train_gpt2.py"
    script.write_text(edit(FSDP.read_text(), (
        "if save:  # all ranks", "if rank == 0 and save:")))
    ranks = Launch(script, *FLAGS, "--run", tmp_path / "run", "--data", data,
                   world_size=2).wait(120)
    assert all(rank.status != 0 for rank in ranks)
    assert not list((tmp_path / "run" / "checkpoints").glob("*.pt"))


@pytest.mark.whole
def test_compiled(data, tmp_path):
    """The whole sharded model; its checkpoint knows nothing of it."""
    agree_compiled("fsdp", 2, tmp_path, data, world_size=2)
