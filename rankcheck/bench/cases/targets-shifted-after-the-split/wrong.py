"""Train on sequences whose tokens are divided among the ranks.

Start it with torchrun, as 2 processes.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
seed = int(os.environ.get("SEED", "0"))

fixed = torch.Generator().manual_seed(5)
tokens = torch.randint(20, (256, 17), generator=fixed)
tokens[:, 1::2] = (tokens[:, :-1:2] + torch.arange(8)) % 20


class Model(nn.Module):
    """Predicts the next token from a token and its position."""

    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(20, 24)
        self.position = nn.Embedding(16, 24)
        self.hidden = nn.Linear(24, 24)
        self.output = nn.Linear(24, 20)

    def forward(self, ids, places):
        hidden = self.token(ids) + self.position(places)
        return self.output(self.hidden(hidden).relu())


torch.manual_seed(seed)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
part = 16 // size
places = torch.arange(part) + part * rank
for step in range(48):
    rows = torch.arange(32 * step, 32 * step + 32) % 256
    ids = tokens[rows, part * rank:part * rank + part]
    following = ids.roll(-1, 1)
    following[:, -1] = -100
    logits = model(ids, places)
    loss = cross_entropy(logits.flatten(0, 1), following.flatten())
    optimizer.zero_grad()
    loss.backward()
    for weight in model.parameters():
        dist.all_reduce(weight.grad)
        weight.grad /= size
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss:.6f}", flush=True)
dist.destroy_process_group()
