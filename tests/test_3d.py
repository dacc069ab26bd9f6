"""The stage 3d: the layers are cut into pipeline stages."""

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
