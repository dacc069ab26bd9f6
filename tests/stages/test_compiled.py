"""What torch.compile compiles: every product, in each stage that compiles.

A comparison of losses cannot see what is left out. Here a backend that counts
stands in the place of the compiler, so no test needs one. Like the compiler it
differentiates the graphs, and takes DTensors apart.
"""

import json
import os
from pathlib import Path

import pytest
from stages import agree, edited, train

from rankcheck.engine.ranks import launch

LAYERS = 9  # more than the 8 times that torch compiles a function again
PRODUCTS = 4  # of each block: c_attn, c_proj, c_fc, c_proj


class GraphsSeen:
    """Counts the graphs that are made, and the products that run in them."""

    def __init__(self, folder):
        self.folder = Path(folder)

    def __call__(self, log):
        import torch
        from torch._dynamo import lookup_backend
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
            differentiated = lookup_backend("aot_eager")(graph, inputs)

            def run(*inputs):
                seen["steps"][-1] += products
                return differentiated(*inputs)

            return run

        def compile_and_count(*args, **options):
            return compile_with(*args, **options, backend=count)

        torch.compile = compile_and_count
        device.can_compile = lambda device: True
        after_update(lambda *_: seen["steps"].append(0))

        log.on("end", lambda: (self.folder / "seen.json").write_text(
            json.dumps(seen)))


def train_deep(stage, data, folder, *flags, **options):
    """A run of a deep model on one process."""
    return train(
        stage, folder / "run", "--minibatch-size", 4, "--microbatch-size", 2,
        "--max-steps", 2, "--eval-every", 2, "--eval-minibatches", 1, *flags,
        data=data, script=edited(folder, stage, (
            "n_layer=4, n_head=4,", f"n_layer={LAYERS}, n_head=4,"),
            ("(idx, 32, ", "(idx, 4, ")), texts=True, **options)


@pytest.fixture(scope="module")
def eager(data, tmp_path_factory):
    """What the stages are to compute: std, which compiles nothing."""
    return train_deep("std", data, tmp_path_factory.mktemp("eager"))


FSDP2 = ("--strategy", "fsdp2")


@pytest.mark.whole
@pytest.mark.parametrize(("stage", "flags"), [
    ("ddp", ("--recompute",)), ("fsdp", ("--recompute",)), ("3d", ()),
    ("lit", ()), ("lit", (*FSDP2, "--recompute"))], ids=str)
def test_every_product_is_compiled_and_no_text(data, eager, tmp_path, stage,
                                               flags):
    """Each step takes two microbatches; after the last come two more, the
    validation, and the texts, which get longer with each token.

    On one process tp compiles the same lines as fsdp.
    """
    result = train_deep(stage, data, tmp_path, "--compile", *flags,
                        probes=[GraphsSeen(tmp_path)])
    agree(result, eager)
    seen = json.loads((tmp_path / "seen.json").read_text())
    of_blocks, of_head = LAYERS * PRODUCTS, 1
    if stage in ("fsdp", "3d") or "fsdp2" in flags:
        # one graph for all blocks, one for the head, and both again without
        # gradients; what is recomputed runs compiled, too
        assert seen["graphs"] == 4
        if "--recompute" in flags:
            of_blocks *= 2
    else:  # the whole model
        assert seen["graphs"] == (2 if stage == "lit" else 1)
    assert seen["steps"][1] == 2 * (of_blocks + of_head)
    # in validation nothing is recomputed; a pipeline tries its shapes
    assert seen["steps"][2] <= 3 * (LAYERS * PRODUCTS + of_head)


@pytest.mark.whole
def test_without_a_compiler_it_goes_on(tmp_path):
    script = tmp_path / "compiles.py"
    script.write_text("import torch; from backstage import device\n"
                      "from torch._inductor import config\n"
                      "config.cpp.cxx = None, '/no/such/compiler'\n"
                      "m = torch.nn.Linear(1, 1)\n"
                      "print(device.compile_model(m, torch.device('cpu')) "
                      "is m)\n")
    rank, = launch(script, env=os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)})
    assert rank.out == "True\n"
    assert rank.err.count("warning: torch.compile fails here") == 1
