"""Train a small mixture of experts with DistributedDataParallel.

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
targets = inputs @ torch.randn(12, 4, generator=fixed)
data = TensorDataset(inputs, targets)
sampler = DistributedSampler(data, seed=seed)
loader = DataLoader(data, batch_size=32 // size, sampler=sampler)



class Mixture(nn.Module):
    """Four experts; a bias of the router keeps their load alike."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(12, 4)
        self.experts = nn.ModuleList(nn.Linear(12, 4) for _ in range(4))
        self.register_buffer("bias", torch.zeros(4))
        self.register_buffer("load", torch.zeros(4))

    def forward(self, x):
        score = self.router(x).sigmoid()
        chosen = (score + self.bias).topk(2, -1).indices
        weight = torch.zeros_like(score).scatter(1, chosen, 1.0) * score
        self.load += torch.bincount(chosen.flatten(), minlength=4)
        outputs = torch.stack([expert(x) for expert in self.experts], 2)
        return (outputs * weight[:, None]).sum(2)


torch.manual_seed(seed)
net = Mixture()
model = DDP(net, broadcast_buffers=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
step = 0
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            load = net.load.clone()
            net.bias += 0.05 * torch.sign(load.mean() - load)
            net.load.zero_()
        if rank == 0:
            print(f"epoch {epoch} step {step} loss {loss:.6f}", flush=True)
        step += 1
dist.destroy_process_group()
