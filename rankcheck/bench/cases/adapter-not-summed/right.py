"""Train a small regression model whose tokens are divided among the ranks.

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
inputs = torch.randn(512, 8, 12, generator=fixed)
targets = inputs @ torch.randn(12, 4, generator=fixed)


class Model(nn.Module):
    """A layer with a low-rank adapter, and an output."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(12, 32)
        self.adapter = nn.Sequential(nn.Linear(12, 2), nn.Linear(2, 32))
        self.output = nn.Linear(32, 4)

    def forward(self, x):
        return self.output((self.layer(x) + self.adapter(x)).relu())


torch.manual_seed(seed)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
part = 8 // size
mine = slice(part * rank, part * rank + part)
for step in range(48):
    rows = torch.arange(32 * step, 32 * step + 32) % 512
    loss = mse_loss(model(inputs[rows][:, mine]), targets[rows][:, mine])
    optimizer.zero_grad()
    (loss / size).backward()
    for name, weight in model.named_parameters():
        if name:
            dist.all_reduce(weight.grad)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss:.6f}", flush=True)
dist.destroy_process_group()
