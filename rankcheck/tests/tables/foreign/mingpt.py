"""In the style of minGPT's Trainer and of PyTorch's minGPT with DDP."""
import os
import sys
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


@dataclass
class TrainerConfig:
    max_epochs: int = 1000
    batch_size: int = 16
    grad_norm_clip: float = 1.0
    snapshot_path: str = "snapshot.pt"
    save_every: int = 1


class CharDataset(Dataset):
    def __init__(self, block_size=8):
        g = torch.Generator().manual_seed(0)
        self.block_size = block_size
        self.data = torch.randint(65, (64 * block_size,), generator=g)

    def __len__(self):
        return len(self.data) // self.block_size - 1

    def __getitem__(self, i):
        chunk = self.data[i * self.block_size:][:self.block_size + 1]
        return chunk[:-1], chunk[1:]


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(65, 16)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(16, 65)

    def forward(self, idx, targets):
        logits = self.head(self.drop(self.embed(idx)))
        return logits, nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten())


class Trainer:
    def __init__(self, config, model, optimizer, train_dataset):
        self.config = config
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.global_rank = int(os.environ["RANK"])
        self.train_loader = self._prepare_dataloader(train_dataset)
        self.epochs_run = 0
        self.model = model
        self.optimizer = optimizer
        self._load_snapshot()
        self.model = DDP(self.model)

    def _prepare_dataloader(self, dataset):
        return DataLoader(dataset, batch_size=self.config.batch_size,
                          sampler=DistributedSampler(dataset))

    def _load_snapshot(self):
        if not os.path.exists(self.config.snapshot_path):
            print("Snapshot not found. Training model from scratch") \
                if self.global_rank == 0 else None
            return
        snapshot = torch.load(self.config.snapshot_path, map_location="cpu")
        self.model.load_state_dict(snapshot["model_state"])
        self.optimizer.load_state_dict(snapshot["optimizer_state"])
        torch.set_rng_state(snapshot["rng_state"])
        self.epochs_run = snapshot["finished_epoch"] + 1

    def _save_snapshot(self, epoch):
        torch.save({"model_state": self.model.module.state_dict(),
                    "optimizer_state": self.optimizer.state_dict(),
                    "rng_state": torch.get_rng_state(),
                    "finished_epoch": epoch}, self.config.snapshot_path)

    def _run_batch(self, source, targets):
        _, loss = self.model(source, targets)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(
            self.model.parameters(), self.config.grad_norm_clip)
        self.optimizer.step()
        return loss.item()

    def _run_epoch(self, epoch):
        self.train_loader.sampler.set_epoch(epoch)
        for source, targets in self.train_loader:
            loss = self._run_batch(source, targets)
        print(f"[RANK{self.global_rank}] Epoch {epoch} | Loss {loss:.5f}")

    def train(self):
        for epoch in range(self.epochs_run, self.config.max_epochs):
            self._run_epoch(epoch)
            if self.global_rank == 0 and epoch % self.config.save_every == 0:
                self._save_snapshot(epoch)


init_process_group("nccl" if torch.cuda.is_available() else "gloo")
torch.manual_seed(0)
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
config = TrainerConfig(snapshot_path=sys.argv[1])
Trainer(config, model, optimizer, CharDataset()).train()
destroy_process_group()
