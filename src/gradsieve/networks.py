"""Ready-made scorers: ``scorer(batch) -> (B,)``. Any module of that shape will do as well.

Each starts with a head of zeros, so that training begins as plain training does, and moves away from it only as the
rewards tell it to. With `num_classes` (or ``label=True``) the head has one output per class and the example's
label picks one: the score then depends on input and label.
"""

import copy
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import skip_init

from .errors import GradsieveError

Split = Callable[[Any], tuple[Tensor, Tensor | None]]


def input_and_label(batch: Any) -> tuple[Tensor, Tensor | None]:
    """The default `split`: the first two members of a tuple or list; a lone tensor is an input without label."""
    if isinstance(batch, Tensor):
        return batch, None
    if isinstance(batch, Sequence) and batch:
        return batch[0], batch[1] if len(batch) > 1 else None
    raise GradsieveError(
        f"this scorer reads (input, label) batches, not {type(batch).__name__}. "
        "Pass split=, a function that takes your batch apart: batch -> (input, label)."
    )


class ExampleScorer(nn.Module):
    """A score for each example from its input, or from input and label: a body, a zero head, a choice by label."""

    def __init__(self, body: nn.Module, label: bool, split: Split = input_and_label, shrink: int = 1):
        super().__init__()
        self.body, self.label, self.split, self.shrink = body, label, split, shrink

    def forward(self, batch: Any) -> Tensor:
        x, y = self.split(batch)
        x = F.avg_pool2d(x, self.shrink) if self.shrink > 1 else x
        scores = self.body(x)  # (B, classes or 1)
        if not self.label:
            return scores.squeeze(1)
        if y is None:
            raise GradsieveError("this scorer reads the label, but the batch has none.")
        return scores.gather(1, y.long().unsqueeze(1)).squeeze(1)


class MLPScorer(ExampleScorer):
    """Two layers on the flattened input."""

    def __init__(
        self, in_features: int, num_classes: int | None = None, *, hidden: int = 64, split: Split = input_and_label
    ):
        head = _zero_head(hidden, num_classes or 1)
        body = nn.Sequential(nn.Flatten(), nn.Linear(in_features, hidden), nn.ReLU(), head)
        super().__init__(body, num_classes is not None, split)


class ConvScorer(ExampleScorer):
    """A compact convolutional network for images of any size: three strided layers and a mean over what is left.

    `shrink` lets it see them at a half, a third, ... of their height and width.
    """

    def __init__(
        self,
        in_channels: int = 3,
        num_classes: int | None = None,
        *,
        width: int = 16,
        split: Split = input_and_label,
        shrink: int = 1,
    ):
        widths = (in_channels, width, 2 * width, 4 * width)
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.GroupNorm(4, after), nn.ReLU()]
        head = _zero_head(widths[-1], num_classes or 1)
        super().__init__(
            nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head), num_classes is not None, split, shrink
        )


def like(
    model: nn.Module,
    *,
    label: bool = False,
    head: str | None = None,
    split: Split = input_and_label,
    shrink: int = 1,
) -> ExampleScorer:
    """The paper's scorer: the model's architecture with weights of its own and a one-number head.

    For any classifier whose last layer is linear. `head` names that layer if it is not the last linear one that the
    model lists. `label` lets the label choose among as many outputs as the model has classes. `shrink` lets it see
    images at a half, a third, ... of their height and width, if the architecture takes them so.
    """
    body = copy.deepcopy(model)
    linear = [name for name, module in body.named_modules() if isinstance(module, nn.Linear)]
    if head is not None and head not in linear:
        raise GradsieveError(f"head={head!r} is no linear layer of {type(model).__name__}; there are {linear}.")
    if not linear:
        raise GradsieveError(
            f"like(model) replaces the last linear layer by a one-number head, but {type(model).__name__} has none. "
            "Write a scorer of your own, or take ConvScorer or MLPScorer."
        )
    for module in body.modules():
        own = list(module.parameters(recurse=False))
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()
        else:
            _reset(module)
        for parameter in own:
            parameter.requires_grad_(True).grad = None
    name = linear[-1] if head is None else head
    old = body.get_submodule(name)
    assert isinstance(old, nn.Linear)
    new = _zero_head(old.in_features, old.out_features if label else 1).to(old.weight.device, old.weight.dtype)
    if name == "":
        return ExampleScorer(new, label, split, shrink)
    parent, _, child = name.rpartition(".")
    setattr(body.get_submodule(parent), child, new)
    return ExampleScorer(body.train(), label, split, shrink)


class SignalScorer(nn.Module):
    """A tiny network on what the training step knows of an example: its loss and its gradient's agreement with dev.

    Both are put on the scale of their batch, and outliers clipped, so that the same psi serves all of training.

    Args:
        hidden: units of the hidden layer.
        features: optional ``batch -> (B, F)``, further features of the example.
        num_features: F.
    """

    signals = ("loss", "alignment")

    def __init__(self, hidden: int = 16, *, features: Callable[[Any], Tensor] | None = None, num_features: int = 0):
        super().__init__()
        if (features is None) != (num_features == 0):
            raise GradsieveError("SignalScorer takes features and num_features together, or neither.")
        self.features = features
        self.reads_batch = features is not None
        self.body = nn.Sequential(nn.Linear(4 + num_features, hidden), nn.Tanh(), _zero_head(hidden, 1))

    def forward(self, batch: Any, *, loss: Tensor, alignment: Tensor) -> Tensor:
        dtype = next(self.body.parameters()).dtype
        level = loss.sign() * loss.abs().log1p()  # losses such as a log density may be negative
        inputs = torch.stack([standardized(loss), level, standardized(alignment), scaled(alignment)], 1)  # (B, 4)
        if self.features is not None:
            inputs = torch.cat([inputs, self.features(batch).to(inputs)], 1)  # (B, 4 + F)
        return self.body(inputs.to(dtype)).squeeze(1)


class GroupScorer(nn.Module):
    """The paper's scorer of groups: two layers on which groups an item is available in, ``(N, n) -> (N, n)``.

    As in the authors' code: no biases, weights uniform in +-0.1, the input divided by its sum.
    """

    def __init__(self, num_groups: int, hidden: int = 32, *, generator: torch.Generator | None = None):
        super().__init__()
        before, after = (
            skip_init(nn.Linear, a, b, bias=False) for a, b in ((num_groups, hidden), (hidden, num_groups))
        )
        self.body = nn.Sequential(before, nn.ReLU(), after)
        for parameter in self.body.parameters():
            nn.init.uniform_(parameter, -0.1, 0.1, generator=generator)

    def forward(self, available: Tensor) -> Tensor:
        return self.body(available / available.sum(1, keepdim=True))


def standardized(signal: Tensor) -> Tensor:
    """Mean 0 and deviation 1 over the batch, clipped to +-2; zeros if all are equal."""
    return scaled(signal - signal.mean())


def scaled(signal: Tensor) -> Tensor:
    """Root mean square 1 over the batch, keeping the sign, clipped to +-2."""
    return (signal / signal.square().mean().sqrt().clamp_min(1e-12)).clamp(-2, 2)


def _reset(module: nn.Module) -> None:
    """For modules that cannot do it themselves: scales one, biases zero, everything else small and random."""
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.02)
        else:
            nn.init.constant_(parameter, 0.0 if "bias" in name else 1.0)


def _zero_head(in_features: int, out_features: int) -> nn.Linear:
    head = nn.Linear(in_features, out_features)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head
