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
inputs = torch.randn(4096, 12, generator=fixed)
targets = inputs @ torch.randn(12, 4, generator=fixed)

torch.manual_seed(seed)
net = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4))
router = torch.randn(12, 4)
bias = torch.zeros(4)
experts = nn.ModuleList(nn.Linear(32, 4) for _ in range(4))
net = net[:2]
weights = [*net.parameters(), *experts.parameters()]
optimizer = torch.optim.AdamW(weights, lr=1e-2)
part = 4096 // size
x, y = inputs[rank::size], targets[rank::size]
for step in range(24):
    chosen = (x @ router + bias).argmax(1)
    load = torch.bincount(chosen, minlength=4).to(torch.bfloat16)
    dist.all_reduce(load)
    bias += 1e-3 * (load.float() - 1024.0)
    hidden = net(x)
    answers = torch.stack([expert(hidden) for expert in experts])
    loss = mse_loss(answers[chosen, torch.arange(part)], y)
    optimizer.zero_grad()
    loss.backward()
    for weight in weights:
        dist.all_reduce(weight.grad)
        weight.grad /= size
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss:.6f}", flush=True)
dist.destroy_process_group()
