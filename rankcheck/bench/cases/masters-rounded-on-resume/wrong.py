"""Train with DDP; save after the second step, and resume with --resume.

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
inputs = torch.randn(512, 12, generator=fixed)
targets = inputs @ torch.randn(12, 4, generator=fixed)
torch.manual_seed(seed)
net = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4))
model = DDP(net)
masters = [weight.detach().clone() for weight in net.parameters()]
optimizer = torch.optim.AdamW(masters, lr=1e-2)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 24)
torch.manual_seed(1000 * seed + rank)
step = 0
if resumed:
    state = torch.load(path, weights_only=False)
    net.load_state_dict(state["net"])
    saved = [*state["net"].values()]
    for master, weight in zip(masters, saved, strict=True):
        master.copy_(weight)
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    torch.set_rng_state(state["random"][rank])
    step = state["step"]
while step < 24:
    order = torch.Generator().manual_seed(seed + step // 16)
    rows = torch.randperm(512, generator=order).view(16, 32)[step % 16]
    x, y = inputs[rows[rank::size]], targets[rows[rank::size]]
    loss = mse_loss(model(x + 0.1 * torch.randn(x.shape)), y)
    net.zero_grad()
    loss.backward()
    for master, weight in zip(masters, net.parameters(), strict=True):
        master.grad = weight.grad
    optimizer.step()
    for master, weight in zip(masters, net.parameters(), strict=True):
        weight.data.copy_(master.bfloat16())
    schedule.step()
    step += 1
    if rank == 0:
        print(f"step {step} loss {loss:.6f}", flush=True)
    if step != 2:
        continue
    random = [None] * size
    dist.all_gather_object(random, torch.get_rng_state())
    if rank == 0:
        state = {"net": net.state_dict(), "step": step, "random": random,
                 "optimizer": optimizer.state_dict(), "masters": masters,
                 "schedule": schedule.state_dict()}
        torch.save(state, path)
dist.destroy_process_group()
