"""The stage kernels: each operation against PyTorch's, in float64.

The shapes leave the last tile of each dimension half empty. Without a GPU the
kernels run in Triton's interpreter, where what they read and write is watched.
"""

import os
import runpy
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import edit, needs
from torch.nn import functional as F

from backstage import ROOT
from workshop.stages import STAGES

SCRIPT = ROOT / "solutions" / "train_gpt2_kernels.py"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True, scope="module")
def with_triton():
    needs("triton")


@pytest.fixture(scope="module")
def script(with_triton):
    """What the stage's script defines."""
    return runpy.run_path(str(SCRIPT))


def numbers(*shape, scale=1.0):
    return (torch.randn(shape) * scale).to(DEVICE)


def make_inputs():
    """Of each operation: the inputs, and what PyTorch computes from them."""
    torch.manual_seed(0)
    targets = torch.arange(9, device=DEVICE) * 300
    return {
        "gelu": ([numbers(3, 3000, scale=3)],
                 lambda x: F.gelu(x, approximate="tanh")),
        "layer_norm": ([3 + numbers(3, 67, 48), numbers(48), numbers(48)],
                       lambda x, w, b: F.layer_norm(x, w.shape, w, b)),
        "cross_entropy": ([numbers(9, 2500, scale=50), targets],
                          F.cross_entropy),
        "attention": ([numbers(2, 1, 100, 10, scale=3) for _ in "qkv"],
                      lambda q, k, v: F.scaled_dot_product_attention(
                          q, k, v, is_causal=True)),
    }


def compute(function, inputs, dtype):
    """The output and the gradients of all inputs but whole numbers."""
    inputs = [x.to(dtype, copy=True).requires_grad_()
              if x.is_floating_point() else x for x in inputs]
    # a product for each side: cross-entropy overwrites its logits
    output = function(*(x * 1 if x.is_floating_point() else x
                        for x in inputs))
    torch.manual_seed(1)
    output.backward(torch.randn(output.shape).to(output))
    return [output, *(x.grad for x in inputs if x.is_floating_point())]


def compare(script, name, tolerance=1e-5, dtype=torch.float32):
    """Whether each result is PyTorch's, relative to its largest number."""
    inputs, reference = make_inputs()[name]
    mine = compute(script[name], inputs, dtype)
    good = compute(reference, [
        x.to(dtype) if x.is_floating_point() else x for x in inputs],
        torch.float64)
    return all(a.dtype == dtype and (a - b).abs().max() <= (
        tolerance * b.abs().max()) for a, b in zip(mine, good, strict=True))


class Memory:
    """Watches what the programs of a kernel read and write.

    The interpreter runs one program after the other, so that a race changes
    no result there. `wrong`: the first access that is outside of the kernel's
    tensors, or to what another program writes.
    """

    def __init__(self, monkeypatch):
        from triton.runtime.interpreter import (
            GridExecutor,
            interpreter_builder,
        )

        self.wrong, self.builder = "", interpreter_builder
        begin = GridExecutor._init_args_hst

        def visible_begin(executor, args, kwargs):
            tensors = [x for x in args if isinstance(x, torch.Tensor)]
            self.inside = np.array(
                [(x.data_ptr(), x.data_ptr() + x.nbytes) for x in tensors])
            self.readers, self.writers = {}, {}
            return begin(executor, args, kwargs)

        load = interpreter_builder.create_masked_load
        store = interpreter_builder.create_masked_store

        def visible_load(ptrs, mask, *rest):
            return load(ptrs, self.access(ptrs, mask, "reads"), *rest)

        def visible_store(ptrs, value, mask, *rest):
            return store(
                ptrs, value, self.access(ptrs, mask, "writes"), *rest)

        monkeypatch.setattr(GridExecutor, "_init_args_hst", visible_begin)
        for name, function in (("create_masked_load", visible_load),
                               ("create_masked_store", visible_store)):
            monkeypatch.setattr(interpreter_builder, name, function)

    def access(self, ptrs, mask, verb):
        """The mask, without what is outside: that might end the process."""
        begin, end = self.inside.T
        at, program = ptrs.data[..., None], self.builder.grid_idx
        inside = ((at >= begin) & (at < end)).any(-1)
        if not inside[mask.data].all():
            self.wrong = self.wrong or f"{verb} outside"
        mask.data = mask.data & inside
        for address in ptrs.data[mask.data].tolist():
            if verb == "writes":
                others = self.readers.get(address, set()) - {program}
                if others or self.writers.setdefault(
                        address, program) != program:
                    self.wrong = self.wrong or "a race"
            else:
                self.readers.setdefault(address, set()).add(program)
                if self.writers.get(address, program) != program:
                    self.wrong = self.wrong or "a race"
        return mask


OPERATIONS = ("gelu", "layer_norm", "cross_entropy", "attention")


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_computes_what_pytorch_computes(
        name, script, monkeypatch):
    memory = Memory(monkeypatch) if DEVICE == "cpu" else None
    assert compare(script, name)
    assert memory is None or not memory.wrong


@pytest.mark.parametrize("name", ("gelu", "attention"))
def test_what_autocast_gives_bf16_stays_bf16(name, script):
    assert compare(script, name, 2e-2, torch.bfloat16)


MISTAKES = {  # operation, the wrong lines; what the memory's watch says
    "no mask of later keys": ("attention", (
        "queries[:, None] >= keys[None, :]", "keys[None, :] < 10**6"), ""),
    "the old tiles' sum is not scaled": ("attention", (
        "total * shrink + tl.sum(p, 1)", "total + tl.sum(p, 1)"), ""),
    "only the last tile's sum": ("cross_entropy", (
        "total += tl.sum(", "total = tl.sum("), ""),
    "no largest logit": ("cross_entropy", (
        "larger = tl.maximum(largest, tl.max(tile, 1))",
        "larger = tl.zeros((ROWS,), tl.float32)"), ""),
    "zeros beyond the row become -mean": ("layer_norm", (
        "tl.where((columns < N)[None, :], tile - mean[:, None], 0.0)",
        "tile - mean[:, None]"), ""),
    "a program's own rows alone": ("layer_norm", (
        "dw.sum(0)", "dw[0]"), ""),
    "no mask for what is written": ("gelu", (
        "tile * tl.sigmoid(2 * u), i < N)", "tile * tl.sigmoid(2 * u))"),
        "writes outside"),
    "a row is written beyond its end": ("layer_norm", (
        "tl.store(x + at, tile, inside)", "tl.store(x + at, tile)"),
        "a race"),
    "no mask for what is read": ("gelu", (
        "dy + i, i < N, other=0.0", "dy + i"), "reads outside"),
    "all programs write to one row": ("layer_norm", (
        "    at = program * N + columns\n", "    at = columns\n"), "a race"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(mistake, tmp_path, monkeypatch):
    name, change, said = MISTAKES[mistake]
    if DEVICE != "cpu":
        pytest.skip("on a GPU it may end the process")
    memory = Memory(monkeypatch)
    wrong = tmp_path / "wrong.py"
    wrong.write_text(edit(SCRIPT.read_text(), change))
    right = compare(runpy.run_path(str(wrong)), name)
    assert memory.wrong == said and (said or not right)


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
