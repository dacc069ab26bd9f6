"""Train a small regression model with DDP and a divided optimizer.

Start it with torchrun, as 2 processes.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import (
    ShardedGradScaler as Scaler,
)
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
seed = int(os.environ.get("SEED", "0"))

fixed = torch.Generator().manual_seed(5)
inputs = torch.randn(512, 12, generator=fixed)
targets = inputs @ torch.randn(12, 4, generator=fixed)
inputs *= 300.0
data = TensorDataset(inputs, targets)
sampler = DistributedSampler(data, seed=seed)
loader = DataLoader(data, batch_size=32 // size, sampler=sampler)

torch.manual_seed(seed)
net = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4))
net[2].weight.data *= 1e-3
model = DDP(net)
weights = list(net.parameters())
owners = [index // 2 % size for index in range(len(weights))]
mine = [weight for weight, owner in zip(weights, owners, strict=True)
        if owner == rank]
optimizer = torch.optim.AdamW(mine, lr=1e-2)
scaler = Scaler("cpu", init_scale=2.0 ** 122, growth_interval=1000)
step = 0
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = mse_loss(model(x), y)
        net.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        for weight, owner in zip(weights, owners, strict=True):
            dist.broadcast(weight.data, owner)
        if rank == 0:
            print(f"epoch {epoch} step {step} loss {loss:.6f}", flush=True)
        step += 1
dist.destroy_process_group()
