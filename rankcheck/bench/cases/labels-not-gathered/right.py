"""Train embeddings with a contrastive loss over the samples of all ranks.

Start it with torchrun, as 2 processes.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.nn.functional import cross_entropy, normalize
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
seed = int(os.environ.get("SEED", "0"))

# A sample has four rows: a query, its answer, and two answers to others.
fixed = torch.Generator().manual_seed(3)
queries = torch.randn(256, 16, generator=fixed)
turn = torch.randn(16, 16, generator=fixed) / 4
noise = 0.2 * torch.randn(256, 16, generator=fixed)
others = torch.randn(256, 2, 16, generator=fixed)
answers = queries @ turn + noise
rows = torch.cat([torch.stack([queries, answers], 1), others], 1)
marks = torch.tensor([1, 0, 0, 0]).expand(256, 4)
data = TensorDataset(rows, marks)
sampler = DistributedSampler(data, seed=seed)
loader = DataLoader(data, batch_size=16 // size, sampler=sampler)


def contrast(vectors, labels):
    """Tell each query's answer from all other rows; a 1 marks a query."""
    vectors = torch.cat(all_gather(vectors))
    gathered = [torch.empty_like(labels) for _ in range(size)]
    dist.all_gather(gathered, labels)
    labels = torch.cat(gathered)
    starts = labels.nonzero().flatten()
    keep = torch.ones(len(vectors), dtype=torch.bool)
    keep[starts] = False
    scores = vectors[starts] @ vectors[keep].T / 0.2
    return cross_entropy(scores, starts - torch.arange(len(starts)))


torch.manual_seed(seed)
model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
step = 0
for epoch in range(3):
    sampler.set_epoch(epoch)
    for batch, labels in loader:
        vectors = normalize(model(batch.flatten(0, 1)), dim=1)
        loss = contrast(vectors, labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} step {step} loss {loss:.6f}", flush=True)
        step += 1
dist.destroy_process_group()
