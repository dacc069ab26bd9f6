"""A Lightning Trainer, as its documentation shows one."""
import os

import lightning as L
import torch
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.utilities import rank_zero_only
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class LitRegressor(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(10, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self.layer(x), y)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


@rank_zero_only
def save_settings(**settings):
    with open("settings.txt", "w") as file:
        print(settings, file=file)


if __name__ == "__main__":
    save_settings(batch_size=8)
    L.seed_everything(0)
    dataset = TensorDataset(torch.randn(640, 10), torch.randn(640, 1))
    trainer = L.Trainer(
        accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]),
        strategy="ddp", max_epochs=100000, logger=False,
        enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, plugins=[TorchElasticEnvironment()])
    trainer.fit(LitRegressor(), DataLoader(dataset, batch_size=8))
