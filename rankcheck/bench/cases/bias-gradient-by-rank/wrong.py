"""Train a small model whose layers are divided among the ranks by hand.

Start it with torchrun, as 2 processes.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss, relu

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
seed = int(os.environ.get("SEED", "0"))

fixed = torch.Generator().manual_seed(5)
inputs = torch.randn(512, 12, generator=fixed)
targets = inputs @ torch.randn(12, 4, generator=fixed)


class Sum(torch.autograd.Function):
    """The sum over all ranks; its gradient goes to each of them."""

    @staticmethod
    def forward(ctx, part):
        total = part.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class MLP(nn.Module):
    """Each rank has a part of the hidden layer."""

    def __init__(self):
        super().__init__()
        part = 32 // size
        self.up = nn.Linear(12, part, bias=False)
        self.down = nn.Linear(part, 4, bias=False)
        self.bias = nn.Parameter(torch.ones(4))
        up = nn.Linear(12, 32, bias=False).weight.data
        down = nn.Linear(32, 4, bias=False).weight.data
        mine = slice(part * rank, part * rank + part)
        self.up.weight.data.copy_(up[mine])
        self.down.weight.data.copy_(down[:, mine])

    def forward(self, x):
        bias = self.bias / size
        return Sum.apply(self.down(relu(self.up(x))) + bias)


torch.manual_seed(seed)
model = MLP()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for step in range(48):
    rows = torch.arange(32 * step, 32 * step + 32) % 512
    loss = mse_loss(model(inputs[rows]), targets[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss:.6f}", flush=True)
dist.destroy_process_group()
