"""Train with FSDP2, and save the whole state once.

Start it with torchrun, as 2 processes.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
for layer in (model[0], model[1], model):
    fully_shard(layer)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(40):
    loss = model(torch.randn(4, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == 20 and rank == 0:
        state = {key: value.full_tensor()
                 for key, value in model.state_dict().items()}
        torch.save(state, "model.pt")
dist.barrier()
dist.destroy_process_group()
