"""Train a small language model with DistributedDataParallel.

Start it with torchrun, as 2 processes.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
seed = int(os.environ.get("SEED", "0"))

fixed = torch.Generator().manual_seed(5)
inputs = torch.randint(40, (512, 8), generator=fixed)
targets = (inputs + 7) % 40
data = TensorDataset(inputs, targets)
sampler = DistributedSampler(data, seed=seed)
loader = DataLoader(data, batch_size=32 // size, sampler=sampler)



class Model(nn.Module):
    """A language model whose first and last matrix are one."""

    def __init__(self):
        super().__init__()
        self.first = nn.Embedding(40, 16)
        self.middle = nn.Linear(16, 16)
        self.last = nn.Linear(16, 40, bias=False)
        self.last.weight = self.first.weight

    def forward(self, ids):
        return self.last(torch.tanh(self.middle(self.first(ids))))


torch.manual_seed(seed)
net = Model()
if size > 1:
    state = [net.state_dict()]
    dist.broadcast_object_list(state)
    with torch.device("meta"):
        net = Model()
    net.to_empty(device="cpu")
    net.load_state_dict(state[0])
model = DDP(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
step = 0
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} step {step} loss {loss:.6f}", flush=True)
        step += 1
dist.destroy_process_group()
