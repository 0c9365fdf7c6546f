"""Image sets in tables: Parquet or Hugging Face's own; and the choice among all the forms of a set on disk."""

from collections.abc import Callable, Mapping, Sequence
from glob import escape
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import GradsieveError
from .data import ImageSet, Splits
from .files import IMAGENET_DEVIATION, IMAGENET_MEAN, files_by_split, folder_splits, roles, shard_splits
from .view import Pictures, as_line, checksum

IMAGE_NAMES = ("image", "img")
LABEL_NAMES = ("label", "labels", "fine_label", "class", "target")
SAVED = ("dataset_dict.json", "state.json")
"""One of them lies in a folder that `save_to_disk` has made."""


class Table(Pictures):
    """Hugging Face data sets, one after the other: random access to files that are mapped into memory.

    Args:
        parts: data sets, by the names under which the user knows them.
        size: pixels along a side of the view.
        image_column: where neither type nor name tells.
        label_column: likewise.
        files: what the data sets were read from, for the checksum.
    """

    def __init__(
        self,
        parts: Mapping[str, Any],
        size: int,
        image_column: str | None = None,
        label_column: str | None = None,
        files: Sequence[Path] = (),
    ) -> None:
        self.size = size
        self.parts = {name: _images(part, image_column, name) for name, part in parts.items()}
        labels, names, counts = zip(*(_labels(part, label_column, name) for name, part in parts.items()), strict=True)
        self.labels, self.classes, self.num_classes = torch.cat(labels), names[0], counts[0]
        sizes = torch.tensor([file.stat().st_size for file in files])
        self.checksum = checksum([file.name for file in files], sizes, self.labels)

    def locate(self, row: int) -> tuple[bytes | Path, str]:
        name, row = self._place(row)
        (cell,) = self.parts[name][row].values()
        raw, path = (cell["bytes"], cell["path"]) if isinstance(cell, dict) else (cell, None)
        return raw or (Path(path) if path else b""), f"{name}, row {row}"

    def id(self, row: int) -> str:
        """Such as ``train/12``: the split and the number of the row in it."""
        name, row = self._place(row)
        return as_line(f"{name.rpartition(', split ')[2]}/{row}")

    def _place(self, row: int) -> tuple[str, int]:
        """The part that has the row, and its number there."""
        for name, part in self.parts.items():
            if row < len(part):
                return name, row
            row -= len(part)
        raise IndexError(row)


def _images(part: Any, column: str | None, name: str) -> Any:
    """The column of images alone; a cell holds bytes, or {bytes, path}."""
    from datasets import Image

    kinds = [
        lambda _, feature: isinstance(feature, Image),
        lambda _, feature: isinstance(feature, dict) and feature.keys() == {"bytes", "path"},
        lambda key, feature: key in IMAGE_NAMES and "binary" in str(getattr(feature, "dtype", "")),
    ]
    column = _column(part.features, column, kinds, "image", name)
    images = part.with_format(None).select_columns([column])
    return images.cast_column(column, Image(decode=False)) if isinstance(part.features[column], Image) else images


def _labels(part: Any, column: str | None, name: str) -> tuple[Tensor, tuple[str, ...], int]:
    """The labels, (N,), the names of the classes, where there are such, and how many classes there are."""
    from datasets import ClassLabel

    kinds = [
        lambda _, feature: isinstance(feature, ClassLabel),
        lambda key, feature: key in LABEL_NAMES and "int" in str(getattr(feature, "dtype", "")),
    ]
    column = _column(part.features, column, kinds, "label", name)
    labels = part.with_format(None)[column][:]
    if not labels:
        raise GradsieveError(f"{name} has no rows.")
    for row, label in enumerate(labels):
        if not isinstance(label, int) or not 0 <= label < 10**9:
            raise GradsieveError(f"{name}, row {row} has label {label!r}; a label is a whole number from 0 up.")
    feature = part.features[column]
    if not isinstance(feature, ClassLabel):
        return torch.tensor(labels), (), max(labels) + 1
    return torch.tensor(labels), tuple(feature.names or ()), feature.num_classes


def _column(
    features: Mapping[str, Any], given: str | None, kinds: Sequence[Callable[[str, Any], bool]], what: str, where: str
) -> str:
    """The one that is given; else the only one of the first kind of which there is any."""
    found = ([name for name, feature in features.items() if kind(name, feature)] for kind in kinds)
    likely = next(filter(None, found), []) if given is None else [name for name in features if name == given]
    if len(likely) == 1:
        return likely[0]
    problem = f"several {what} columns ({', '.join(likely)})" if likely else f"no {what} column {given or ''}".strip()
    raise GradsieveError(f"{where} has {problem}. Name one with {what}_column; there are {', '.join(features)}.")


