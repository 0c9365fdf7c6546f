"""Classifiers, smallest first, and how a recipe names them."""

import importlib
import os
import re
import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import GradsieveError


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


class _PreActivation(nn.Module):
    """Residual block of a WideResNet: norm and activation before each convolution."""

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
        if (depth - 4) % 6 or depth < 10 or k < 1:
            raise GradsieveError(
                f"a WideResNet's depth is 6n + 4 (10, 16, 28) and its width 1 or more, not {depth}-{k}."
            )
        self.stem = nn.Conv2d(in_channels, 16, 3, 1, 1, bias=False)
        blocks, before = [], 16
        for after, stride in ((16 * k, 1), (32 * k, 2), (64 * k, 2)):
            for i in range((depth - 4) // 6):
                blocks.append(_PreActivation(before, after, stride if i == 0 else 1))
                before = after
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.BatchNorm2d(before)
        self.head = nn.Linear(before, num_classes)
        _initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm(self.blocks(self.stem(x))))
        return self.head(torch.flatten(F.adaptive_avg_pool2d(h, 1), 1))


class _Bottleneck(nn.Module):
    """Residual block of a ResNet-50: norm and activation after each convolution, the stride in the middle one."""

    def __init__(self, before: int, width: int, stride: int):
        super().__init__()
        after = 4 * width
        self.conv1 = nn.Conv2d(before, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, after, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(after)
        self.shortcut = (
            nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
            if before != after
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(self.conv1(x)))
        h = F.relu(self.norm2(self.conv2(h)))
        return F.relu(self.norm3(self.conv3(h)) + self.shortcut(x))


class ResNet50(nn.Module):
    """ResNet-50, post-activation (He et al., 2016)."""

    def __init__(self, num_classes: int = 1000, in_channels: int = 3):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(in_channels, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        blocks, before = [], 64
        for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for i in range(count):
                blocks.append(_Bottleneck(before, width, stride if i == 0 else 1))
                before = 4 * width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(before, num_classes)
        _initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.flatten(F.adaptive_avg_pool2d(self.blocks(self.stem(x)), 1), 1))


def _initialize(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def build_model(name: str, *, shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """The model that a recipe names, for images of `shape` (C, H, W).

    ``mlp``, ``small-cnn``, ``wrn-DEPTH-K``, ``resnet50``, or ``module:function`` for one of your own, which is called
    ``function(num_classes)`` and is looked for in the present folder too.
    """
    channels, height, width = shape
    if name == "mlp":
        return mlp(channels * height * width, num_classes)
    if name == "small-cnn":
        return small_cnn(channels, num_classes)
    if wide := re.fullmatch(r"wrn-(\d+)-(\d+)", name):
        return WideResNet(int(wide[1]), int(wide[2]), num_classes, channels)
    if name == "resnet50":
        return ResNet50(num_classes, channels)
    if ":" in name:
        return _own(name, num_classes)
    raise GradsieveError(
        f"unknown model {name!r}; choose mlp, small-cnn, wrn-28-2 (or another depth and width), resnet50, "
        "or name a function of your own as module:function."
    )


def _own(name: str, num_classes: int) -> nn.Module:
    module_name, _, function = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        model = getattr(importlib.import_module(module_name), function)(num_classes)
    except Exception as error:  # the user's code may fail in any way
        reason = f"{type(error).__name__}: {error}"
        raise GradsieveError(f"model {name} cannot be had ({reason}). Write it as module:function.") from error
    if not isinstance(model, nn.Module) or not any(p.requires_grad for p in model.parameters()):
        raise GradsieveError(f"model {name} must return a torch.nn.Module with parameters, not {type(model).__name__}.")
    return model
