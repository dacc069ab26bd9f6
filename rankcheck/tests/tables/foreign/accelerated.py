"""A loop with Accelerate, as its documentation shows one."""
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator(
        gradient_accumulation_steps=2,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    set_seed(42)
    dataset = TensorDataset(torch.randn(640, 10), torch.randn(640, 1))
    loader = DataLoader(dataset, batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=50)
    model, optimizer, loader, scheduler = accelerator.prepare(
        model, optimizer, loader, scheduler)
    for epoch in range(100000):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                outputs = model(inputs)
                loss = nn.functional.mse_loss(outputs, targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
