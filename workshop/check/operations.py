"""The operations of a script with kernels, each tried by itself.

    python -m workshop.check.operations SCRIPT

Each is compared with PyTorch's in float64, on shapes that need several tiles
and leave the last one half empty. What the kernels read and write is watched:
Triton's interpreter runs one program after the other, so that a race changes
no result. Prints, in JSON, what is wrong with each up to the first of which
something is; None where there is no such function.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from rankcheck.record.recorder import replace

AUTOCAST = ("gelu", "attention")  # get bf16 under autocast
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

TensorFunction = Callable[..., torch.Tensor]
Inputs = dict[str, torch.Tensor]
# what is wrong, the script's lines that show it, and whether it is an error
Fault = tuple[str, list[int], bool]


def draw_numbers(*shape: int, scale: float = 1.0) -> torch.Tensor:
    """Return random numbers whose first dimension is contiguous.
    """
    return (torch.randn(shape[::-1]) * scale).to(DEVICE).permute(
        tuple(range(len(shape)))[::-1])


def make_inputs() -> dict[str, tuple[Inputs, TensorFunction]]:
    """Return each operation's inputs by name, and PyTorch's function."""
    torch.manual_seed(0)
    targets = (torch.arange(33, device=DEVICE) * 79).flip(0)
    return {
        "gelu": ({"x": draw_numbers(3, 13_000, scale=3)},
                 partial(F.gelu, approximate="tanh")),
        "layer_norm": (
            {"x": 0.03 + draw_numbers(3, 267, 48, scale=0.01),
             "w": draw_numbers(48),
             "b": draw_numbers(48)},
            lambda x, w, b: F.layer_norm(x, w.shape, w, b)),
        "cross_entropy": (
            {"logits": draw_numbers(33, 2600, scale=50).contiguous(),
             "targets": targets}, F.cross_entropy),
        "attention": (
            {name: draw_numbers(2, 1, 300, 10, scale=3) for name in "qkv"},
            partial(F.scaled_dot_product_attention, is_causal=True)),
    }


def compute(function: TensorFunction, tensors: Iterable[torch.Tensor],
            dtype: torch.dtype) -> list[torch.Tensor | None]:
    """Return the output and the gradients of all inputs but whole numbers.
    """
    inputs = [x.to(dtype, copy=True).requires_grad_()
              if x.is_floating_point() else x for x in tensors]
    # a product for each side: cross-entropy overwrites its logits
    output = function(*(x * 1 if x.is_floating_point() else x for x in inputs))
    torch.manual_seed(1)
    output.backward(draw_numbers(*output.shape).to(output))
    return [output, *(x.grad for x in inputs if x.is_floating_point())]


def compare_operation(function: TensorFunction, name: str,
                      tolerance: float = 1e-5,
                      dtype: torch.dtype = torch.float32) -> str:
    """Return what is wrong with a function in the place of an operation.

    Args:
        function: of the script.
        name: of the operation.
        tolerance: relative to the largest number of each result.
        dtype: of the inputs.

    Returns:
        "" if all it computes is what PyTorch computes.
    """
    inputs, reference = make_inputs()[name]
    actual = compute(function, inputs.values(), dtype)
    expected = compute(reference, [x.to(dtype) if x.is_floating_point() else x
                                   for x in inputs.values()], torch.float64)
    for what, a, b in zip(("output", *(f"gradient of {x}" for x in inputs)),
                          actual, expected, strict=False):
        if b is None:
            raise ValueError(f"PyTorch's {name} has no {what}")
        if a is None:
            return f"its {what} is None"
        if a.shape != b.shape or a.dtype != dtype:
            return f"its {what} is {describe_tensor(a)}"
        if not a.isfinite().all():
            return f"its {what} overflows: it is not finite"
        off = ((a - b).abs().max() / b.abs().max()).item()
        if off > tolerance:
            text = f"its {what} is off by {off:.1g} of its largest number"
            if dtype == torch.bfloat16:
                text += ", in bf16"
            return text
    return ""


def describe_tensor(x: torch.Tensor) -> str:
    return f"{tuple(x.shape)} in {str(x.dtype).removeprefix('torch.')}"


class Memory:
    """Watches what the programs of the kernels read and write.

    Attributes:
        wrong: the first access that is outside of a kernel's tensors, or to
            what another program writes.
    """

    def __init__(self) -> None:
        from triton.runtime import interpreter

        self.wrong: Fault | None = None
        self.builder = builder = interpreter.interpreter_builder

        @replace(interpreter.GridExecutor, "_init_args_hst")
        def begin(begin: TensorFunction, executor: Any, args: Any, kwargs: Any
                  ) -> Any:
            self.begin(executor.fn.__name__, [
                x for x in (*args, *kwargs.values())
                if isinstance(x, torch.Tensor)])
            return begin(executor, args, kwargs)

        @replace(builder, "create_masked_load")
        def load(load: TensorFunction, ptrs: Any, mask: Any,
                 *rest: Any) -> Any:
            return load(ptrs, self.access(ptrs, mask, "read"), *rest)

        @replace(builder, "create_masked_store")
        def store(store: TensorFunction, ptrs: Any, value: Any, mask: Any,
                  *rest: Any) -> Any:
            return store(ptrs, value, self.access(ptrs, mask, "write"), *rest)

    def begin(self, kernel: str, tensors: Sequence[torch.Tensor]) -> None:
        """Start watching a kernel that gets these tensors."""
        self.kernel = kernel
        spans = sorted({(x.data_ptr(), x.nbytes) for x in tensors})
        self.first, sizes = np.array(spans).T
        self.place = np.cumsum(sizes) - sizes  # in the arrays below
        self.end = self.first + sizes
        # of each byte: the program, from 1; -1: several
        self.readers, self.writers = np.zeros((2, sizes.sum()), np.int32)

    def access(self, ptrs: Any, mask: Any, verb: str) -> Any:
        """Return the mask without what is outside: that may be fatal."""
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
            others_do = "reads or writes" if verb == "write" else "writes"
            self.note(f"{verb}s what another program {others_do}: a race")
        return mask

    def note(self, what: str) -> None:
        """Note what is wrong, if it is the first, with the kernel's line."""
        frame = sys._getframe(2)
        while frame.f_code.co_name != self.kernel and frame.f_back:
            frame = frame.f_back
        if not self.wrong:
            self.wrong = f"{self.kernel} {what}", [frame.f_lineno], False


