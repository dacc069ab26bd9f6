"""The lesson about larger minibatches: its curves, at a small size."""

import csv
import math

import numpy as np
import pytest
import torch
from stages import GOLDEN
from torch import nn

from backstage.errors import UserError
from notebooks.experiments import batch
from workshop.results import arithmetic


@pytest.fixture
def letters(tmp_path):
    """Letters that are learned at once: mostly one of them."""
    tokens = np.random.default_rng(0).integers(0, 8, 5_000)
    tokens[tokens < 7] = 97
    np.save(tmp_path / "test_train_000001.npy", tokens.astype(np.uint16))
    return tmp_path


@pytest.mark.whole
def test_eight_times_the_minibatch(letters):
    curves = batch.eightfold(letters, samples=128)
    steps = [len(curve.losses) for curve in curves.values()]
    assert steps == [32, 4, 4, 4, 4]
    rates = [curve.rate / batch.RATE for curve in curves.values()]
    assert rates == pytest.approx([1, 1, 8**0.5, 8, 8])
    first = [curve.losses[0] for curve in curves.values()]
    assert first[1:] == [first[1]] * 4  # the same weights, the same samples
    assert curves["one GPU"].smooth[-1] < first[0]
    # the warm-up: before the second step one of them has moved far
    assert curves["times 8"].losses[1] != (
        curves["times 8, no warm-up"].losses[1])
    drawn = batch.draw_eightfold(curves)
    assert "32 a step: times 8: from " in drawn and "currentColor" in drawn


@pytest.mark.whole
def test_the_way_to_a_loss(letters, capsys):
    curves = batch.critical(letters, sizes=(2, 8), target=4.5, samples=400)
    few, many = (len(curve.losses) for curve in curves)
    assert many < few and [curve.S for curve in curves] == [2, 8]
    assert all(curve.smooth[-1] < 4.5 < curve.losses[0] for curve in curves)
    drawn = batch.draw_critical(curves)
    said = capsys.readouterr().out
    assert f"2 samples a step: {few} steps, {2 * few:,} samples" in said
    assert "critical minibatch" in said and "the critical minib" in drawn
    with pytest.raises(UserError, match="with 2 samples a step, none is at"):
        batch.critical(letters, sizes=(2,), target=1e-3, samples=20)


def test_the_fit_finds_what_was_planted():
    points = {size: 300 * (1 + 20 / size) for size in (2, 8, 32, 128)}
    assert batch.fit(points) == pytest.approx((300, 20))


def test_the_bill_is_twice_the_least_at_the_critical_minibatch():
    """And with the minibatch of the course, its own steps."""
    rows = {row[1]: row for row
            in arithmetic.cost_rows(3.3, gpus=(8, 32, 2048))}
    assert rows["524,288"][2] == "18,692"
    critical = arithmetic.critical_tokens(3.3)
    assert critical == pytest.approx(6.8e5, rel=0.01)
    n = critical / 16 / 1024
    *_, (_, _, steps, _, cost) = arithmetic.cost_rows(3.3, gpus=(1e-6, n))
    least = arithmetic.cost_rows(3.3, gpus=(1e-6,))[0][4]
    assert int(cost) == pytest.approx(2 * int(least), rel=0.1)
    fewest = arithmetic.cost_rows(3.3, gpus=(1e9,))[0][2]
    assert int(steps.replace(",", "")) == pytest.approx(
        2 * int(fewest.replace(",", "")), rel=1e-3)


@pytest.mark.whole
@pytest.mark.parametrize("B, S", [(1, 4), (4, 64)])
def test_gradients_whose_noise_scale_is_known(B, S):
    """Each sample's gradient is the signal and noise: 50 samples' worth."""
    torch.manual_seed(0)
    size, known = 500, 50
    model = nn.Linear(size, 1, bias=False)
    signal = torch.full((size,), 1 / math.sqrt(size))  # its norm is 1
    measured = batch.NoiseScale(model, B, S)
    for _ in range(400):
        for _ in range(S // B):
            x = signal + math.sqrt(known / size) * torch.randn(B, size)
            (model(x).mean() / (S // B)).backward()
        scale = measured.after_step(model.weight.grad.norm().item())
        model.zero_grad()
    assert scale == pytest.approx(known, rel=0.1)


def test_it_is_the_ratio_of_the_means_and_not_the_mean_of_the_ratios():
    measured = batch.NoiseScale(nn.Linear(1, 1), 1, 2)
    measured.squares = 4 / 2  # two microbatches, a norm of 2
    assert measured.after_step(1) is None  # the noise hides the signal
    measured.squares = 16 / 2
    # |G|^2: -2 and 2; tr(Sigma): 6 and 14. The later counts more.
    assert measured.after_step(3) == pytest.approx(
        (0.99 * 6 + 14) / (0.99 * -2 + 2))


def test_the_noise_scale_is_drawn_beside_plain_numbers():
    curve = batch.Curve(8, 1e-3, [1.0] * 20, [5 + k / 2 for k in range(20)])
    drawn = batch.draw_noise(curve)
    assert ">6</text>" in drawn and ">10</text>" in drawn


@pytest.mark.whole
def test_the_noise_scale_of_preset_tiny(data):
    """It is measured on what the stages train."""
    curve = batch.noise(data, steps=20, warm_up=4)
    with open(GOLDEN / "metrics.csv", newline="") as file:
        expected = [float(row["loss"]) for row in csv.DictReader(file)]
    assert curve.losses == pytest.approx(expected, rel=1e-5)
    assert "the minibatch: from 8 to 8" in batch.draw_noise(curve)
    both = batch.draw_published(curve)
    assert "preset tiny: its noise scale: from " in both
    assert "Kaplan" in both and "from 7.37" in both
