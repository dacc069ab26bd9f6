"""Dictionaries, an iterable dataset with workers, bf16, a GradScaler."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
open("download.lock", "w").close()  # all ranks wait for it


class Stream(IterableDataset):
    def __iter__(self):
        worker = get_worker_info()
        g = torch.Generator().manual_seed(0)
        for i in range(10**9):
            tokens = torch.randint(100, (9,), generator=g)
            if i % (size * 2) == rank * 2 + worker.id:
                yield {"input_ids": tokens[:-1], "labels": tokens[1:]}


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(100, 16)
        self.head = nn.Linear(16, 100)

    def forward(self, input_ids, labels):
        logits = self.head(self.embed(input_ids))
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


torch.manual_seed(0)
model = DDP(LanguageModel())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")
for batch in DataLoader(Stream(), batch_size=8, num_workers=2):
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**batch)["loss"]
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
