"""Triton and its language, ready for the device that is here.

    from backstage.triton import INTERPRETED, tl, triton

is `import triton` and `import triton.language as tl`. Without a GPU, or with
`--device cpu`, Triton's interpreter runs the kernels on the CPU, one program
after the other, and `INTERPRETED` is true: the first import decides it.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch

from backstage.errors import UserError, leave, report


def load_triton() -> Any:
    """Triton's module; raises a `UserError` where it is not installed."""
    command_line = " ".join(sys.argv).replace("=", " ")
    on_cpu = not torch.cuda.is_available() or "--device cpu" in command_line
    os.environ.setdefault("TRITON_INTERPRET", str(int(on_cpu)))
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # unset, it warns
    for name in [*sys.modules]:  # torch may have imported it already
        if f"{name}.".startswith("triton.") and "._C" not in name:
            del sys.modules[name]
    try:
        import triton.language
    except ImportError as error:
        raise UserError(
            "Triton, which compiles this script's kernels, is not installed; "
            "fix: pip install triton on Linux; there is no Triton for macOS, "
            "so run this stage on a Linux machine") from error
    if triton.knobs.runtime.interpret:
        fix_interpreter()
    return triton


def fix_interpreter() -> None:
    """Make the interpreter multiply bf16, twice as fast, and silent.

    Triton 3.9 multiplies bf16 as whole numbers there, replaces its language's
    functions whenever one of ours is called, and looks for overflows.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder

    def multiply(a: Any, b: Any, total: Any, *_: object) -> Any:
        a, b = (torch.from_numpy(builder.cast_impl(tile, tl.float32).data)
                for tile in (a, b))
        return interpreter.TensorHandle(
            (a @ b).numpy() + total.data, total.dtype.scalar)

    np.seterr(all="ignore")  # as on a GPU: exp() may become infinite
    builder.create_dot = multiply
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = cache(interpreter._patch_lang)
    interpreter._LangPatchScope.restore = lambda scope: None


try:
    triton = load_triton()
    tl, INTERPRETED = triton.language, triton.knobs.runtime.interpret
except UserError as error:  # no main() has begun that would say it
    leave(report(error))
