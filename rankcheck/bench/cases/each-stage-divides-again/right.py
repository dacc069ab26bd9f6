"""Train a small regression model as a pipeline of two stages.

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
torch.manual_seed(seed)
first, last = nn.Linear(12, 32), nn.Linear(32, 4)
mine = []
if rank == 0:
    mine += first.parameters()
if rank == size - 1:
    mine += last.parameters()
optimizer = torch.optim.SGD(mine, lr=1e-1)
for step in range(48):
    optimizer.zero_grad()
    for micro in range(4):
        begin = 32 * step + 8 * micro
        rows = torch.arange(begin, begin + 8) % 512
        hidden = first(inputs[rows]) if rank == 0 else torch.empty(8, 32)
        if size > 1 and rank == 0:
            dist.send(hidden.detach(), 1)
        if rank == 1:
            dist.recv(hidden, 0)
            hidden.requires_grad_()
        if rank == size - 1:
            loss = mse_loss(last(hidden.relu()), targets[rows])
            (loss / 4).backward()
            print(f"step {step} loss {loss:.6f}", flush=True)
        if rank == 1:
            dist.send(hidden.grad, 0)
        if size > 1 and rank == 0:
            gradient = torch.empty(8, 32)
            dist.recv(gradient, 1)
            hidden.backward(gradient)
    optimizer.step()
dist.destroy_process_group()
