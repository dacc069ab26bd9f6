"""What a step of the stage std does on a GPU, worked out without one.

    PYTHONPATH=. python benchmarks/fake_cuda.py      # five minutes
    PYTHONPATH=. python benchmarks/fake_cuda.py --microbatches 16

It needs a CUDA build of torch and gcc, but no GPU. A small library says to
torch that there is an H100, and the stage's own main() trains GPT-2 124M for
two steps on tensors without values. We count what the device would have to do,
how often the program would wait for it (also for a copy that is not from
pinned memory), and how much memory is in use. torch.compile makes the kernels
that it would make for an H100, and Triton compiles them to machine code, but
nothing executes them.

Memory is the sum of all tensors' storages, in units of 512 bytes as CUDA's
allocator gives them. Not counted: gaps between them, what CUDA and cuBLAS need
for themselves. No time is measured: the tokens per second are an estimate of
the most that is possible, if matrix products and attention ran at the peak of
the data sheet, and all else as fast as the memory, one after the other.
"""

import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import weakref
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from backstage import ROOT
from backstage.command_line import parse_flags
from backstage.errors import require, run_main
from backstage.flops import PEAKS, flops_per_token, num_parameters

sys.path.append(str(ROOT / "solutions"))
import train_gpt2_std as std
from turns import random_tokens

HERE = Path(__file__).parent
S, T = 512, 1024  # samples in a minibatch, tokens in a sample
# GB/s of a device's memory, GiB of it that a process can use: data sheets
CARDS = {"A100": ("A100 40 GB", 1555, 39.4), "H100": ("H100 SXM", 3350, 79)}
CONTEXT = 1.5  # GiB that CUDA and its libraries take: an assumption
ARCHITECTURES = (80, 90)  # of these devices

DEVICE = r"""
#include <stdlib.h>
#include <string.h>
#include <driver_types.h>

/* What torch asks before it starts a kernel. The answers are an H100's. */
int cudaGetDeviceCount(int *count) { *count = 1; return 0; }
int cudaGetDevice(int *device) { *device = 0; return 0; }
int cudaDriverGetVersion(int *version) { *version = 13000; return 0; }
int cudaMalloc(void **memory, size_t size) {
    *memory = malloc(size);
    return *memory == NULL;
}
int cudaGetDeviceProperties(struct cudaDeviceProp *device, int index) {
    memset(device, 0, sizeof *device);
    strcpy(device->name, "NVIDIA H100 80GB HBM3");
    device->major = 9;
    device->multiProcessorCount = 132;
    device->totalGlobalMem = 85000000000;
    device->l2CacheSize = 50 << 20;
    device->warpSize = 32;
    device->maxThreadsPerBlock = 1024;
    device->maxThreadsPerMultiProcessor = 2048;
    device->regsPerMultiprocessor = 65536;
    device->sharedMemPerBlock = 49152;
    device->sharedMemPerBlockOptin = 232448;
    device->sharedMemPerMultiprocessor = 233472;
    return 0;
}
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    *flags = 0;
    *active = 1;
    return 0;
}
/* Everything else succeeds and does nothing. */
#define NOTHING(name) int name(void) { return 0; }
NOTHING(cudaDeviceGetStreamPriorityRange)
NOTHING(cudaGetDriverEntryPointByVersion)
NOTHING(cudaGetLastError)
NOTHING(cudaMemcpyAsync)
NOTHING(cudaSetDevice)
NOTHING(cudaStreamGetCaptureInfo)
NOTHING(cudaStreamIsCapturing)
NOTHING(cudaStreamSynchronize)
NOTHING(cudaThreadExchangeStreamCaptureMode)
"""


@dataclass
class Flags:
    """Work out what a GPU would do; it needs a CUDA build of torch."""

    microbatches: tuple[int, ...] = (16, 32, 64)  # samples at once
    compile: bool = True  # also the compiled model


