"""Stages of torch.distributed.pipelining, with microbatches."""
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
layers = [nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.ReLU())
          for _ in range(4)]
layers.append(nn.Linear(16, 4))
parts = torch.arange(len(layers)).tensor_split(size)
model = nn.Sequential(*(layers[i] for i in parts[rank]))
stage = PipelineStage(model, rank, size, torch.device("cpu"))
schedule = ScheduleGPipe(stage, 4, nn.functional.cross_entropy)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
generator = torch.Generator().manual_seed(1)
for _ in range(8):
    x = torch.randn(16, 16, generator=generator)
    y = torch.randint(4, (16,), generator=generator)
    optimizer.zero_grad()
    inputs, targets = [], {}
    if rank == 0:
        inputs = [x]
    if rank == size - 1:
        targets = {"target": y}
    schedule.step(*inputs, **targets)
    optimizer.step()
dist.destroy_process_group()
