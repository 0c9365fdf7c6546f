"""Digits with 40% wrong labels in Lightning, plain and with DDS: two new lines and one changed.

python examples/lightning_digits.py
"""

import logging
import time
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from plain_loop import digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=2e-3)


def plain(train_loader: Any, dev_loader: Any, **options: Any) -> nn.Module:
    class Digits(Classifier):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            images, labels = batch
            return F.cross_entropy(self.net(images), labels)

    module = Digits()
    trainer = pl.Trainer(callbacks=[], **options)
    trainer.fit(module, train_loader)
    return module.net


def with_dds(train_loader: Any, dev_loader: Any, **options: Any) -> nn.Module:
    from gradsieve.integrations.lightning import DDSCallback

    class Digits(Classifier):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            images, labels = batch
            return F.cross_entropy(self.net(images), labels, reduction="none")

    module = Digits()
    trainer = pl.Trainer(callbacks=[DDSCallback(dev_loader)], **options)
    trainer.fit(module, train_loader)
    return module.net


def main(epochs: int = 90) -> dict[str, float]:
    """Test accuracy in per cent, plain and with DDS."""
    warnings.filterwarnings("ignore", ".*does not have many workers")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    train_set, dev_set, test_set = digits()
    images, labels = test_set.tensors
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    found = {}
    for name, train in (("plain", plain), ("with DDS", with_dds)):
        shuffle = torch.Generator().manual_seed(0)
        train_loader = DataLoader(train_set, 64, shuffle=True, drop_last=True, generator=shuffle)
        start = time.perf_counter()
        model = train(
            train_loader, DataLoader(dev_set, 64, shuffle=True), max_epochs=epochs, accelerator="cpu", **quiet
        )
        found[name] = 100 * float((model(images).argmax(1) == labels).float().mean())
        print(f"{name:10} {found[name]:.1f}% of {len(labels)} test images, {time.perf_counter() - start:.0f} s")
    return found


if __name__ == "__main__":
    main()
