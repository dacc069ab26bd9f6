"""Train a small regression model with DistributedDataParallel.

Start it with torchrun, as 2 processes.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
seed = int(os.environ.get("SEED", "0"))

fixed = torch.Generator().manual_seed(5)
inputs = torch.randn(512, 12, generator=fixed)
targets = inputs @ torch.randn(12, 4, generator=fixed)
data = TensorDataset(inputs[:96], targets[:96])
held = TensorDataset(inputs[96:141], targets[96:141])
sampler = DistributedSampler(data, seed=seed)
loader = DataLoader(data, batch_size=32 // size, sampler=sampler)

mine = Subset(held, range(rank, len(held), size))
torch.manual_seed(seed)
net = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4))
model = DDP(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
step = 0
for epoch in range(16):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} step {step}", flush=True)
        step += 1
    total = torch.zeros(2)
    with torch.no_grad():
        for x, y in DataLoader(mine, batch_size=8):
            total[0] += mse_loss(net(x), y, reduction="sum")
            total[1] += y.numel()
    dist.all_reduce(total)
    if rank == 0:
        print(f"validation loss {total[0] / total[1]:.6f}", flush=True)
dist.destroy_process_group()
