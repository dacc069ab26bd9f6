"""`check lit`: the classic mistakes with Lightning are named."""

import pytest
from test_check import assert_named

from workshop.check import main
from workshop.diff import solution

TRAINER = "    trainer = L.Trainer(\n"
LOADERS = """\
*(DataLoader(Microbatches(data), batch_size=None)
                         for data in (train_data, val_data))"""

MISTAKES = {
    "accumulation missing": (
        [("accumulate_grad_batches=accumulation_steps, ", "")],
        "samples of step 0", "accumulate_grad_batches"),
    "loss divided twice": (
        [("return self(*batch)",
          "return self(*batch) / self.trainer.accumulate_grad_batches")],
        "gradients of step 0 are off",
        "divided by accumulation_steps twice"),
    "every rank reads the same samples": (
        [("rank, world_size, vocab_size)\n", "0, 1, vocab_size)\n")],
        "samples of step 0", "read the same samples"),
    "two workers read the same": (
        [("batch_size=None", "batch_size=None, num_workers=2")],
        "samples of step 0 are not 0 to 15, each once", "overlap"),
    "shuffled": (
        [(LOADERS, "DataLoader([next(train_data) for _ in range(48)], "
          "batch_size=None, shuffle=True), "
          "DataLoader(Microbatches(val_data), batch_size=None)")],
        "samples of step 0 are not 0 to 15, each once", ""),
    "schedule stepped per epoch": (
        [(', "interval": "step"', "")],
        "the learning rate of step 1", '"interval": "step"'),
    "precision left at its default": (
        [('        precision="bf16-mixed" if hp.precision == "bf16" else '
          '"32-true",\n', "")],
        "with --precision bf16 it trains in fp32", 'precision="bf16-mixed"'),
    "logged loss of the last microbatch only": (
        [(TRAINER, """\
    class LastOnly(LitRun):
        def on_train_batch_end(self, trainer, module, outputs, *batch):
            self.mean_loss.zero_()
            loss = outputs["loss"] * trainer.accumulate_grad_batches
            super().on_train_batch_end(
                trainer, module, {"loss": loss}, *batch)

""" + TRAINER), ("callbacks=[LitRun(", "callbacks=[LastOnly(")],
        "the logged loss of step 0", "one microbatch's"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_named(name, tmp_path, capsys):
    assert_named("lit", MISTAKES[name], tmp_path, capsys)


def test_the_solution_is_right(capsys):
    assert main("lit", solution("lit"))
    out = capsys.readouterr().out
    assert "FAIL" not in out and "trains in bf16" in out
