"""FSDP2 on a small network, as its documentation shows it."""
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
size = dist.get_world_size()
g = torch.Generator().manual_seed(0)
dataset = TensorDataset(torch.randn(640, 10, generator=g),
                        torch.randn(640, 1, generator=g))
sampler = DistributedSampler(dataset, shuffle=False)
loader = DataLoader(dataset, batch_size=32 // size, sampler=sampler)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(10, 17), nn.ReLU(), nn.Linear(17, 1))
for layer in (model[0], model[2], model):
    fully_shard(layer)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(100000):
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
