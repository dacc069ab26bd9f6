"""Triton and its language, ready for the device that is here.

    from backstage.triton import tl, triton

is `import triton` and `import triton.language as tl`. Without a GPU, or with
`--device cpu`, Triton's interpreter runs the kernels on the CPU, one program
after the other: the results are the same, but it takes much longer. Triton
reads in its first import whether it is to do so.
"""

import os
import sys

import torch

from backstage.errors import UserError, leave, report


def is_interpreted():
    """Whether the kernels run on the CPU."""
    words = " ".join(sys.argv).replace("=", " ")
    return not torch.cuda.is_available() or "--device cpu" in words


def load():
    """Triton's module; raises a `UserError` where it is not installed."""
    os.environ.setdefault("TRITON_INTERPRET", str(int(is_interpreted())))
    for name in [*sys.modules]:  # torch may have imported it already
        if f"{name}.".startswith("triton.") and "._C" not in name:
            del sys.modules[name]
    try:
        import triton.language
    except ImportError as error:
        raise UserError("Triton is not installed, which compiles the kernels "
                        "of this script: pip install triton") from error
    if triton.knobs.runtime.interpret:
        mend_products()
    return triton


def mend_products():
    """Let the interpreter multiply tiles in bf16.

    Triton 3.9 keeps them as whole numbers there, and multiplies these.
    """
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder as Builder

    multiply = Builder.create_dot

    def multiply_in_fp32(builder, a, b, *rest):
        a, b = (builder.cast_impl(tile, tl.float32)
                if tile.dtype.scalar == tl.bfloat16 else tile
                for tile in (a, b))
        return multiply(builder, a, b, *rest)

    Builder.create_dot = multiply_in_fp32


try:
    triton = load()
    tl = triton.language
except UserError as error:  # no main() has begun that would say it
    leave(report(error))
