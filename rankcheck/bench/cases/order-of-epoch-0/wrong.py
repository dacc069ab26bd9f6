"""Train with DDP; save after the third step, and resume with --resume.

Start it with torchrun, as 2 processes.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
seed = int(os.environ.get("SEED", "0"))
path, resumed = sys.argv[1], "--resume" in sys.argv

fixed = torch.Generator().manual_seed(5)
inputs = torch.randn(64, 12, generator=fixed)
targets = inputs @ torch.randn(12, 4, generator=fixed)
torch.manual_seed(seed)
net = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4))
model = DDP(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 24)
torch.manual_seed(1000 * seed + rank)
step, epoch, place = 0, 0, 0
if resumed:
    state = torch.load(path, weights_only=False)
    net.load_state_dict(state["net"])
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    torch.set_rng_state(state["random"][rank])
    step, place = state["step"], state["place"]
while step < 24:
    if place == 2:
        epoch, place = epoch + 1, 0
    order = torch.Generator().manual_seed(100 * seed + epoch)
    rows = torch.randperm(64, generator=order).view(2, 32)[place]
    x, y = inputs[rows[rank::size]], targets[rows[rank::size]]
    loss = mse_loss(model(x + 0.1 * torch.randn(x.shape)), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    step, place = step + 1, place + 1
    if rank == 0:
        print(f"step {step} loss {loss:.6f}", flush=True)
    if step != 3:
        continue
    random = [None] * size
    dist.all_gather_object(random, torch.get_rng_state())
    if rank == 0:
        state = {"net": net.state_dict(), "step": step, "random": random,
                 "epoch": epoch, "place": place,
                 "optimizer": optimizer.state_dict(),
                 "schedule": schedule.state_dict()}
        torch.save(state, path)
dist.destroy_process_group()
