"""Train a small autoencoder with a codebook and DistributedDataParallel.

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
targets = inputs
data = TensorDataset(inputs, targets)
sampler = DistributedSampler(data, seed=seed)
loader = DataLoader(data, batch_size=32 // size, sampler=sampler)


class Codebook(nn.Module):
    """An autoencoder whose codes are the first that it has encoded."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(12, 6), nn.Linear(6, 12)
        self.register_buffer("book", torch.zeros(8, 6))
        self.started = False

    def forward(self, x):
        code = self.encoder(x)
        if not self.started:
            self.start(code.detach())
        nearest = torch.cdist(code, self.book).argmin(1)
        rounded = self.book[nearest]
        return self.decoder(code + (rounded - code).detach()), code, rounded

    def start(self, code):
        """Begin with the first codes of the first batch."""
        parts = [torch.empty_like(code) for _ in range(size)]
        dist.all_gather(parts, code.contiguous())
        code = torch.stack(parts, 1).flatten(0, 1)  # as one process has them
        self.book.copy_(code[:8])
        self.started = True


torch.manual_seed(seed)
model = DDP(Codebook(), broadcast_buffers=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
step = 0
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        output, code, nearest = model(x)
        loss = mse_loss(output, y) + 0.25 * mse_loss(code, nearest)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} step {step} loss {loss:.6f}", flush=True)
        step += 1
dist.destroy_process_group()
