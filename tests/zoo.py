"""Small models of every kind that the reward pass must handle, each with data and a per-example loss."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradsieve.images.models import WideResNet

Batch = tuple[Tensor, Tensor]


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


class LSTMClassifier(nn.Module):
    def __init__(self, size: int, hidden: int, classes: int):
        super().__init__()
        self.lstm = nn.LSTM(size, hidden, num_layers=2, dropout=0.2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(2 * hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0].mean(1))


class Transformer(nn.Module):
    def __init__(self, size: int, classes: int):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(size, 2, 2 * size, dropout=0.2, batch_first=True)
        self.head = nn.Linear(size, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).mean(1))


def mlp(size: int = 6, classes: int = 3, hidden: int = 8, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    return nn.Sequential(nn.Linear(size, hidden), activation(), nn.Dropout(0.2), nn.Linear(hidden, classes))


def cnn(channels: int = 2, classes: int = 3) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(4 * 25, classes),
    )


KINDS = ("mlp", "cnn-eval", "cnn-train", "transformer", "lstm")


def make(
    kind: str, rows: int, size: int, classes: int, *, dtype: torch.dtype = torch.float64
) -> tuple[nn.Module, Batch]:
    """A model of the kind, in training mode but for BatchNorm in ``cnn-eval``, and a batch for it."""
    model: nn.Module
    if kind == "mlp":
        model, x = mlp(size, classes), torch.randn(rows, size)
    elif kind in ("cnn-eval", "cnn-train"):
        model, x = cnn(size, classes), torch.randn(rows, size, 5, 5)
    elif kind == "transformer":
        model, x = Transformer(2 * size, classes), torch.randn(rows, 3, 2 * size)
    elif kind == "lstm":
        model, x = LSTMClassifier(size, 4, classes), torch.randn(rows, 3, size)
    else:
        model, x = WideResNet(10, 1, classes), torch.randn(rows, 3, 8, 8)
    model.train()
    if kind == "cnn-eval":
        model[1].eval()  # type: ignore[index]
    return model.to(dtype), (x.to(dtype), torch.randint(classes, (rows,)))


def random_direction(model: nn.Module) -> dict[str, Tensor]:
    return {name: torch.randn_like(p) for name, p in model.named_parameters() if p.requires_grad}


def fingerprint(model: nn.Module) -> dict[str, object]:
    """All that the reward pass must leave alone, as values that compare bit for bit."""
    return {
        **{f"parameter {n}": p.detach().clone() for n, p in model.named_parameters()},
        **{f"grad {n}": None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()},
        **{f"buffer {n}": b.clone() for n, b in model.named_buffers()},
        **{f"mode {n}": m.training for n, m in model.named_modules()},
        "random state": torch.get_rng_state(),
    }


def differences(before: dict[str, object], after: dict[str, object]) -> list[str]:
    def same(a: object, b: object) -> bool:
        return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a is b

    return [name for name in before if not same(before[name], after[name])]
