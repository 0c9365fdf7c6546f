"""From bytes to what the network sees, and from a network to what it is worth."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..randomness import seeded
from ..runs.team import Team
from .augment import normalized, pad_crop_flip
from .data import ImageSet, Splits
from .recipe import ImageRecipe
from .stream import InOrder, Stream

EVALUATION_BATCH = 500


class Preparation:
    """From bytes to what the network sees, for training (at random, but the same for the same step) and evaluation."""

    def __init__(self, recipe: ImageRecipe, splits: Splits, seed: int, device: torch.device):
        self.mean = torch.tensor(splits.mean, device=device)
        self.deviation = torch.tensor(splits.deviation, device=device)
        self.augmented, self.seed, self.device = recipe.augment == "pad-crop-flip", seed, device
        self.format = torch.channels_last if recipe.model.channels_last else torch.contiguous_format
        self.workers, self.team = recipe.data.workers, Team()

    def evaluation(self, pixels: Tensor, step: int) -> Tensor:
        return normalized(pixels, self.mean, self.deviation).contiguous(memory_format=self.format)

    def training(self, pixels: Tensor, step: int) -> Tensor:
        images = self.evaluation(pixels, step)
        if not self.augmented:
            return images
        generator = seeded(self.seed, "augment", step, *self.team.own, device=self.device)
        cropped = pad_crop_flip(images, generator=generator)
        return cropped.contiguous(memory_format=self.format)


@torch.no_grad()
def evaluate(
    model: nn.Module, images: ImageSet, prepare: Preparation, low: AbstractContextManager[Any]
) -> dict[str, float]:
    """Accuracy in per cent and mean loss, in eval mode."""
    training = model.training
    model.eval()
    right, loss = torch.zeros((), dtype=torch.long, device=prepare.device), torch.zeros((), device=prepare.device)
    stream = Stream(InOrder(images, EVALUATION_BATCH), prepare.evaluation, prepare.device, prepare.workers)
    for x, y, _ in stream:
        with low:
            logits = model(x).float()
        right += (logits.argmax(1) == y).sum()
        loss += F.cross_entropy(logits, y, reduction="sum")
    model.train(training)
    return {"accuracy": 100 * right.item() / len(images), "loss": loss.item() / len(images)}
