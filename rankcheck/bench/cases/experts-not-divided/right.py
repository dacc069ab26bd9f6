"""Train a small regression model with experts on different ranks.

Start it with torchrun, as 2 processes.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
seed = int(os.environ.get("SEED", "0"))

fixed = torch.Generator().manual_seed(5)
inputs = torch.randn(512, 12, generator=fixed)
targets = inputs @ torch.randn(12, 4, generator=fixed)


class Total(torch.autograd.Function):
    """The sum over all ranks, of values and of gradients."""

    @staticmethod
    def forward(ctx, part):
        total = part.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return Total.apply(gradient.contiguous())


torch.manual_seed(seed)
dense = nn.Linear(12, 32)
experts = nn.ModuleList(nn.Linear(32, 4) for _ in range(2))
mine = [number for number in range(2) if number % size == rank % size]
weights = [*dense.parameters()]
for number in mine:
    weights += experts[number].parameters()
optimizer = torch.optim.AdamW(weights, lr=1e-2)
part = 32 // size
own = slice(part * rank, part * rank + part)
for step in range(48):
    rows = torch.arange(32 * step, 32 * step + 32) % 512
    hidden = dense(inputs[rows[own]]).relu()
    before, after = own.start, 32 - own.stop
    everything = Total.apply(nn.functional.pad(hidden, (0, 0, before, after)))
    chosen = (inputs[rows, 0] > 0).long()
    answers = torch.zeros(32, 4)
    for number in mine:
        mask = (chosen == number)[:, None]
        answers = answers + mask * experts[number](everything)
    loss = mse_loss(Total.apply(answers)[own], targets[rows[own]])
    optimizer.zero_grad()
    loss.backward()
    for weight in dense.parameters():
        dist.all_reduce(weight.grad)
        weight.grad /= size
    for number in mine:
        for weight in experts[number].parameters():
            weight.grad /= size
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss:.6f}", flush=True)
dist.destroy_process_group()
