"""The data that a recipe names, damaged as it says."""

from dataclasses import replace
from pathlib import Path

import torch

from ..errors import GradsieveError
from ..randomness import seeded
from .damage import flip_noise, long_tail, uniform_noise
from .data import Splits, cifar10, digits
from .recipe import ImageRecipe


def load_splits(recipe: ImageRecipe, directory: Path | None, seed: int) -> Splits:
    """The recipe's data, damaged, then selected from."""
    splits = _damaged(recipe, directory, seed)
    if recipe.selection is None:
        return splits
    from .selection import selected

    return selected(splits, recipe.selection)


def _damaged(recipe: ImageRecipe, directory: Path | None, seed: int) -> Splits:
    data, damage = recipe.data, recipe.damage
    splits = digits(seed=seed, held_out=data.held_out) if data.name == "digits" else _on_disk(recipe, directory)
    splits = _held_back(splits, recipe.dev_holdout, seed) if recipe.dev_holdout else splits
    if damage.kind == "uniform":
        return uniform_noise(splits, damage.share, seed=seed)
    if damage.kind == "flip":
        return flip_noise(splits, damage.share, seed=seed)
    if damage.kind == "long-tail":
        return long_tail(splits, damage.factor, seed=seed)
    return splits


def _held_back(splits: Splits, share: float, seed: int) -> Splits:
    """Takes `share` of the dev examples away, at random but evenly from the classes."""
    dev = splits.dev
    order = torch.randperm(len(dev), generator=seeded(seed, "dev_holdout"))
    order = order[dev.labels[order].argsort(stable=True)]
    steps = (torch.arange(len(dev) + 1, dtype=torch.float64) * share + 1e-9).floor()
    held = torch.zeros(len(dev), dtype=torch.bool)
    held[order] = steps.diff() > 0
    if held.all() or not held.any():
        raise GradsieveError(
            f"dev_holdout={share:g} of {len(dev)} dev examples leaves none {'over' if held.all() else 'to keep back'}. "
            "Choose a share nearer to a half, or bring more dev examples."
        )
    return replace(splits, dev=dev[~held], dev_holdout=dev[held])


def _on_disk(recipe: ImageRecipe, directory: Path | None) -> Splits:
    data = recipe.data
    if directory is None:
        raise GradsieveError(f"recipe {recipe.name} needs {recipe.needs}. Say where it lies with --data DIR.")
    if not directory.is_dir():
        raise GradsieveError(f"--data {directory} is no folder.")
    if data.name == "cifar10":
        if data.setting == "10pct":
            raise GradsieveError("data.setting of CIFAR-10 is 4k or full, not 10pct.")
        return cifar10(directory, data.setting, held_out=data.held_out)
    if data.held_out:
        raise GradsieveError(
            "data.held_out is for digits and CIFAR-10 only; set a part of your own images aside instead."
        )
    if data.setting == "4k":
        raise GradsieveError("data.setting of images on disk is 10pct or full, not 4k.")
    from .tables import image_splits  # PIL and datasets are for those who read images from files

    return image_splits(
        directory, data.format, data.setting, data.size, image_column=data.image_column, label_column=data.label_column
    )
