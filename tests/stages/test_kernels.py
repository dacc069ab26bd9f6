"""The stage kernels: each operation against PyTorch's, in float64.

Without a GPU they run in Triton's interpreter. The mistakes that the check
has to name are in cases/kernels.py.
"""

import ctypes
import runpy
import shutil
import subprocess

import pytest
import torch
from conftest import needs, python

from backstage import ROOT
from rankcheck.engine.ranks import launch
from workshop.check.operations import AUTOCAST, compare_operation, make_inputs

SCRIPT = ROOT / "solutions" / "train_gpt2_kernels.py"


@pytest.fixture(scope="module")
def with_triton():
    needs("triton")


@pytest.fixture(scope="module")
def script(with_triton):
    """What the stage's script defines."""
    return runpy.run_path(str(SCRIPT))


def test_a_machine_without_triton_gets_one_line(tmp_path):
    (tmp_path / "triton.py").write_text("raise ImportError\n")
    end, = launch(SCRIPT, place=str(tmp_path))
    assert end.status == 1 and not end.out
    assert end.err == (
        "error: Triton, which compiles this script's kernels, is not "
        "installed; fix: pip install triton on Linux; there is no Triton for "
        "macOS, so run this stage on a Linux machine\n")


# What CUDA C adds to C++, for one thread at a time.
ONE_BY_ONE = """
#include <cmath>
struct { long x; } blockIdx, blockDim = {8}, threadIdx;
#define __global__ static
#include "gelu.cu"
extern "C" void gelu(const float *x, float *y, long n, long blocks) {
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < 8; ++threadIdx.x)
            gelu_forward(x, y, n);
}
"""


def test_the_slides_kernel_in_cuda_c_computes_gelu(tmp_path):
    needs("g++")
    library = tmp_path / "gelu.so"
    subprocess.run(["g++", "-shared", "-fPIC", "-x", "c++", "-I",
                    ROOT / "slides" / "source", "-o", library, "-"],
                   input=ONE_BY_ONE, text=True, check=True)
    x = torch.linspace(-5, 5, 100)
    y = torch.full_like(x, torch.nan)
    ctypes.CDLL(library).gelu(*map(ctypes.c_void_p, (
        x.data_ptr(), y.data_ptr())), ctypes.c_long(99), ctypes.c_long(13))
    torch.testing.assert_close(y[:99], torch.nn.functional.gelu(
        x[:99].double(), approximate="tanh").float(), rtol=1e-5, atol=1e-6)
    assert y[99].isnan()  # which is beyond the end
    if shutil.which("nvcc"):
        subprocess.run(["nvcc", "-cubin", "-o", tmp_path / "gelu.cubin",
                        ROOT / "slides" / "source" / "gelu.cu"], check=True)


@pytest.mark.parametrize("name", make_inputs())
def test_an_operation_computes_what_pytorch_computes(name, script):
    assert not compare_operation(script[name], name)


@pytest.mark.parametrize("name", AUTOCAST)
def test_what_autocast_gives_bf16_stays_bf16(name, script):
    assert not compare_operation(script[name], name, 2e-2, torch.bfloat16)


COMPILE = """\
import runpy, sys
from notebooks.experiments import kernels
known = kernels.TYPES
for name, kernel in runpy.run_path(sys.argv[1]).items():
    if not name.endswith(("_forward", "_backward", "_kv", "_q")):
        continue
    attends, largest = name.startswith("attention"), name.endswith("_q")
    for dtype in ["*bf16"] * attends + ["*fp32"] * (largest or not attends):
        kernels.TYPES = dict.fromkeys(kernel.arg_names, dtype) | known
        shared, _ = kernels.needs(kernel, attends)
        assert shared <= kernels.SHARED, name
        print(name, dtype, shared)
"""


@pytest.mark.whole
def test_the_kernels_compile_for_gpus(tmp_path, with_triton):
    """For an A100, as the lesson does it. Their tiles have room in its shared
    memory: of those of attention, which take long, the largest's in fp32, too.
    """
    end = python(ROOT, "-c", COMPILE, SCRIPT, TRITON_INTERPRET="0",
                 TRITON_CACHE_DIR=str(tmp_path))
    assert end.returncode == 0, end.stderr
    assert end.stdout.count("attention") == 4, end.stdout
