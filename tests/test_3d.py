"""The stage 3d: the layers are cut into pipeline stages."""

import re
import subprocess
import sys

import pytest
import torch
from stages import agree, agree_compiled, agree_in_bf16, train

from backstage import ROOT
from backstage.errors import explain

# ------------------------------------------------ the same training


@pytest.mark.whole
def test_in_bf16_it_is_the_single_device(data, tmp_path):
    agree_in_bf16("3d", tmp_path, data, 1e-4, 1e-2, mesh=(2, 1, 1))


@pytest.mark.whole
def test_stages_of_unequal_length(data, tmp_path):
    """Three stages of two blocks, one and one."""
    flags = ("--minibatch-size", 6, "--microbatch-size", 1, "--max-steps", 8)
    std = train("std", tmp_path / "std", *flags, data=data)
    agree(train("3d", tmp_path / "run", *flags, data=data, mesh=(3, 1, 1)),
          std)


@pytest.mark.parametrize(("cause", "words"), [
    (torch.OutOfMemoryError("CUDA out of memory"), "--microbatch-size"),
    (RuntimeError("[gloo/transport/tcp/pair.cc] closed"), "lost the other"),
    (ValueError("a bug"), None)], ids=repr)
def test_an_error_within_a_stage_is_explained(cause, words):
    """A schedule raises an error of its own in the place of any other."""
    try:
        raise RuntimeError("[Stage 1] failed to run forward") from cause
    except RuntimeError as error:
        said = explain(error)
    assert words in said if words else said is None


class MessagesOfSave:
    """Says how a checkpoint is gathered: by which groups, and how many bytes.

    A group that is not made for "gloo" uses NCCL on GPUs, in their memory.
    """

    def __call__(self, rank):
        import torch.distributed as dist

        from backstage import run
        from workshop.collectives import Collectives

        on_cpus, new_group, gather = set(), dist.new_group, run.gather_state

        def new(*args, backend=None, **options):
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

        def gather_state(*args):
            with Collectives(note):
                return gather(*args)

        dist.new_group, run.gather_state = new, gather_state


def test_a_gpu_holds_no_other_stages_part_of_a_checkpoint(data, tmp_path):
    result = train("3d", tmp_path / "run", "--max-steps", 1, data=data,
                   mesh=(2, 1, 2), observe=MessagesOfSave())
    assert result.status == 0, result.err
    sizes = {"cpu": [], "gpu": []}
    for kind, size in re.findall(r"message (\w+) (\d+)", result.out):
        sizes[kind].append(int(size))
    weights = result.checkpoint()["model"].values()
    assert max(sizes["gpu"]) <= max(weight.nbytes for weight in weights)
    # weights and moments of one of the two stages, sent and received
    assert sum(sizes["cpu"]) > 2 * sum(weight.nbytes for weight in weights)


@pytest.mark.whole
def test_compiled(data, tmp_path):
    agree_compiled("3d", 2, tmp_path, data, mesh=(2, 1, 1))


@pytest.mark.whole
def test_generate_writes_the_texts_of_a_pipeline(data, tmp_path):
    """The stages do not, but say who does."""
    result = train("3d", tmp_path / "run", "--max-steps", 2, data=data,
                   mesh=(2, 1, 1))
    assert result.status == 0, result.err
    assert ">" not in result.out
    said, = (line for line in result.out.splitlines() if "no texts" in line)
    assert f"code/generate.py --run {tmp_path / 'run'} writes" in said
    end = subprocess.run(
        [sys.executable, ROOT / "code" / "generate.py", "--run",
         tmp_path / "run", "--device", "cpu", "--max-new-tokens", "4"],
        capture_output=True, text=True)
    assert end.returncode == 0, end.stderr
    assert "(3d, 2 steps)" in end.stdout
    assert end.stdout.count("> Hello, I'm a language model,") == 4
