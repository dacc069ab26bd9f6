"""The stage kernels: each operation against PyTorch's, in float64.

Without a GPU they run in Triton's interpreter. The mistakes that the check
has to name are in cases/kernels.py.
"""

import os
import runpy
import subprocess
import sys

import pytest
import torch
from conftest import needs

from backstage import ROOT
from workshop.check.operations import AUTOCAST, DEVICE, compare, make_inputs
from workshop.stages import STAGES

SCRIPT = ROOT / "solutions" / "train_gpt2_kernels.py"


@pytest.fixture(autouse=True, scope="module")
def with_triton():
    needs("triton")


@pytest.fixture(scope="module")
def script(with_triton):
    """What the stage's script defines."""
    return runpy.run_path(str(SCRIPT))


@pytest.mark.parametrize("name", make_inputs())
def test_an_operation_computes_what_pytorch_computes(name, script):
    assert not compare(script[name], name)


@pytest.mark.parametrize("name", AUTOCAST)
def test_what_autocast_gives_bf16_stays_bf16(name, script):
    assert not compare(script[name], name, 2e-2, torch.bfloat16)


def test_an_optimizer_step_is_that_of_std(script):
    """The loss, every gradient, and every weight after the step."""
    sides = []
    for side in (runpy.run_path(str(STAGES["std"].solution)), script):
        torch.manual_seed(0)
        config = side["GPTConfig"](24, 130, 1, 2, 24)
        model = side["GPT"](config).to(DEVICE)
        optimizer = model.configure_optimizers(side["PRESETS"]["tiny"])
        batch = torch.randint(130, (2, 3, 20))
        loss = side["training_step"](
            model, batch, torch.device(DEVICE), "fp32")
        (loss / 4).backward()
        gradients = [weight.grad.clone() for weight in model.parameters()]
        optimizer.step()
        sides.append((loss, gradients, [*model.parameters()]))
    (loss, gradients, weights), (mine, mine_too, mine_after) = sides
    torch.testing.assert_close(mine, loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(mine_too, gradients, rtol=1e-4, atol=1e-7)
    # AdamW makes much of a key's bias, whose gradient is 0 but for rounding
    torch.testing.assert_close(mine_after, weights, rtol=0, atol=6e-5)


COMPILE = """\
import inspect, runpy, sys
script = runpy.run_path(sys.argv[1])
triton = script["triton"]
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
SIZES = dict(TILE=4096, ROWS=4, COLUMNS=64, BLOCK=64)
NAMED = dict(M="i32", N="i32", T="i32", D="i32", scale="fp32",
             targets="*i64", dloss="*fp32", sums="*fp32", delta="*fp32")
for name, kernel in script.items():
    if not name.endswith(("_forward", "_backward", "_kv", "_q")):
        continue
    for dtype in ("*fp32", "*bf16")[:1 + name.startswith("attention")]:
        types = {word: "constexpr" if word in SIZES else
                 NAMED.get(word, dtype) for word in kernel.arg_names}
        sizes = {word: SIZES[word] for word in types if word in SIZES}
        made = triton.compile(ASTSource(kernel, types, sizes),
                              target=GPUTarget("cuda", 80, 32))
        assert made.metadata.shared <= 163 * 1024, name
        print(name, dtype, made.metadata.shared)
"""


@pytest.mark.whole
def test_the_kernels_compile_for_gpus(tmp_path):
    """For an A100, in whose shared memory their tiles have room."""
    end = subprocess.run(
        [sys.executable, "-c", COMPILE, SCRIPT], capture_output=True,
        text=True, env={
            **os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT),
            "TRITON_CACHE_DIR": str(tmp_path)})
    assert end.returncode == 0, end.stderr
    assert end.stdout.count("attention") == 6, end.stdout
