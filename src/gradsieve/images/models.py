"""Classifiers, smallest first."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def mlp(in_features: int = 64, num_classes: int = 10, hidden: int = 128) -> nn.Sequential:
    """Three layers, for digits."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(in_features, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, num_classes),
    )


def small_cnn(in_channels: int = 3, num_classes: int = 10, width: int = 32) -> nn.Sequential:
    """Three strided convolutions with BatchNorm, for 32x32 images on a CPU."""
    layers: list[nn.Module] = []
    for before, after in ((in_channels, width), (width, 2 * width), (2 * width, 4 * width)):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, num_classes))


class _Block(nn.Module):
    """Pre-activation residual block."""

    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        self.norm1 = nn.BatchNorm2d(before)
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.shortcut = nn.Conv2d(before, after, 1, stride, bias=False) if before != after else None

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(x))
        shortcut = x if self.shortcut is None else self.shortcut(h)
        return shortcut + self.conv2(F.relu(self.norm2(self.conv1(h))))


class WideResNet(nn.Module):
    """WRN-depth-k, pre-activation (Zagoruyko & Komodakis, 2016): WRN-16-1 is ``WideResNet(16, 1)``."""

    def __init__(self, depth: int = 28, k: int = 2, num_classes: int = 10, in_channels: int = 3):
        super().__init__()
        if (depth - 4) % 6:
            raise ValueError(f"a WideResNet's depth is 6n + 4, not {depth}.")
        self.stem = nn.Conv2d(in_channels, 16, 3, 1, 1, bias=False)
        blocks, before = [], 16
        for after, stride in ((16 * k, 1), (32 * k, 2), (64 * k, 2)):
            for i in range((depth - 4) // 6):
                blocks.append(_Block(before, after, stride if i == 0 else 1))
                before = after
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.BatchNorm2d(before)
        self.head = nn.Linear(before, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm(self.blocks(self.stem(x))))
        return self.head(torch.flatten(F.adaptive_avg_pool2d(h, 1), 1))
