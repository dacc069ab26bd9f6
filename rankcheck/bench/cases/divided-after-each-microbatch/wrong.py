"""Train a small regression model and average gradients by hand.

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
net = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(net.parameters(), lr=5e-2)
count = 8 // size
for step in range(48):
    optimizer.zero_grad()
    for micro in range(count):
        first = 32 * step + 4 * (count * rank + micro)
        rows = torch.arange(first, first + 4) % 512
        loss = mse_loss(net(inputs[rows]), targets[rows])
        loss.backward()
        for weight in net.parameters():
            weight.grad /= count
    for weight in net.parameters():
        dist.all_reduce(weight.grad)
        weight.grad /= size
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss:.6f}", flush=True)
dist.destroy_process_group()