def main(script: str) -> None:
    results: dict[str, Fault | str | None] = {}
    name = "the script"
    try:
        names = runpy.run_path(script)
        for value in names.values():  # the interpreter calls them, too
            if isinstance(value, FunctionType) and "tl" in (
                    value.__code__.co_names):
                raise NameError("@triton.jit is missing above "
                                f"{value.__name__}")
        memory = None  # needs Triton, which an unchanged script does not
        for name in make_inputs():
            results[name] = None
            if name not in names:
                break
            memory = memory or Memory()
            found = compare_operation(names[name], name)
            if not found and name in AUTOCAST:
                found = compare_operation(names[name], name, 2e-2,
                                          torch.bfloat16)
            results[name] = ""
            if memory.wrong:
                results[name] = memory.wrong
            elif found:
                results[name] = found, [], False
            if results[name]:
                break
    except Exception as error:  # whatever a script may raise
        results[name] = explain_operation(error, script)
    print("\n" + json.dumps(results))


def explain_operation(error: BaseException, script: str) -> Fault:
    """Return an error in one line, and the script's line of it."""
    line: list[int] = []
    cause: BaseException | None = error
    while cause:
        lines = [frame.lineno for frame in traceback.extract_tb(
            cause.__traceback__)
            if frame.filename == script and frame.lineno]
        line = lines[-1:] or line
        last, cause = cause, cause.__cause__
    text = f"{type(last).__name__}: {' '.join(str(last).split())}"
    return text, line, True


if __name__ == "__main__":
    main(os.path.abspath(sys.argv[-1]))
