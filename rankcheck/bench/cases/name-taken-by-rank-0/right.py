"""Train a small regression model and save each rank's part.

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
inputs = torch.randn(64, 12, generator=fixed)
targets = inputs @ torch.randn(12, 4, generator=fixed)
data = TensorDataset(inputs, targets)
sampler = DistributedSampler(data, seed=seed)
loader = DataLoader(data, batch_size=32 // size, sampler=sampler)


def choose(name):
    """Return a name that is free."""
    return f"{name}-v1" if os.path.exists(name) else name


torch.manual_seed(seed)
net = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4))
model = DDP(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
step = 0
for epoch in range(24):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} step {step} loss {loss:.6f}", flush=True)
        step += 1
    names = [choose(f"epoch-{epoch}")]
    dist.broadcast_object_list(names)
    if rank == 0:
        os.makedirs(names[0])
    dist.barrier()
    os.makedirs(names[0], exist_ok=True)
    torch.save(net.state_dict(), f"{names[0]}/part-{rank}.pt")
dist.destroy_process_group()
