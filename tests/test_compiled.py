"""What torch.compile compiles: every block, in each stage that compiles.

A comparison of losses cannot see what is left out. Here a backend that counts
stands in the place of the compiler, so no test needs one.
"""

import json
from pathlib import Path

import pytest
from stages import train, with_layers

LAYERS = 12  # more than the 8 times that torch compiles a function again
PRODUCTS = 4  # of each block: c_attn, c_proj, c_fc, c_proj


class GraphsSeen:
    """Counts the graphs that are made, and the products that run in them."""

    def __init__(self, folder):
        self.folder = Path(folder)

    def __call__(self, rank):
        import torch
        from torch.optim.optimizer import (
            register_optimizer_step_post_hook as after_update,
        )

        from backstage import device

        seen = {"graphs": 0, "steps": [0]}
        compile_with = torch.compile

        def count(graph, inputs):
            products = sum(
                node.op == "call_function" and "linear" in str(node.target)
                for part in graph.modules()
                if isinstance(part, torch.fx.GraphModule)
                for node in part.graph.nodes)
            seen["graphs"] += 1

            def run(*inputs):
                seen["steps"][-1] += products
                return graph.forward(*inputs)

            return run

        def compile_and_count(*args, **options):
            return compile_with(*args, **options, backend=count)

        torch.compile = compile_and_count
        device.can_compile = lambda device: True
        after_update(lambda *_: seen["steps"].append(0))

        def finish():
            (self.folder / "seen.json").write_text(json.dumps(seen))

        return finish


def count_graphs(stage, data, folder, *flags):
    """What `GraphsSeen` saw in a run of 12 layers on one process."""
    result = train(
        stage, folder / "run", "--compile", "--minibatch-size", 4,
        "--microbatch-size", 2, "--max-steps", 2, "--eval-every", 2,
        "--eval-minibatches", 1, *flags, data=data,
        script=with_layers(LAYERS, stage, folder), observe=GraphsSeen(folder))
    assert result.status == 0, result.err
    return json.loads((folder / "seen.json").read_text())


BLOCKS, FSDP2 = {"fsdp", "tp", "3d"}, ("--strategy", "fsdp2")
slow = pytest.mark.whole


@pytest.mark.parametrize(("stage", "flags"), [
    ("std", ("--recompute",)), ("ddp", ()),
    ("fsdp", ()), ("fsdp", ("--recompute",)),
    ("tp", ("--recompute",)), ("3d", ()), ("lit", (*FSDP2, "--recompute")),
    *(pytest.param(*case, marks=slow) for case in (
        ("std", ()), ("ddp", ("--recompute",)), ("tp", ()),
        ("3d", ("--recompute",)), ("lit", ()), ("lit", ("--recompute",)),
        ("lit", FSDP2)))], ids=str)
def test_every_block_is_compiled_and_no_text(data, tmp_path, stage, flags):
    """Each step takes two microbatches; after the last come two more, the
    validation, and the texts, which get longer with each token."""
    seen = count_graphs(stage, data, tmp_path, *flags)
    of_blocks = LAYERS * PRODUCTS
    if stage in BLOCKS or "fsdp2" in flags:
        # one graph for all blocks, and one without gradients; what is
        # recomputed runs compiled, too
        assert seen["graphs"] == 2
        expected = of_blocks * (1 + ("--recompute" in flags))
    else:  # the whole model, with its head
        assert seen["graphs"] == (4 if stage == "lit" else 1)
        expected = of_blocks + 1
    assert seen["steps"][1] == 2 * expected
    assert seen["steps"][2] <= 3 * of_blocks  # a pipeline tries its shapes
