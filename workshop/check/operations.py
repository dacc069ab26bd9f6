"""The operations of a script with kernels, each tried by itself.

    python -m workshop.check.operations SCRIPT

Each is compared with PyTorch's in float64, on shapes that need several tiles
and leave the last one half empty. What the kernels read and write is watched:
Triton's interpreter runs one program after the other, so that a race changes
no result. Prints, in JSON, what is wrong with each up to the first of which
something is; None where there is no such function.
"""

import json
import os
import runpy
import sys
import traceback
from functools import partial
from types import FunctionType

import numpy as np
import torch
from torch.nn import functional as F

from rankcheck.record.recorder import replace

AUTOCAST = ("gelu", "attention")  # get bf16 under autocast
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def numbers(*shape, scale=1.0):
    """Random ones, the first dimension being next to itself in memory."""
    return (torch.randn(shape[::-1]) * scale).to(DEVICE).permute(
        tuple(range(len(shape)))[::-1])


def make_inputs():
    """Of each operation: its inputs by name, and PyTorch's function."""
    torch.manual_seed(0)
    targets = (torch.arange(33, device=DEVICE) * 79).flip(0)
    return {
        "gelu": ({"x": numbers(3, 13_000, scale=3)},
                 partial(F.gelu, approximate="tanh")),
        "layer_norm": (
            {"x": 0.03 + numbers(3, 267, 48, scale=0.01), "w": numbers(48),
             "b": numbers(48)},
            lambda x, w, b: F.layer_norm(x, w.shape, w, b)),
        "cross_entropy": (
            {"logits": numbers(33, 2600, scale=50).contiguous(),
             "targets": targets}, F.cross_entropy),
        "attention": (
            {name: numbers(2, 1, 300, 10, scale=3) for name in "qkv"},
            partial(F.scaled_dot_product_attention, is_causal=True)),
    }


def compute(function, inputs, dtype):
    """The output and the gradients of all inputs but whole numbers."""
    inputs = [x.to(dtype, copy=True).requires_grad_()
              if x.is_floating_point() else x for x in inputs]
    # a product for each side: cross-entropy overwrites its logits
    output = function(*(x * 1 if x.is_floating_point() else x for x in inputs))
    torch.manual_seed(1)
    output.backward(numbers(*output.shape).to(output))
    return [output, *(x.grad for x in inputs if x.is_floating_point())]


def compare(function, name, tolerance=1e-5, dtype=torch.float32):
    """What is wrong with a function in the place of an operation, "" if all
    it computes is PyTorch's, relative to the largest number of each result.
    """
    inputs, reference = make_inputs()[name]
    mine = compute(function, inputs.values(), dtype)
    good = compute(reference, [x.to(dtype) if x.is_floating_point() else x
                               for x in inputs.values()], torch.float64)
    for what, a, b in zip(("output", *(f"gradient of {x}" for x in inputs)),
                          mine, good, strict=False):
        if a is None or a.shape != b.shape or a.dtype != dtype:
            return f"its {what} is {a if a is None else describe(a)}"
        if not a.isfinite().all():
            return f"its {what} overflows: it is not finite"
        off = ((a - b).abs().max() / b.abs().max()).item()
        if off > tolerance:
            return f"its {what} is off by {off:.1g} of its largest number" + (
                ", in bf16" * (dtype == torch.bfloat16))
    return ""


def describe(x):
    return f"{tuple(x.shape)} in {str(x.dtype).removeprefix('torch.')}"


class Memory:
    """Watches what the programs of the kernels read and write.

    `wrong`: the first access that is outside of a kernel's tensors, or to
    what another program writes, and its line of the script.
    """

    def __init__(self):
        from triton.runtime import interpreter

        self.wrong = ""
        self.builder = builder = interpreter.interpreter_builder

        @replace(interpreter.GridExecutor, "_init_args_hst")
        def begin(begin, executor, args, kwargs):
            self.begin(executor.fn.__name__, [
                x for x in (*args, *kwargs.values())
                if isinstance(x, torch.Tensor)])
            return begin(executor, args, kwargs)

        @replace(builder, "create_masked_load")
        def load(load, ptrs, mask, *rest):
            return load(ptrs, self.access(ptrs, mask, "read"), *rest)

        @replace(builder, "create_masked_store")
        def store(store, ptrs, value, mask, *rest):
            return store(ptrs, value, self.access(ptrs, mask, "write"), *rest)

    def begin(self, kernel, tensors):
        self.kernel = kernel
        spans = sorted({(x.data_ptr(), x.nbytes) for x in tensors})
        self.first, sizes = np.array(spans).T
        self.place = np.cumsum(sizes) - sizes  # in the arrays below
        self.end = self.first + sizes
        # of each byte: the program, from 1; -1: several
        self.readers, self.writers = np.zeros((2, sizes.sum()), np.int32)

    def access(self, ptrs, mask, verb):
        """The mask, without what is outside: that might end the process."""
        at = ptrs.data.astype(np.int64)
        k = (np.searchsorted(self.first, at, "right") - 1).clip(0)
        inside = (at >= self.first[k]) & (at < self.end[k])
        if (mask.data & ~inside).any():
            self.note(f"{verb}s outside of its tensors")
        mask.data = mask.data & inside
        at = (at - self.first[k] + self.place[k])[mask.data]
        x, y, z = self.builder.grid_idx
        _, Y, Z = self.builder.grid_dim
        program = (x * Y + y) * Z + z + 1
        others = [self.writers[at]]
        if verb == "write":
            others.append(self.readers[at])
            self.writers[at] = program
        else:
            self.readers[at] = np.where(
                np.isin(self.readers[at], (0, program)), program, -1)
        if not np.isin(others, (0, program)).all():
            self.note(f"{verb}s what another program "
                      f"{'reads or ' * (verb == 'write')}writes: a race")
        return mask

    def note(self, what):
        frame = sys._getframe(2)
        while frame.f_code.co_name != self.kernel:
            frame = frame.f_back
        self.wrong = self.wrong or (
            f"{self.kernel} {what}", [frame.f_lineno], False)


def main(script):
    said, name = {}, "the script"
    try:
        names = runpy.run_path(script)
        for value in names.values():  # the interpreter calls them, too
            if isinstance(value, FunctionType) and "tl" in (
                    value.__code__.co_names):
                raise NameError("@triton.jit is missing above "
                                f"{value.__name__}")
        memory = None  # needs Triton, which an unchanged script does not
        for name in make_inputs():
            said[name] = None
            if name not in names:
                break
            memory = memory or Memory()
            found = compare(names[name], name)
            if not found and name in AUTOCAST:
                found = compare(names[name], name, 2e-2, torch.bfloat16)
            said[name] = memory.wrong or (found and (found, [], False))
            if said[name]:
                break
    except Exception as error:  # whatever a script may raise
        said[name] = explain(error, script)
    print("\n" + json.dumps(said))


def explain(error, script):
    """(text, lines, True): an error in one line, the script's line of it."""
    line = []
    while error:
        line = [frame.lineno for frame in traceback.extract_tb(
            error.__traceback__) if frame.filename == script][-1:] or line
        last, error = error, error.__cause__
    text = f"{type(last).__name__}: {' '.join(str(last).split())}"
    return text, line, True


if __name__ == "__main__":
    main(os.path.abspath(sys.argv[-1]))
