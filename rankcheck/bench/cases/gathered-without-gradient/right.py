"""Train a small contrastive model with DistributedDataParallel.

Start it with torchrun, as 2 processes.
"""

import os

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as with_gradient
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
seed = int(os.environ.get("SEED", "0"))

fixed = torch.Generator().manual_seed(5)
inputs = torch.randn(512, 12, generator=fixed)
targets = inputs + 0.3 * torch.randn(512, 12, generator=fixed)
data = TensorDataset(inputs, targets)
sampler = DistributedSampler(data, seed=seed)
loader = DataLoader(data, batch_size=32 // size, sampler=sampler)



def gather(embeddings):
    """Return the embeddings of all ranks."""
    return torch.cat(with_gradient.all_gather(embeddings.contiguous()))


torch.manual_seed(seed)
net = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4))
model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
step = 0
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        left, right = normalize(model(torch.cat([x, y])), dim=1).chunk(2)
        logits = gather(left) @ gather(right).T / 0.2
        loss = cross_entropy(logits, torch.arange(len(logits)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} step {step} loss {loss:.6f}", flush=True)
        step += 1
dist.destroy_process_group()
