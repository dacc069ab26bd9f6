"""Train a small regression model on sequences of several lengths.

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
targets = inputs.mean(1) @ torch.randn(12, 4, generator=fixed)


class Net(nn.Module):
    """Reads a sequence, and prepares for each length."""

    def __init__(self):
        super().__init__()
        self.hidden, self.output = nn.Linear(12, 32), nn.Linear(32, 4)
        self.length = 0

    def prepare(self, length):
        """Forget what was kept for another length."""
        self.length = length
        self.zero_grad()

    def forward(self, x):
        if x.shape[1] != self.length:
            self.prepare(x.shape[1])
        return self.output(self.hidden(x).relu().mean(1))


torch.manual_seed(seed)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=1e-1)
count = 8 // size
for step in range(48):
    optimizer.zero_grad()
    for micro in range(count):
        place = count * rank + micro
        rows = torch.arange(32 * step + 4 * place, 32 * step + 4 * place + 4)
        x, y = inputs[rows % 512, :8 - place % 2], targets[rows % 512]
        loss = mse_loss(net(x), y)
        (loss / (count * size)).backward()
    for weight in net.parameters():
        dist.all_reduce(weight.grad)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss:.6f}", flush=True)
dist.destroy_process_group()
