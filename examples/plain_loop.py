"""An ordinary training loop, and the same with DDS: three new lines and one changed.

Data: scikit-learn's digits with 40% of the training labels wrong, and 100 clean dev examples.
Run it with ``python examples/plain_loop.py``.
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

Batch = tuple[Tensor, ...]


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels, reduction="none")  # one loss per example


def plain(train_loader: DataLoader[Batch], dev_loader: DataLoader[Batch], epochs: int) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(epochs):
        for batch in train_loader:
            optimizer.zero_grad()
            loss = loss_fn(model, batch).mean()
            loss.backward()
            optimizer.step()
    return model


def with_dds(train_loader: DataLoader[Batch], dev_loader: DataLoader[Batch], epochs: int) -> nn.Module:
    from gradsieve import DDS

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    dds = DDS(model, None, loss_fn, optimizer, dev_loader)
    for _ in range(epochs):
        for batch in train_loader:
            optimizer.zero_grad()
            loss = dds.loss(batch)
            loss.backward()
            optimizer.step()
            dds.step()
    return model


def digits() -> tuple[TensorDataset, TensorDataset, TensorDataset]:
    """Training set (1,100, of which 440 labels are wrong), dev set (100), test set (597)."""
    bunch = load_digits()
    order = torch.randperm(len(bunch.data), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(bunch.data, dtype=torch.float32)[order] / 16
    labels = torch.tensor(bunch.target, dtype=torch.long)[order]
    noisy = labels.clone()
    noisy[:440] = (noisy[:440] + torch.randint(1, 10, (440,), generator=torch.Generator().manual_seed(0))) % 10
    return (
        TensorDataset(images[:1100], noisy[:1100]),
        TensorDataset(images[1100:1200], labels[1100:1200]),
        TensorDataset(images[1200:], labels[1200:]),
    )


def main(epochs: int = 90) -> dict[str, float]:
    """Test accuracy in per cent, plain and with DDS."""
    train_set, dev_set, test_set = digits()
    accuracies = {}
    for name, train in (("plain", plain), ("with DDS", with_dds)):
        shuffle = torch.Generator().manual_seed(0)
        train_loader = DataLoader(train_set, 64, shuffle=True, drop_last=True, generator=shuffle)
        model = train(train_loader, DataLoader(dev_set, 64, shuffle=True), epochs)
        images, labels = test_set.tensors
        accuracies[name] = 100 * float((model(images).argmax(1) == labels).float().mean())
        print(f"{name:10} {accuracies[name]:.1f}%")
    return accuracies


if __name__ == "__main__":
    main()
