"""An ordinary script: trains a small network on images, on one device.

    python notebooks/your_model.py

It knows nothing of several processes, and nothing of this course.
"""
import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Stripes(Dataset):
    """Noisy images of 8 x 8 pixels: do the stripes run down or across?"""

    def __init__(self, num_samples, seed):
        random = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(2, (num_samples,), generator=random)
        stripes = torch.tensor([1.0, -1.0]).repeat(8, 4)
        images = torch.stack((stripes, stripes.T))[self.labels, None]
        self.images = images + 2 * torch.randn(images.shape, generator=random)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.images[i], self.labels[i]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Flatten(), nn.Dropout(0.2))
        self.head = nn.Linear(8 * 6 * 6, 2)
        self.old_head = nn.Linear(8 * 6 * 6, 8)  # of an experiment

    def forward(self, x):
        return self.head(self.features(x))


@torch.no_grad()
def evaluate(model, loader, device):
    """The share of the images that the model classifies correctly."""
    model.eval()
    right = sum((model(x.to(device)).argmax(1) == y.to(device)).sum()
                for x, y in loader)
    model.train()
    return right.item() / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--save", help="a file for the weights")
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(1337)
    train_data = Stripes(args.samples, seed=0)
    loader = DataLoader(train_data, args.batch_size, shuffle=True)
    val_loader = DataLoader(Stripes(500, seed=1), args.batch_size)
    model = Model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(args.epochs):
        for x, y in loader:
            logits = model(x.to(device))
            loss = nn.functional.cross_entropy(logits, y.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        accuracy = evaluate(model, val_loader, device)
        print(f"epoch {epoch}: loss {loss:.4f}, accuracy {accuracy:.3f}")
    if args.save:
        torch.save(model.state_dict(), args.save)


if __name__ == "__main__":
    main()