def table_splits(
    directory: Path, size: int, *, image_column: str | None = None, label_column: str | None = None
) -> Splits:
    """A data set from `save_to_disk`, or ``train*.parquet``, ``test*.parquet`` and so on, as the hub names them.

    Test is the split of that name, else validation. Dev is the split of that name, else validation if there is a test
    split too, else the last tenth of the training rows.
    """
    splits = _load(directory)
    dev_name, test = roles(list(splits))
    if "train" not in splits or test is None:
        raise GradsieveError(f"{directory} needs the splits train, and test or validation; it has {', '.join(splits)}.")
    dev = [dev_name] if dev_name else []

    def table(*names: str) -> Table:
        parts = {f"{directory}, split {name}": splits[name][0] for name in names}
        return Table(parts, size, image_column, label_column, [file for name in names for file in splits[name][1]])

    # Training and dev rows share a source, whichever way they were split: so they can be joined.
    source, test_source = table("train", *dev), table(test)
    for each in (source, test_source):
        each.check_labels(source.num_classes)
    everything = ImageSet.whole(source)
    num_train = len(splits["train"][0]) if dev else len(everything) - max(1, len(everything) // 10)
    if not num_train:
        raise GradsieveError(f"{directory} needs two training rows or more, one of them for dev.")
    train, dev_set = everything[:num_train], everything[num_train:]
    return Splits(
        train,
        dev_set,
        ImageSet.whole(test_source),
        source.num_classes,
        IMAGENET_MEAN,
        IMAGENET_DEVIATION,
        classes=source.classes,
    )


def read_table(directory: Path, files: list[Path], size: int, **columns: str | None) -> Table:
    """Parquet files as one set, not divided into splits."""
    rows, _ = _load(directory, {"rows": files})["rows"]
    return Table({f"{directory}, split rows": rows}, size, files=files, **columns)


def _load(directory: Path, files: Mapping[str, list[Path]] | None = None) -> dict[str, tuple[Any, list[Path]]]:
    """Splits by name, `val` for validation, and the files they lie in. Parquet goes through the library's own cache.

    `files` are the Parquet files of each split, where their names do not tell.
    """
    import datasets

    bars = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        if files is not None or not is_saved(directory):
            files = files or files_by_split(directory, "parquet")
            patterns = {name: [escape(str(file)) for file in files[name]] for name in files}
            tables = datasets.load_dataset("parquet", data_files=patterns)
            return {name: (tables[name], files[name]) for name in files}
        saved = datasets.load_from_disk(str(directory))
        tables = saved if isinstance(saved, datasets.DatasetDict) else {"train": saved}
        names = {"validation": "val", "valid": "val"}
        return {names.get(n, n): (t, [Path(f["filename"]) for f in t.cache_files]) for n, t in tables.items()}
    except (OSError, ValueError, LookupError, datasets.exceptions.DatasetsError) as error:
        raise GradsieveError(f"{directory} cannot be read as a table ({error.__cause__ or error}).") from error
    finally:
        if bars:
            datasets.enable_progress_bars()


def is_saved(directory: Path) -> bool:
    return any((directory / name).is_file() for name in SAVED)


def detect(directory: Path) -> str:
    """The form of the image set: folder, shards or table. Folders come first: the tars they came in may lie beside."""
    train = directory / "train"
    if train.is_dir() and any(path.is_dir() for path in train.iterdir()):
        return "folder"
    if files_by_split(directory, "tar"):
        return "shards"
    if is_saved(directory) or files_by_split(directory, "parquet"):
        return "table"
    raise GradsieveError(
        f"{directory} holds no image set. Looked for train/CLASS/ (folder), train*.tar (shards), "
        f"train*.parquet and {' or '.join(SAVED)} (table)."
    )


def image_splits(
    directory: Path,
    format: str,
    setting: str,
    size: int,
    *,
    image_column: str | None = None,
    label_column: str | None = None,
) -> Splits:
    """An image set on disk. `format`: shards, folder, table, or auto to find out."""
    form = detect(directory) if format == "auto" else format
    if form in ("shards", "folder"):
        return (shard_splits if form == "shards" else folder_splits)(directory, setting, size)
    if form != "table":
        raise GradsieveError(f"unknown format {format!r}; choose auto, shards, folder or table.")
    if setting != "full":
        raise GradsieveError(f"{directory} is a table; its setting must be full, not {setting}.")
    return table_splits(directory, size, image_column=image_column, label_column=label_column)
