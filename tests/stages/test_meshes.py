"""Several processes: what is particular to a stage, or to its sizes."""

import re
import signal

import pytest
import torch
from conftest import needs
from stages import (
    SignalAt,
    agree,
    attempt,
    edited,
    make_dataset,
    refused,
    train,
)
from torch import distributed as dist

from backstage import checkpoint
from rankcheck.record.collectives import Collectives
from rankcheck.record.recorder import replace

# ------------------------------------------------ the same training


@pytest.mark.whole
def test_in_bf16_it_is_the_single_device(data, tmp_path):
    """Autocast computes in bf16; weights and reductions stay in fp32."""
    single, result = (train(
        stage, tmp_path / stage, "--precision", "bf16", "--max-steps", 2,
        "--eval-minibatches", 1, data=data, mesh=mesh)
        for stage, mesh in (("std", (1, 1, 1)), ("3d", (2, 1, 2))))
    for column, tolerance in (("loss", 1e-3), ("norm", 2e-2)):
        assert result.column(column) == pytest.approx(
            single.column(column), rel=tolerance)


@pytest.mark.whole
@pytest.mark.parametrize(("stage", "mesh"), [
    ("fsdp", (1, 3, 1)), ("3d", (3, 1, 1)), ("tp", (1, 1, 3))], ids=str)
def test_sizes_that_do_not_divide_evenly(stage, mesh, tmp_path):
    """Padded shards; pipeline stages of two blocks, one and one; three heads,
    with a vocabulary of 384, on three ranks."""
    data = make_dataset(tmp_path / "data")
    flags = ("--minibatch-size", 6, "--microbatch-size", 1, "--max-steps", 3,
             "--eval-minibatches", 1)
    if stage == "tp":
        flags = ("--n-head", 3, "--n-embd", 48, "--max-steps", 2,
                 "--microbatch-size", 4, "--eval-minibatches", 2)
    single = train("std", tmp_path / "std", *flags, data=data)
    agree(train(stage, tmp_path / "run", *flags, data=data, mesh=mesh),
          single, learning_rate=2e-3)


@pytest.mark.whole
def test_compiled(data, tmp_path):
    """As one device that compiles nothing, where the compiler has most to do.

    The signal comes before the validation, which would be compiled, too. All
    other stages are in test_compiled.py, without the compiler.
    """
    needs("g++")
    single, result = (train(
        name, tmp_path / name, *flags, data=data, script=edited(
            tmp_path, name, ("n_layer=4, n_head=4,", "n_layer=1, n_head=4,")),
        probes=[SignalAt(3, signal.SIGUSR1)], **options)
        for name, flags, options in (("std", (), {}), (
            "tp", ("--compile",), {"mesh": (1, 1, 2), "timeout": 290})))
    assert "torch.compile fails" not in result.err
    assert result.column("loss") == pytest.approx(
        single.column("loss"), rel=1e-4)
    assert result.checkpoint()["model"].keys() == (
        single.checkpoint()["model"].keys())


# ------------------------------------------------ what a rank keeps, and saves


def messages_of_save(log):
    """Says how a checkpoint is gathered: by which groups, and how many bytes.

    A group that is not made for "gloo" uses NCCL on GPUs, in their memory.
    """
    on_cpus = set()

    @replace(dist, "new_group")
    def new(new_group, *args, backend=None, **options):
        group = new_group(*args, backend=backend, **options)
        if backend == "gloo" and isinstance(group, dist.ProcessGroup):
            on_cpus.add(group.group_name)
        return group

    def note(name, tensors, function, args):
        group = next(arg if isinstance(arg, str) else
                     dist.ProcessGroup.unbox(arg).group_name for arg in
                     args if isinstance(arg, (str, torch.ScriptObject)))
        print("message", "cpu" if group in on_cpus else "gpu",
              sum(tensor.nbytes for tensor in tensors))

    @replace(checkpoint, "gather_state")
    def gather_state(gather, *args):
        with Collectives(note):
            return gather(*args)


@pytest.mark.whole
def test_a_gpu_holds_no_other_stages_part_of_a_checkpoint(data, tmp_path):
    """And the pipeline says who writes its texts."""
    result = train("3d", tmp_path / "run", "--max-steps", 1, data=data,
                   mesh=(2, 1, 2), probes=[messages_of_save], texts=True)
    sizes = {kind: [*map(int, re.findall(rf"message {kind} (\d+)",
                                         result.out))]
             for kind in ("cpu", "gpu")}
    weights = result.checkpoint()["model"].values()
    assert max(sizes["gpu"]) <= max(weight.nbytes for weight in weights)
    # weights and moments of one of the two stages, sent and received
    assert sum(sizes["cpu"]) > 2 * sum(weight.nbytes for weight in weights)
    assert ">" not in result.out
    said, = (line for line in result.out.splitlines()
             if "no generated text" in line)
    assert f"code/generate.py --run-dir {tmp_path / 'run'}" in said


# ------------------------------------------------ what is wrong is one line


@pytest.mark.whole
@pytest.mark.parametrize(("stage", "size", "flags", "words"), [
    ("tp", 3, ["--tensor-parallel", 2], ["3 process(es)", "groups of 2"]),
    ("tp", 3, ["--tensor-parallel", 3], ["--tensor-parallel 3", "4 heads"]),
    ("tp", 1, ["--tensor-parallel", 0], ["--tensor-parallel must be 1"]),
    ("3d", 5, ["--pipeline-parallel", 5], ["more than the 4 layers"]),
    ("3d", 2, ["--pipeline-parallel", 2, "--microbatch-size", 8],
     ["1 microbatch(es) of 8", "--pipeline-parallel 2", "smaller"]),
], ids=lambda value: value[0] if isinstance(value, list) else str(value))
def test_sizes_that_do_not_fit_are_one_line(
        data, tmp_path, stage, size, flags, words):
    refused(attempt(stage, tmp_path / "run", *flags, data=data,
                    world_size=size if size > 1 else None), *words)