def main():
    flags = parse_flags(Flags)
    require(torch.version.cuda, f"torch {torch.__version__} is built for CPUs,"
            " and this needs a CUDA build of torch: in an environment of its "
            "own, pip install torch numpy tiktoken tyro tqdm (several GB)")
    for size in flags.microbatches:
        require(size > 0 and S % size == 0, f"--microbatches {size} does not "
                f"divide a minibatch of {S} samples")
    columns = []
    with tempfile.TemporaryDirectory() as folder:
        library = build_device(Path(folder))
        for compiled in (False, True)[:1 + flags.compile]:
            for size in flags.microbatches:
                columns.append(run_apart(library, size, compiled))
    print(f"simulated: no GPU has run this. torch {torch.__version__}, Triton "
          f"{columns[0]['triton']}\nstd, preset gpt2, T = {T:,}, bf16, on "
          "what torch takes for an H100\n"
          f"attention: {columns[0]['attention']}\n")
    for name, *cells in table(columns):
        print((f"{name:25}" + "".join(f"{cell:>9}" for cell in cells))
              .rstrip())


def build_device(folder):
    """Compile the library; it stands for CUDA's runtime and its driver."""
    include = (Path(importlib.util.find_spec("triton").origin).parent
               / "backends" / "nvidia" / "include")
    library = folder / "libcuda.so.1"  # torch looks the driver up by this name
    command = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{library.name}",
               "-I", include, "-x", "c", "-", "-o", library]
    try:
        subprocess.run(command, input=DEVICE, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        require(False, f"gcc cannot build the library that stands for CUDA's "
                f"({error}): is gcc installed, and torch built for CUDA 13?")
    return library


def run_apart(library, size, compiled):
    """What `simulate` finds, in a process that has the library."""
    print(f"microbatches of {size}, {'compiled' if compiled else 'eager'}",
          file=sys.stderr)
    folder = library.parent
    output = folder / "found.json"
    ended = subprocess.run(
        [sys.executable, "-c",
         f"import fake_cuda; fake_cuda.simulate({size}, {compiled}, "
         f"{str(output)!r})"], capture_output=True, text=True,
        env=os.environ | {
            "LD_PRELOAD": str(library), "TRITON_CACHE_DIR": str(folder),
            "TORCHINDUCTOR_CACHE_DIR": str(folder),
            "TIKTOKEN_CACHE_DIR": str(folder),  # no vocabulary, no texts
            "PYTHONPATH": f"{HERE}{os.pathsep}{ROOT}"})
    found = json.loads(output.read_text()) if not ended.returncode else {}
    whole = found and all(found[f"sm_{arch}"] == found["kernels"]
                          for arch in ARCHITECTURES)
    if not whole:
        sys.stderr.write(ended.stderr)
    require(found, f"microbatches of {size} cannot be simulated with torch "
            f"{torch.__version__}: the reason stands above")
    return found


# ------------------------------------------------- in a process of its own


class Device(TorchDispatchMode):
    """Counts what the operations would do on a GPU, and its memory."""

    def __init__(self):
        super().__init__()
        self.seen = WeakIdKeyDictionary()  # storages
        self.memory = self.peak = 0  # bytes
        self.count = Counter()
        self.attention = set()

    @classmethod
    def is_infra_mode(cls):
        return True  # torch.compile compiles under such modes alone

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if operation is torch.ops.aten._local_scalar_dense.default:
            self.count["waits"] += 1
            return 1.0  # as good as any value
        out = operation(*args, **kwargs)
        inputs, outputs = tensors((args, kwargs)), tensors(out)
        allocated = any([self.allocate(tensor) for tensor in outputs])
        places = {tensor.device.type for tensor in inputs + outputs}
        name, packet = operation.__name__, operation.overloadpacket
        if name.startswith("_to_copy") and len(places) == 2:
            self.count["copies"] += 1
            if not kwargs.get("non_blocking"):
                self.count["waits"] += 1
        elif "cuda" not in places or "empty" in name:
            pass
        elif packet in flop_registry:
            flop = flop_registry[packet](*args, **kwargs, out_val=out)
            if "attention" in name:
                self.attention.add(packet.__name__)
                flop /= 2  # half of the pairs are masked
            self.count["flop"] += flop
            self.count["products"] += 1
        elif allocated or operation._schema.is_mutable:  # no view
            # what writes into its inputs may return nothing
            self.count["bytes"] += nbytes(inputs) + nbytes(outputs or inputs)
            self.count["others"] += 1
        return out

    def allocate(self, tensor):
        """Whether the tensor has memory that no other had before."""
        storage = tensor.untyped_storage()
        if tensor.device.type != "cuda" or storage in self.seen:
            return False
        self.seen[storage] = True
        number = math.ceil(storage.nbytes() / 512) * 512
        weakref.finalize(storage, self.free, number)
        self.memory += number
        self.peak = max(self.peak, self.memory)
        return True

    def free(self, number):
        self.memory -= number

    def take_count(self):
        """What was counted since the last time."""
        count, self.count = self.count, Counter()
        return count

    def take_peak(self):
        peak, self.peak = self.peak, self.memory
        return peak


def tensors(tree):
    return [leaf for leaf in tree_leaves(tree)
            if isinstance(leaf, torch.Tensor)]


def nbytes(tensors):
    """Their bytes; one that is broadcast is read once."""
    return sum(min(tensor.numel() * tensor.itemsize,
                   tensor.untyped_storage().nbytes()) for tensor in tensors)


def simulate(microbatch_size, compiled, output):
    """Train for two steps; writes what was counted in the second as JSON.

    Its last microbatch counts: the gradients of the first are not added to
    others yet.
    """
    import triton

    device, kernels, found = Device(), {}, {}
    torch.cuda.init()  # so that batches are pinned
    stand_in()
    if compiled:
        take_kernels(device, kernels)

    next_batch = std.DataIterator.__next__
    clip = std.nn.utils.clip_grad_norm_

    def next_batch_counted(data):
        device.take_count()
        return next_batch(data)

    def clip_counted(*args):
        found["microbatch"] = device.take_count()
        return clip(*args)

    def end_of_step(*_):
        found["update"] = device.take_count()
        found["peak"] = device.take_peak()

    std.DataIterator.__next__ = next_batch_counted
    std.nn.utils.clip_grad_norm_ = clip_counted
    std.Run.check_finite = end_of_step
    with tempfile.TemporaryDirectory() as folder:
        random_tokens(folder)
        sys.argv = [
            "std", "--preset", "gpt2", "--data", folder, "--run",
            f"{folder}/run", "--max-steps", "2", "--eval-minibatches", "1",
            "--minibatch-size", str(2 * microbatch_size), "--microbatch-size",
            str(microbatch_size), f"--{'' if compiled else 'no-'}compile"]
        with FakeTensorMode(allow_non_fake_inputs=True), device:
            std.main()
    found |= {
        "size": microbatch_size, "compiled": compiled,
        "evaluation": device.take_peak(),
        "attention": min(device.attention),  # max is its backward pass
        "kernels": len(kernels), "triton": triton.__version__}
    for arch in ARCHITECTURES:
        found[f"sm_{arch}"] = count_compiled(kernels, arch)
    Path(output).write_text(json.dumps(found))


def stand_in():
    """Replace what tensors without values cannot do."""
    class GPT(std.GPT):  # they cannot be moved: they begin on the device
        def __init__(self, *args):
            with torch.device("cuda"):
                super().__init__(*args)

        def to(self, device):
            return self

    pinned = WeakTensorKeyDictionary()

    def pin_memory(tensor):
        pinned[tensor] = True
        return tensor

    torch.Tensor.pin_memory = pin_memory
    torch.Tensor.is_pinned = lambda tensor: tensor in pinned
    std.GPT = GPT
    std.Run.save = lambda *_: None


def take_kernels(device, kernels):
    """Let Inductor write its kernels into a dictionary, {source: name}.

    To start one is to count it.
    """
    from torch._C._dynamo import guards
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile
    from triton.backends.nvidia import driver

    class Kernel:
        def __init__(self, name, source):
            kernels[source] = name
            # Inductor's own estimate, with what it reads of large tables
            words = source.partition("'kernel_num_gb': ")[2]
            self.bytes = float(words.split(",")[0].split("}")[0]) * 1e9

        def run(self, *args, stream):
            device.count["bytes"] += self.bytes
            device.count["kernels"] += 1

    def empty(size, stride, dtype):
        return torch.empty_strided(size, stride, dtype=dtype, device="cuda")

    def view(tensor, size, stride, offset=0):
        return tensor.as_strided(
            size, stride, tensor.storage_offset() + offset)

    config.force_disable_caches = True
    config.compile_threads = 1
    config.profile_bandwidth = True  # notes the bytes in each kernel's source
    config.joint_graph_constant_folding = False  # it would need values
    driver.CudaUtils = lambda: None  # it would ask the driver
    AsyncCompile.triton = (
        lambda _, name, source, device_str=None: Kernel(name, source))
    guards._empty_strided_cuda, guards._reinterpret_tensor = empty, view
    # without the small function that it tries first
    std.compile_model = lambda model, _: torch.compile(model)


def count_compiled(kernels, arch):
    """For how many kernels ptxas, which Triton calls, makes machine code."""
    from torch._inductor.codecache import PyCodeCache

    done = 0
    for source, name in kernels.items():
        source = source.replace(
            "cc=90, major=9", f"cc={arch}, major={arch // 10}")
        kernel = getattr(PyCodeCache.load(source), name)
        assert kernel.device_props.cc == arch
        try:
            kernel._precompile_config(kernel.configs[0])
            done += 1
        except Exception as error:  # whatever stops a compiler
            print(f"{name}: {error}", file=sys.stderr)
    return done


# ------------------------------------------------------------- the table


def table(columns):
    """Rows of text: a name, and a cell for each column."""
    config = std.GPTConfig()
    vocab_size = math.ceil(config.vocab_size / 128) * 128

    def row(name, cell, form=",.0f"):
        return name, *(format(cell(each), form) for each in columns)

    def count(name, part, kind, unit=1, form=",.0f"):
        return row(name, lambda each: each[part].get(kind, 0) / unit, form)

    def tokens(each):
        return each["size"] * T

    return [
        row("", lambda each: "compiled" if each["compiled"] else "eager", ""),
        row("samples in a microbatch", lambda each: each["size"]),
        ("a microbatch:",),
        count("  copies to the device", "microbatch", "copies"),
        count("  waits for the device", "microbatch", "waits"),
        count("  products, attention", "microbatch", "products"),
        count("  Triton kernels", "microbatch", "kernels"),
        count("  other operations", "microbatch", "others"),
        count("  TFLOP of the products", "microbatch", "flop", 1e12, ".1f"),
        row("    by 6 N + 12 L H Q T", lambda each:
            flops_per_token(config, T) * tokens(each) / 1e12, ".1f"),
        count("  GB moved by all others", "microbatch", "bytes", 1e9, ".1f"),
        ("the end of a step:",),
        count("  waits for the device", "update", "waits"),
        count("  GB moved", "update", "bytes", 1e9, ".1f"),
        ("memory, GiB:",),
        row("  weights, grads, moments", lambda _:
            4 * 4 * num_parameters(config) / 2**30, ".1f"),
        row("  logits in bf16", lambda each:
            2 * tokens(each) * vocab_size / 2**30, ".1f"),
        row("  peak, training", lambda each: each["peak"] / 2**30, ".1f"),
        row("  peak, validation, eager", lambda each:
            each["evaluation"] / 2**30, ".1f"),
        ("kernels that ptxas compiles:",),
        *(row(f"  sm_{arch}", lambda each, arch=arch:
              f"{each[f'sm_{arch}']} of {each['kernels']}"
              if each["kernels"] else "-", "")
          for arch in ARCHITECTURES),
        ("tokens/s at most (an estimate):",),
        *(row(f"  {CARDS[card][0]}", lambda each, card=card:
              at_most(each, card), "") for card in CARDS),
    ]


def at_most(each, card):
    """Tokens per second if each kernel were as fast as the data sheet."""
    _, bandwidth, memory = CARDS[card]
    peak = max(each["peak"], each["evaluation"]) / 2**30
    if peak + CONTEXT > memory:
        return "no room"

    def seconds(count):
        return (count.get("flop", 0) / (PEAKS[card][0] * 1e12)
                + count["bytes"] / (bandwidth * 1e9))

    step = S / each["size"] * seconds(each["microbatch"])
    return f"{S * T / (step + seconds(each['update'])):,.0f}"


if __name__ == "__main__":
    run_main(main)
