"""The lesson about larger minibatches: its curves, at a small size."""

import numpy as np
import pytest

from backstage.errors import UserError
from workshop import arithmetic
from workshop.notebook import batch
from workshop.results import plot, runs


@pytest.fixture
def data(tmp_path):
    """Letters that are learned at once: mostly one of them."""
    letters = np.random.default_rng(0).integers(0, 8, 5_000)
    letters[letters < 7] = 97
    np.save(tmp_path / "test_train_000001.npy", letters.astype(np.uint16))
    return tmp_path


def test_eight_times_the_minibatch(data):
    curves = batch.eightfold(data, samples=128)
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
def test_the_way_to_a_loss(data, capsys):
    curves = batch.critical(data, sizes=(2, 8), target=4, samples=800)
    few, many = (len(curve.losses) for curve in curves)
    assert many < few and [curve.S for curve in curves] == [2, 8]
    assert all(curve.smooth[-1] < 4 < curve.losses[0] for curve in curves)
    drawn = batch.draw_critical(curves)
    said = capsys.readouterr().out
    assert f"2 samples a step: {few} steps, {2 * few:,} samples" in said
    assert "critical minibatch" in said and "the critical minib" in drawn
    with pytest.raises(UserError, match="with 2 samples a step, none is at"):
        batch.critical(data, sizes=(2,), target=1e-3, samples=20)


def test_the_fit_finds_what_was_planted():
    points = {size: 300 * (1 + 20 / size) for size in (2, 8, 32, 128)}
    assert batch.fit(points) == pytest.approx((300, 20))


def test_the_bill_is_twice_the_least_at_the_critical_minibatch():
    """And with the minibatch of the course, its own steps."""
    rows = {row[1]: row for row in arithmetic.bills(3.3, gpus=(8, 32, 2048))}
    assert rows["524,288"][2] == "18,692"
    critical = arithmetic.critical_tokens(3.3)
    assert critical == pytest.approx(6.8e5, rel=0.01)
    n = critical / 16 / 1024
    *_, (_, _, steps, _, cost) = arithmetic.bills(3.3, gpus=(1e-6, n))
    least = arithmetic.bills(3.3, gpus=(1e-6,))[0][4]
    assert int(cost) == pytest.approx(2 * int(least), rel=0.1)
    fewest = arithmetic.bills(3.3, gpus=(1e9,))[0][2]
    assert int(steps.replace(",", "")) == pytest.approx(
        2 * int(fewest.replace(",", "")), rel=1e-3)


def test_the_picture_of_the_noise_scale():
    run, = (run for run in runs.find_examples()[0] if run.name == "std x 1")
    assert plot.missing(plot.noise, [run]) == (
        "not measured in these runs: train with --noise-scale, and "
        "microbatches smaller than the minibatch", True)
    for row in run.rows[2:]:  # where the noise hid the signal, it is empty
        row["noise_scale"] = 20.0
    assert plot.missing(plot.noise, [run]) == ("", False)
    assert "std x 1: from 20 to 20" in plot.themed(
        lambda ax: plot.noise(ax, [run]))
    both = plot.themed(lambda ax: plot.critical(ax, [run]))
    assert "std x 1: its noise scale: from 2560 to 2560" in both
    assert "Kaplan" in both and "from 7.37" in both
