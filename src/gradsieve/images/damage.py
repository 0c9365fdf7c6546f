"""Damage of a known kind, for study. Each function returns the splits and says which training examples it touched."""

from dataclasses import replace

import torch
from torch import Tensor

from ..errors import GradsieveError
from .data import ImageSet, Splits


def uniform_noise(splits: Splits, share: float, *, seed: int) -> Splits:
    """Gives `share` of the training labels another class, drawn uniformly from the wrong ones."""
    generator = torch.Generator().manual_seed(seed)
    chosen = _chosen(splits, share, generator)
    if splits.num_classes < 2:
        raise GradsieveError("labels cannot be made wrong: there is only one class.")
    return _relabelled(splits, chosen, torch.randint(1, splits.num_classes, (len(chosen),), generator=generator))


def flip_noise(splits: Splits, share: float, *, seed: int) -> Splits:
    """Gives `share` of the training labels the class after their own: wrong in the same way everywhere."""
    chosen = _chosen(splits, share, torch.Generator().manual_seed(seed))
    return _relabelled(splits, chosen, torch.ones_like(chosen))


def long_tail(splits: Splits, factor: float, *, seed: int) -> Splits:
    """Thins the classes exponentially: the first keeps all its examples, the last one in `factor`.

    What is left is rightly labelled; ``removed`` says which examples of the old training set are gone.
    """
    if factor < 1:
        raise GradsieveError(f"damage.factor is the largest class over the smallest, so at least 1, not {factor:g}.")
    generator = torch.Generator().manual_seed(seed)
    labels = splits.train.labels
    kept = torch.zeros(len(labels), dtype=torch.bool)
    for label in range(splits.num_classes):
        own = (labels == label).nonzero().squeeze(1)
        count = max(1, round(len(own) * factor ** (-label / max(1, splits.num_classes - 1))))
        kept[own[torch.randperm(len(own), generator=generator)[:count]]] = True
    damaged = torch.zeros(int(kept.sum()), dtype=torch.bool)
    return replace(splits, train=splits.train[kept], damaged=damaged, removed=~kept)


def _chosen(splits: Splits, share: float, generator: torch.Generator) -> Tensor:
    if not 0 <= share <= 1:
        raise GradsieveError(f"damage.share is a share of the training labels, between 0 and 1, not {share:g}.")
    return torch.randperm(len(splits.train), generator=generator)[: round(share * len(splits.train))]


def _relabelled(splits: Splits, chosen: Tensor, shift: Tensor) -> Splits:
    train = splits.train
    labels, damaged = train.labels.clone(), torch.zeros(len(train), dtype=torch.bool)
    labels[chosen] = (labels[chosen] + shift) % splits.num_classes
    damaged[chosen] = True
    return replace(splits, train=ImageSet(train.source, train.rows, labels), damaged=damaged)
