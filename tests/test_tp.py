"""The stage tp: the ranks of a TP group share every matrix."""

import pytest
from stages import (
    agree,
    agree_compiled,
    agree_in_bf16,
    make_dataset,
    train,
)

# ------------------------------------------------ the same training


@pytest.mark.whole
def test_in_bf16_it_is_the_single_device(data, tmp_path):
    """Autocast computes in bf16, and so are the terms that are added up."""
    agree_in_bf16("tp", tmp_path, data, 1e-3, 2e-2, mesh=(1, 1, 2))


@pytest.mark.whole
def test_sizes_that_do_not_divide_evenly(tmp_path):
    """Three ranks share nano's three heads and a vocabulary of 384."""
    data = make_dataset(tmp_path / "data")
    flags = ("--preset", "nano", "--precision", "fp32", "--max-steps", 3,
             "--sequence-length", 32, "--microbatch-size", 4,
             "--eval-minibatches", 2)
    std = train("std", tmp_path / "std", *flags, data=data)
    agree(train("tp", tmp_path / "tp", *flags, data=data, mesh=(1, 1, 3)),
          std, learning_rate=2e-3)


@pytest.mark.whole
def test_compiled(data, tmp_path):
    """Block by block; the checkpoint knows nothing of it."""
    agree_compiled("tp", 1, tmp_path, data, mesh=(1, 1, 2))


def test_a_resumed_run_does_not_inherit_the_mesh(data, tmp_path):
    first = train("tp", tmp_path / "run", "--max-steps", 2, data=data,
                  mesh=(1, 1, 2))
    assert first.status == 0, first.err
    then = train("tp", tmp_path / "run", "--resume", "--max-steps", 3)
    assert then.status == 0, then.err  # one process
    assert "resuming after step 1" in then.out


# ------------------------------------------------ sizes that do not fit


@pytest.mark.whole
@pytest.mark.parametrize(("stage", "size", "flags", "words"), [
    ("tp", 1, ["--tensor-parallel", 2], ["1 process(es)", "multiple"]),
    ("tp", 3, ["--tensor-parallel", 2], ["3 process(es)", "groups of 2"]),
    ("tp", 3, ["--tensor-parallel", 3], ["--tensor-parallel 3", "4 heads"]),
    ("tp", 1, ["--tensor-parallel", 0], ["--tensor-parallel must be 1"]),
    ("tp", 4, ["--tensor-parallel", 2, "--microbatch-size", 8],
     ["8 samples", "not divisible by 16", "microbatches of 8"]),
    ("3d", 1, ["--pipeline-parallel", 0], ["--pipeline-parallel must be 1"]),
    ("3d", 2, ["--pipeline-parallel", 2, "--tensor-parallel", 2],
     ["2 process(es)", "groups of 4"]),
    ("3d", 5, ["--pipeline-parallel", 5], ["more than the 4 layers"]),
    ("3d", 2, ["--pipeline-parallel", 2, "--microbatch-size", 8],
     ["1 microbatch(es) of 8", "--pipeline-parallel 2", "smaller"]),
], ids=lambda value: value[0] if isinstance(value, list) else str(value))
def test_sizes_that_do_not_fit_are_one_line(
        data, tmp_path, stage, size, flags, words):
    result = train(stage, tmp_path / "run", *flags, data=data,
                   world_size=size if size > 1 else None)
    assert result.status == 1
    (line,) = result.ranks[0].err.splitlines()
    assert line.startswith("error: ")
    for word in words:
        assert word in line
