"""A GAN's two steps, in the style of PyTorch's DCGAN example."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank, size = dist.get_rank(), dist.get_world_size()
g = torch.Generator().manual_seed(0)
dataset = TensorDataset(torch.randn(640, 10, generator=g))
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=32 // size, sampler=sampler)
torch.manual_seed(0)
netG = DDP(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 10)))
netD = DDP(nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 1)))
optimizerG = torch.optim.Adam(netG.parameters(), lr=1e-3)
optimizerD = torch.optim.Adam(netD.parameters(), lr=1e-3)
criterion = nn.BCEWithLogitsLoss()
torch.manual_seed(100 + rank)
for epoch in range(100000):
    sampler.set_epoch(epoch)
    for real, in loader:
        optimizerD.zero_grad()
        output = netD(real)
        errD_real = criterion(output, torch.ones_like(output))
        errD_real.backward()
        fake = netG(torch.randn(len(real), 4))
        output = netD(fake.detach())
        errD_fake = criterion(output, torch.zeros_like(output))
        errD_fake.backward()
        optimizerD.step()
        optimizerG.zero_grad()
        output = netD(fake)
        errG = criterion(output, torch.ones_like(output))
        errG.backward()
        optimizerG.step()
