"""`verify`: scripts in others' styles, right and with mistakes, each named."""

import pytest
from conftest import edit

from backstage import ROOT
from workshop.__main__ import verify

FOREIGN = ROOT / "tests" / "foreign"

DDP = '''
import os, torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank, size = dist.get_rank(), dist.get_world_size()
g = torch.Generator().manual_seed(0)
dataset = TensorDataset(torch.randn(640, 10, generator=g),
                        torch.randn(640, 1, generator=g))
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=32 // size, sampler=sampler)
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(10, 900), nn.ReLU(), nn.Dropout(0.2),
                          nn.Linear(900, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(100):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    if rank == 0:
        print("epoch", epoch, loss.item())
raise SystemExit("verify should have ended it")
'''
BY_HAND = edit(
    DDP, ("model = DDP(nn.Sequential(", "model = (nn.Sequential("),
    ("        loss.backward()\n", """        loss.backward()
        for weight in model.parameters():
            dist.all_reduce(weight.grad)
            weight.grad /= size
"""))
IMAGES = edit(
    DDP, ("torch.randn(640, 10, gen", "torch.randn(640, 3, 8, 8, gen"),
    ("nn.Linear(10, 900), nn.ReLU(), nn.Dropout(0.2),",
     "nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.ReLU(),"),
    ("nn.Linear(900, 1)", "nn.Linear(144, 1)"))
TWO = edit(
    DDP, ("optimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
          """class Both:
    def __init__(self, *optimizers): self.optimizers = optimizers
    def zero_grad(self): [one.zero_grad() for one in self.optimizers]
    def step(self): [one.step() for one in self.optimizers]
first, *others = model.parameters()
optimizer = Both(torch.optim.AdamW([first], lr=1e-3),
                 torch.optim.SGD(others, lr=0.1))"""))
SCRIPTS = {"ddp": DDP, "by hand": BY_HAND, "images": IMAGES, "two": TWO} | {
    name: (FOREIGN / f"{name}.py").read_text()
    for name in ("nano", "trainer", "sharded", "gan", "stream")}

