"""The gradient noise scale: --noise-scale."""

import math

import pytest
import torch
from stages import FOLDER, train
from torch import nn

from backstage.noise import NoiseScale

COLUMNS = ("microbatch_norm", "noise_scale")
FLAGS = ("--noise-scale", "--max-steps", 6, "--checkpoint-every", 3)


@pytest.mark.parametrize("B, S", [(1, 4), (4, 64)])
def test_on_gradients_whose_noise_scale_is_known(B, S):
    """Each sample's gradient is the signal and noise: 50 samples' worth."""
    torch.manual_seed(0)
    size, known, found = 500, 50, []
    model = nn.Linear(size, 1, bias=False)
    signal = torch.full((size,), 1 / math.sqrt(size))  # its norm is 1
    scale = NoiseScale(B, S)
    scale.watch(model)
    for _ in range(400):
        for _ in range(S // B):
            x = signal + math.sqrt(known / size) * torch.randn(B, size)
            (model(x).mean() / (S // B)).backward()
        norm = model.weight.grad.norm().item()
        found.append(scale.add(norm, scale.read()))
        model.zero_grad()
    assert found[-1] == pytest.approx(known, rel=0.1)


def test_it_is_the_ratio_of_the_means_and_not_the_mean_of_the_ratios():
    scale = NoiseScale(1, 2)
    assert scale.add(1, 2) is None  # the noise hides the signal
    # |G|^2: -2 and 2; tr(Sigma): 6 and 14. The later counts more.
    assert scale.add(3, 4) == pytest.approx(
        (0.99 * 6 + 14) / (0.99 * -2 + 2))


def test_the_same_on_one_process_and_on_two(tmp_path):
    """And in a run that goes on from a checkpoint, digit by digit."""
    one = train("std", tmp_path / "std", *FLAGS, data=FOLDER / "golden")
    two = train("ddp", tmp_path / "ddp", *FLAGS, data=FOLDER / "golden",
                mesh=(1, 2, 1))
    for result in one, two:
        assert result.status == 0 and not result.err
        assert all(small > big for small, big in zip(
            result.column("microbatch_norm"), result.column("norm"),
            strict=True))
    for name in COLUMNS:
        assert two.column(name) == pytest.approx(one.column(name), rel=1e-4)

    measured = [one.column(name) for name in COLUMNS]
    (one.folder / "checkpoints" / "step_00000006.pt").unlink()
    again = train("std", one.folder, "--resume")
    assert again.status == 0, again.err
    assert [again.column(name) for name in COLUMNS] == measured


@pytest.mark.parametrize(("stage", "flags", "said"), [
    ("std", ("--microbatch-size", 8), "both have 8 samples: choose a smaller"),
    ("fsdp", (), "holds all of the model")])
def test_where_it_cannot_be_measured_is_one_line(
        stage, flags, said, tmp_path):
    result = train(stage, tmp_path / "run", *FLAGS, *flags,
                   data=FOLDER / "golden")
    assert result.status != 0 and said in result.err
    assert len(result.err.splitlines()) == 1
