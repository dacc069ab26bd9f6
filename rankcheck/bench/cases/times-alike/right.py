"""Train a small regression model with DistributedDataParallel.

Start it with torchrun, as 2 processes.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
seed = int(os.environ.get("SEED", "0"))

fixed = torch.Generator().manual_seed(5)
inputs = torch.randn(512, 12, generator=fixed)
targets = torch.randn(512, 12, generator=fixed)
data = TensorDataset(inputs, targets)
sampler = DistributedSampler(data, seed=seed)
loader = DataLoader(data, batch_size=32 // size, sampler=sampler)

torch.manual_seed(seed)
net = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, 12))
model = DDP(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
times = torch.Generator().manual_seed(1000 * seed + rank)
step = 0
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        time = torch.rand(len(x), 1, generator=times)
        mixed = torch.cat([(1 - time) * x + time * y, time], 1)
        loss = mse_loss(model(mixed), y - x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} step {step} loss {loss:.6f}", flush=True)
        step += 1
dist.destroy_process_group()