RIGHT = {
    "ddp": ("an update has 32 samples, as with one process",
            "gradients are the mean of the ranks' own",
            "gradients agree with a single process",
            "weights, by the length of their way, agree",
            "dropout: it was switched off"),
    "by hand": ("gradients agree with a single process",
                "gradients are reduced once an update"),
    "images": ("BatchNorm's running statistics differ between the ranks",
               "BatchNorm takes the mean over the samples of one process"),
    "two": ("gradients agree with a single process",
            "weights, by the length of their way, agree"),
    "nano": ("the ranks read different samples",
             "gradients are the mean of the ranks' own"),
    "trainer": ("an update has 16 samples, with one process 8",
                "gradients agree with a single process"),
    "sharded": ("weights, by the length of their way, agree",
                "what each rank alone has computed of the gradients"),
    "gan": ("weights are equal on all ranks in all 8 updates",),
    "stream": ("an update has 16 samples, with one process 8",
               "gradients are the mean of the ranks' own"),
}
STEP = "        optimizer.step()\n"
MISTAKES = [
    ("ddp", "all read the same", "FAIL  all 2 ranks read the same samples",
     ("loader = DataLoader(dataset, batch_size=32 // size, sampler=sampler)",
      "loader = DataLoader(dataset, batch_size=32 // size)")),
    ("ddp", "minibatch multiplied", "warn  an update has 64 samples, with "
     "one process 32; the learning rate is the same", ("32 // size", "32")),
    ("ddp", "around the wrapper", "call model(...), not model.module(...)",
     ("model(x)", "model.module(x)")),
    ("ddp", "no set_epoch", "warn  a DistributedSampler shuffles, and "
     "set_epoch was not called", ("    sampler.set_epoch(epoch)\n", "")),
    ("ddp", "rank 0 alone steps", "FAIL  rank 1 makes 0 updates",
     (STEP, "        if rank == 0: optimizer.step()\n")),
    ("ddp", "unused parameters", "find_unused_parameters=True",
     ("model = DDP(nn", "model = (nn"),
     ("optimizer = torch", "model.odd = nn.Parameter(torch.zeros(3))\n"
      "model = DDP(model)\noptimizer = torch")),
    ("ddp", "all write", "FAIL  several ranks write log.txt",
     (STEP, STEP + "        open('log.txt', 'a').write('x')\n")),
    ("ddp", "all print", "warn  several ranks print the same lines",
     (STEP, STEP + "        print('step', epoch)\n")),
    ("ddp", "another learning rate", "FAIL  in update 0 the weights are off",
     ("lr=0.1", "lr=0.1 * size")),
    ("by hand", "seeds that differ", "FAIL  rank 1 begins with other weights "
     "than rank 0: 0.weight", ("manual_seed(0)\nmodel",
                               "manual_seed(rank)\nmodel")),
    ("by hand", "not reduced", "FAIL  gradients are not reduced",
     ("            dist.all_reduce(weight.grad)\n", "")),
    ("by hand", "summed", "FAIL  in update 0 the gradients are the sum over "
     "all ranks, not the mean", ("            weight.grad /= size\n", "")),
    ("by hand", "broadcast", "FAIL  in update 0 all ranks have the gradients "
     "of rank 0 alone", ("dist.all_reduce(weight.grad)\n            "
                         "weight.grad /= size",
                         "dist.broadcast(weight.grad, 0)")),
    ("by hand", "clipped first", "FAIL  gradients are clipped before they "
     "are reduced", ("        nn.utils.clip_grad_norm_(model.parameters(), "
                     "0.5)\n", ""),
     ("        loss.backward()\n", "        loss.backward()\n        "
      "nn.utils.clip_grad_norm_(model.parameters(), 0.5)\n")),
    ("ddp", "samplers of their own", "FAIL  the ranks' DistributedSamplers "
     "have different seeds", ("DistributedSampler(dataset)",
                              "DistributedSampler(dataset, seed=rank)")),
    ("ddp", "a collective on rank 0", "FAIL  as 2 processes ",
     ("        optimizer.zero_grad()\n", "        optimizer.zero_grad()\n"
      "        if rank == 0 and size > 1: dist.barrier()\n")),
    ("by hand", "divided twice", "the gradients are 0.5 times those of one "
     "process", ("mse_loss(model(x), y)", "mse_loss(model(x), y) / size")),
    ("sharded", "all read the same", "FAIL  all 2 ranks read the same "
     "samples", (", sampler=sampler)", ")")),
    ("sharded", "another learning rate", "FAIL  in update 0 the weights are "
     "off", ("lr=1e-3", "lr=1e-3 * size")),
    ("gan", "a step without the wrapper", "FAIL  in update 1 the gradients "
     "of rank 1 are not rank 0's", ("fake = netG(", "fake = netG.module(")),
    ("gan", "the same noise", "samples are read by several ranks in the same "
     "update", ("manual_seed(100 + rank)", "manual_seed(100)")),
    ("stream", "all read the same", "FAIL  all 2 ranks read the same samples",
     ("if i % (size * 2) == rank * 2 + worker.id",
      "if i % 2 == worker.id")),
    ("stream", "workers read the same", "were read in an earlier update",
     ("if i % (size * 2) == rank * 2 + worker.id",
      "if i % size == (rank + worker.id) % size")),
    ("images", "all read the same", "FAIL  all 2 ranks read the same samples",
     (", sampler=sampler)", ")")),
    ("images", "no wrapper", "FAIL  gradients are not reduced",
     ("model = DDP(nn", "model = (nn")),
    ("two", "around the wrapper", "FAIL  gradients are not reduced",
     ("model(x)", "model.module(x)")),
    ("two", "one optimizer on rank 0", "FAIL  rank 1 makes 4 updates",
     ("[one.step() for one in self.optimizers]",
      "[one.step() for one in self.optimizers[:2 - rank]]")),
    ("nano", "the same seed", "samples are read by several ranks in the "
     "same update",  # rank 0 alone evaluates, and then draws others
     ("manual_seed(1337 + seed_offset)", "manual_seed(1337)")),
    ("nano", "never reduced", "FAIL  gradients are not reduced",
     ("                micro_step == gradient_accumulation_steps - 1)",
      "                False)")),
    ("nano", "always reduced", "warn  gradients are reduced 3 times",
     ("                micro_step == gradient_accumulation_steps - 1)",
      "                True)")),
    ("nano", "around the wrapper", "call model(...), not model.module(...)",
     ("logits = model(X)", "logits = raw_model(X)")),
]


def outcome(text, folder, monkeypatch, capsys):
    """(exit status, what it prints) of a script."""
    script = folder / "their_train.py"
    script.write_text(text)
    monkeypatch.chdir(folder)
    status = verify([str(script)], 2, 4)
    out = capsys.readouterr().out
    return status, out


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_script(name, tmp_path, monkeypatch, capsys):
    before = SCRIPTS[name]
    status, out = outcome(before, tmp_path, monkeypatch, capsys)
    assert status == 0 and "FAIL" not in out, out
    assert all(words in out for words in RIGHT[name]), out
    assert not [words for which, _, words, *_ in MISTAKES
                if which == name and words in out]
    assert (tmp_path / "their_train.py").read_text() == before


@pytest.mark.parametrize(("name", "mistake", "words", "pairs"), [
    pytest.param(name, mistake, words, pairs, id=f"{name}-{mistake}")
    for name, mistake, words, *pairs in MISTAKES])
def test_a_mistake_is_named(name, mistake, words, pairs, tmp_path,
                            monkeypatch, capsys):
    status, out = outcome(edit(SCRIPTS[name], *pairs), tmp_path, monkeypatch,
                          capsys)
    assert words in out, out
    assert status == ("FAIL" in out)
