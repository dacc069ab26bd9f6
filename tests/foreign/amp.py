"""Automatic mixed precision with a GradScaler, as PyTorch's recipe has it."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank, size = dist.get_rank(), dist.get_world_size()
device = "cuda" if torch.cuda.is_available() else "cpu"
g = torch.Generator().manual_seed(0)
dataset = TensorDataset(torch.randn(640, 10, generator=g),
                        torch.randint(5, (640,), generator=g))
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=32 // size, sampler=sampler)
torch.manual_seed(0)
net = DDP(nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 5)))
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler(device)
for epoch in range(100000):
    sampler.set_epoch(epoch)
    for input, target in loader:
        with torch.autocast(device, dtype=torch.bfloat16):
            output = net(input)
            loss = nn.functional.cross_entropy(output, target)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(net.parameters(), max_norm=0.1)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    if rank == 0:
        print("epoch", epoch, loss.item())
