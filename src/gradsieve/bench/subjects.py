"""What is trained in a benchmark: models of every kind, on random data of the right shape."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, Optimizer

from ..images.models import WideResNet, mlp
from ..parameters import LossFn


class TextClassifier(nn.Module):
    """A small Transformer that reads 32 tokens."""

    def __init__(self, num_classes: int = 10, tokens: int = 1000, size: int = 128, layers: int = 4, heads: int = 4):
        super().__init__()
        self.embedding = nn.Embedding(tokens, size)
        layer = nn.TransformerEncoderLayer(size, heads, 4 * size, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(size, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(x)).mean(1))


@dataclass(frozen=True)
class Subject:
    """A classifier, its optimizer, and batches for it."""

    model: Callable[[], nn.Module]
    optimizer: Callable[[Any], Optimizer]
    inputs: Callable[[int], Tensor]
    batch_size: int
    dev_batch_size: int
    """A quarter of the batch, so that the dev pass costs a quarter of a training pass."""
    num_classes: int = 10

    def batch(self, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
        return self.inputs(size).to(device), torch.randint(self.num_classes, (size,)).to(device)


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


loss_fn: LossFn = cross_entropy


def _image(size: int) -> Tensor:
    return torch.randn(size, 3, 32, 32).contiguous(memory_format=torch.channels_last)


def _wide(depth: int, width: int) -> nn.Module:
    return WideResNet(depth, width, 10).to(memory_format=torch.channels_last)  # type: ignore[call-overload]


_sgd = partial(SGD, lr=0.01, momentum=0.9, weight_decay=2e-4)
_adam = partial(Adam, lr=1e-3)


def subject_of(name: str) -> Subject | None:
    """One of `SUBJECTS`, or a WideResNet of any depth and width: ``wrn-40-4``."""
    if (found := re.fullmatch(r"wrn-(\d+)-(\d+)", name)) and (int(found[1]) - 4) % 6 == 0 < int(found[2]):
        return Subject(partial(_wide, int(found[1]), int(found[2])), _sgd, _image, 128, 32)
    return SUBJECTS.get(name)


def sized(subject: Subject, batch_size: int | None) -> Subject:
    """With batches of that size, and dev batches of a quarter of it."""
    if batch_size is None:
        return subject
    return replace(subject, batch_size=batch_size, dev_batch_size=max(2, batch_size // 4))


SUBJECTS = {
    "mlp": Subject(mlp, _adam, lambda size: torch.randn(size, 64), 128, 32),
    "wrn-16-1": Subject(partial(_wide, 16, 1), _sgd, _image, 128, 32),
    "wrn-28-2": Subject(partial(_wide, 28, 2), _sgd, _image, 128, 32),
    "transformer": Subject(TextClassifier, _adam, lambda size: torch.randint(1000, (size, 32)), 64, 16),
}
