"""The option that keeps the residual stream in bf16."""

import pytest
import torch
from stages import tiny, train

from workshop.notebook.sharding import std
from workshop.processes import launch
from workshop.stages import STAGES

BF16 = ("--precision", "bf16", "--max-steps", 5)


@pytest.fixture(scope="module")
def alone(data, tmp_path_factory):
    """Five steps of one device with the option."""
    run = tmp_path_factory.mktemp("alone") / "run"
    return train("std", run, *BF16, "--bf16-residual", data=data)


@pytest.mark.parametrize("autocast, expected", [
    (True, torch.bfloat16), (False, torch.float32)])
def test_blocks_add_to_bf16_in_autocast_only(autocast, expected):
    model = std.GPT(std.GPTConfig(8, 100, 2, 2, 16))
    model.bf16_residual = True
    seen = []
    for block in model.transformer.h:
        block.register_forward_hook(
            lambda block, args, x: seen.append((args[0].dtype, x.dtype)))
    with torch.autocast("cpu", torch.bfloat16, autocast):
        logits = model(torch.arange(8)[None])
    assert seen == [(expected, expected)] * 2
    assert logits.dtype == torch.float32


def test_it_changes_losses_by_rounding_alone(data, tmp_path, alone):
    plain = train("std", tmp_path / "run", *BF16, data=data)
    assert alone.status == plain.status == 0, alone.err + plain.err
    assert alone.column("loss") != plain.column("loss")
    assert alone.column("loss") == pytest.approx(
        plain.column("loss"), rel=1e-3)


def say_dtypes(rank):
    """Prints at the end which dtypes have gone into the blocks."""
    seen = set()

    def see(module, args):
        if type(module).__name__.endswith("Block"):  # or FSDPBlock
            seen.add(args[0].dtype)

    torch.nn.modules.module.register_module_forward_pre_hook(see)
    return lambda: print("into blocks:", seen, flush=True)


@pytest.mark.whole
@pytest.mark.parametrize("stage, mesh", [("lit", (1, 2, 1)),
                                         ("3d", (2, 1, 2))], ids=str)
def test_every_stage_has_it(data, tmp_path, alone, stage, mesh):
    result = train(stage, tmp_path / "run", *BF16, "--bf16-residual",
                   data=data, mesh=mesh, observe=say_dtypes)
    assert result.status == 0, result.err
    for rank in result.ranks:  # the texts are written without autocast
        assert "torch.bfloat16" in rank.out.partition("into blocks:")[2]
    assert result.column("loss") == pytest.approx(
        alone.column("loss"), rel=1e-3)


def test_fp32_has_no_use_for_it(data, tmp_path):
    result = train("std", tmp_path / "run", "--bf16-residual", data=data)
    assert result.status == 1
    assert "--bf16-residual needs --precision bf16" in result.err


def test_a_script_from_before_the_flag_still_runs(data, tmp_path):
    lines = STAGES["std"].solution.read_text().splitlines(keepends=True)
    script = tmp_path / "train_gpt2.py"
    script.write_text("".join(
        line for line in lines if not line.strip().startswith((
            "bf16_residual:", "raw_model.bf16_residual ="))))
    rank, = launch(script, *tiny(tmp_path / "run", data, "--max-steps", 1))
    assert rank.status == 0, rank.err
