"""Code in documents, and stand-ins for what its reader has."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

FENCE = re.compile(r'^```(?P<language>\w*)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```', re.MULTILINE | re.DOTALL)


class Snippet(NamedTuple):
    language: str
    title: str | None
    """The name of a file that it is the whole of."""
    text: str


def snippets(document: Path) -> list[Snippet]:
    return [Snippet(*found.group("language", "title", "text")) for found in FENCE.finditer(document.read_text())]


def stand_ins() -> dict[str, Any]:
    x, y = torch.randn(64, 8), torch.randint(3, (64,))
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    train_set = TensorDataset(x, y)
    return {
        "torch": torch,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loss_fn": lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none"),
        "train_set": train_set,
        "train_loader": DataLoader(train_set, 16),
        "dev_loader": DataLoader(TensorDataset(x, y), 16),
    }
