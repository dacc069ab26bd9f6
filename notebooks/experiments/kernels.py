"""What the kernels of a script need on a GPU: compiles them for an A100.

    python -m notebooks.experiments.kernels [SCRIPT]

No GPU is needed for that. A multiprocessor runs as many programs at once as
its registers and its shared memory have room for.
"""

import os
import re
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"  # before Triton is imported

from backstage.errors import run_main
from backstage.triton import triton
from workshop.stages import STAGES

SHARED, REGISTERS, MOST = 163 * 1024, 65_536, 16  # of a multiprocessor
THREADS = 128  # of a program
TYPES = {"M": "i32", "N": "i32", "T": "i32", "D": "i32", "scale": "fp32",
         "targets": "*i64", "sums": "*fp32", "delta": "*fp32"}


def main():
    script = sys.argv[1] if sys.argv[1:] else next(
        stage for stage in STAGES.values() if stage.kernels).solution
    print(f"{'for an A100':24}{'shared KiB':>12}{'registers':>12}"
          f"{'programs at once':>18}")
    for name, kernel in runpy.run_path(str(script)).items():
        if re.search("_(forward|backward|kv|q)$", name):
            shared, registers = needs(kernel, "attention" in name)
            at_once = min(MOST, SHARED // max(shared, 1), REGISTERS // (
                THREADS * -(-registers // 8) * 8))
            print(f"{name:24}{shared / 1024:12.1f}{registers:12}{at_once:18}",
                  flush=True)


def needs(kernel, attends):
    """(bytes of shared memory of a program, registers of a thread)."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    sizes = {"TILE": 4096, "ROWS": 4, "COLUMNS": 64 if attends else 1024,
             "BLOCK": 64}
    # what autocast gives to gelu and attention is in bf16
    usual = "*bf16" if attends or "TILE" in kernel.arg_names else "*fp32"
    types = {name: "constexpr" if name in sizes else TYPES.get(name, usual)
             for name in kernel.arg_names}
    made = triton.compile(
        ASTSource(kernel, types, {name: sizes[name] for name in types
                                  if name in sizes}),
        target=GPUTarget("cuda", 80, 32))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.ptx")
        file.write_text(made.asm["ptx"])
        said = subprocess.run(
            [triton.knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_80", file,
             "-o", f"{file}.cubin"], capture_output=True, text=True,
            check=True)
    return made.metadata.shared, int(
        re.search(r"Used (\d+) registers", said.stderr)[1])


if __name__ == "__main__":
    run_main(main)
