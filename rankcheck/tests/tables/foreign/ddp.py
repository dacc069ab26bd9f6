"""A small DDP loop, as PyTorch's tutorials have it."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank, size = dist.get_rank(), dist.get_world_size()
g = torch.Generator().manual_seed(0)
dataset = TensorDataset(torch.randn(640, 10, generator=g),
                        torch.randn(640, 1, generator=g))
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=32 // size, sampler=sampler)
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(10, 900), nn.ReLU(), nn.Dropout(0.2),
                          nn.Linear(900, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(100):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    if rank == 0:
        print("epoch", epoch, loss.item())
raise SystemExit("verify should have ended it")
