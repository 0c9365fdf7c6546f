"""A set of images to be scored: a split of what the run's recipe reads, or a set that stands by itself."""

from pathlib import Path

import torch

from ..errors import GradsieveError
from .data import ImageSet
from .load import load_splits
from .recipe import DataSettings
from .scoring import TrainedScorer

SPLITS = ("train", "dev", "test")


def set_to_score(trained: TrainedScorer, data: Path | None, split: str) -> ImageSet:
    """Of the kind that the run was trained on: as many channels and pixels, and no class that it does not know.

    `data` is laid out as for training, or, where the recipe reads images from files, has just class folders, tar shards
    or Parquet files in it.
    """
    recipe, size = trained.recipe.model_copy(update={"selection": None}), " x ".join(map(str, trained.shape))
    if split not in SPLITS:
        raise GradsieveError(f"--split is {', '.join(SPLITS)}, not {split!r}.")
    if recipe.data.name == "digits" and data is not None:
        raise GradsieveError(f"{trained.run} was trained on scikit-learn's digits, which lie in no folder: no --data.")
    alone = _alone(recipe.data, data, trained) if recipe.data.name == "images" and data is not None else None
    if alone is not None:
        return _checked(alone, trained, size)
    splits = load_splits(recipe, data, trained.seed)
    if trained.classes and splits.classes and splits.classes != trained.classes:
        odd = sorted(set(splits.classes) ^ set(trained.classes))
        raise GradsieveError(
            f"{data} does not have the classes of {trained.run}: {', '.join(odd[:5]) or 'other order'}."
        )
    return _checked({"train": splits.train, "dev": splits.dev, "test": splits.test}[split], trained, size)


def _checked(images: ImageSet, trained: TrainedScorer, size: str) -> ImageSet:
    found = tuple(images.read(torch.tensor([0]))[0].shape[1:])
    if found != trained.shape:
        raise GradsieveError(
            f"{trained.run} was trained on images of {size}, these have {' x '.join(map(str, found))}."
        )
    if (highest := int(images.labels.max())) >= trained.num_classes:
        raise GradsieveError(f"the data have label {highest}, but {trained.run} knows {trained.num_classes} classes.")
    return images


def _alone(settings: DataSettings, directory: Path, trained: TrainedScorer) -> ImageSet | None:
    """The folder as one set; None if it is divided into splits."""
    from .files import Folder, Shards, files_by_split
    from .tables import is_saved, read_table

    if not directory.is_dir():
        raise GradsieveError(f"--data {directory} is no folder.")
    kinds = {kind: files_by_split(directory, kind) for kind in ("tar", "parquet")}
    if (directory / "train").is_dir() or is_saved(directory) or any(found["train"] for found in kinds.values()):
        return None
    if tars := sorted(directory.glob("*.tar")):
        return ImageSet.whole(Shards(tars, settings.size))
    if tables := sorted(directory.glob("*.parquet")):
        columns = {"image_column": settings.image_column, "label_column": settings.label_column}
        return ImageSet.whole(read_table(directory, tables, settings.size, **columns))
    return ImageSet.whole(Folder(directory, settings.size, trained.classes or None))
