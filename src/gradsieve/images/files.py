"""Image sets in files, too big for memory: a folder for each class, or WebDataset's tar shards.

Labels are known from the start and pictures are read by row, so that subsets, scores, damage and resuming work as for
a set in memory. No file stays open between reads: sources can be pickled, and forked workers share no handle.
"""

import os
import re
import tarfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..errors import GradsieveError
from .data import ImageSet, Joined, Splits
from .view import Pictures, as_line, checksum, readable

EXTENSIONS = ("jpg", "jpeg", "png", "bmp", "webp", "ppm")
SPLIT = re.compile(r"(?<![a-z])(train|dev|val|test)")
MEMBER = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)")
"""A member of a shard: the example's key, up to the first dot of the file's name, and what of the example it is."""
BLOCK, LONG = tarfile.BLOCKSIZE, 90
IMAGENET_MEAN, IMAGENET_DEVIATION = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)


class Folder(Pictures):
    """A folder for each class, in the order of their names; in each its images, in the order of theirs."""

    def __init__(self, directory: Path, size: int, classes: Sequence[str] | None = None) -> None:
        """`classes`: the training set's, if this is another set."""
        found = sorted(path.name for path in directory.iterdir() if path.is_dir() and not path.name.startswith("."))
        self.directory, self.size, self.classes = directory, size, list(found if classes is None else classes)
        if unknown := sorted(set(found) - set(self.classes)):
            raise GradsieveError(f"{directory} has classes that the training set lacks: {', '.join(unknown)}.")
        numbers = {name: label for label, name in enumerate(self.classes)}
        files = [(numbers[folder], *file) for folder in found for file in _images(directory / folder)]
        if not files:
            raise GradsieveError(f"{directory} has no images; looked for CLASS/*.{{{','.join(EXTENSIONS)}}} in it.")
        labels, names, sizes = zip(*files, strict=True)
        self.labels = torch.tensor(labels)
        self.names = np.array([os.fsencode(name) for name in names])  # compact: workers copy what they touch
        self.checksum = checksum([*self.classes, *names], self.labels, torch.tensor(sizes))

    def locate(self, row: int) -> tuple[Path, str]:
        path = self.directory / self.classes[self.labels[row]] / os.fsdecode(self.names[row])
        return path, str(path)

    def id(self, row: int) -> str:
        """Such as ``train/cat/12.jpg``."""
        path, _ = self.locate(row)
        return as_line("/".join(path.parts[-3:]))

    def length(self, row: int) -> int:
        return self.locate(row)[0].stat().st_size


def _images(folder: Path) -> list[tuple[str, int]]:
    """Names and sizes, by name."""
    endings = tuple(f".{extension}" for extension in EXTENSIONS)
    with os.scandir(folder) as entries:
        files = (e for e in entries if e.name.lower().endswith(endings) and not e.name.startswith(".") and e.is_file())
        return sorted((e.name, e.stat().st_size) for e in files)


class Shards(Pictures):
    """Uncompressed tars of `key.jpg` (or another kind of image) and `key.cls`, the label as text.

    Their headers are read once; from then on an image is a place in a file.
    """

    def __init__(self, paths: Sequence[Path], size: int) -> None:
        self.paths, self.size = list(paths), size
        self.index = torch.cat([_index(path, shard) for shard, path in enumerate(self.paths)])  # (N, 4)
        self.shards, self.labels = self.index[:, 0].clone(), self.index[:, 1].clone()
        self.checksum = checksum([path.name for path in self.paths], self.index)

    def locate(self, row: int) -> tuple[bytes, str]:
        path, name, raw = self._member(row, self.length(row))
        return raw, f"{path}, {name}"

    def id(self, row: int) -> str:
        """Such as ``train-0003.tar/n01440764_18.jpg``; a name too long for its header gets its place in the file."""
        path, name, _ = self._member(row, 0)
        place = f"#{int(self.index[row, 2])}" if len(name) >= LONG else ""
        return as_line(f"{path.name}/{name}{place}")

    def length(self, row: int) -> int:
        return int(self.index[row, 3])

    def _member(self, row: int, length: int) -> tuple[Path, str, bytes]:
        """The shard, the member's name, and as much of the member."""
        shard, _, start, _ = self.index[row].tolist()
        with self.paths[shard].open("rb") as file:
            file.seek(start - BLOCK)
            header, raw = file.read(BLOCK), file.read(length)
        return self.paths[shard], tarfile.TarInfo.frombuf(header, "utf-8", "replace").name, raw


def _index(path: Path, shard: int) -> Tensor:
    """Of each example the shard, the label, and where in the file its image starts and how long it is, (N, 4)."""
    images: dict[str, tuple[int, int]] = {}
    labels: dict[str, bytes] = {}
    try:
        with path.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                match = MEMBER.fullmatch(member.name)
                if match is None or not member.isreg():
                    continue
                key, kind = match[1], match[2].lower()
                if key in images and kind in EXTENSIONS:
                    raise GradsieveError(f"{path}: example {key} has two images. Remove one.")
                if kind in EXTENSIONS:
                    images[key] = member.offset_data, member.size
                elif kind == "cls":
                    file.seek(member.offset_data)
                    labels[key] = file.read(member.size)
            file.seek(tar.offset)
            if file.read(BLOCK) != bytes(BLOCK):  # tarfile takes a broken header for the end
                raise tarfile.ReadError("it has no end mark")
    except (tarfile.TarError, OSError) as error:
        raise GradsieveError(f"{path} is no whole, uncompressed tar ({error}). Fetch it or make it again.") from error
    if unpaired := sorted(images.keys() ^ labels.keys()):
        lacks = "label (.cls)" if unpaired[0] in images else f"image ({', '.join(EXTENSIONS)})"
        raise GradsieveError(f"{path}: example {unpaired[0]} has no {lacks}. Add it or remove the example.")
    if not images:
        raise GradsieveError(f"{path} has no examples. Remove it.")
    return torch.tensor([(shard, _label(labels[key], f"{path}, {key}.cls"), *images[key]) for key in images])


def _label(raw: bytes, where: str) -> int:
    if not re.fullmatch(rb"\s*\d{1,9}\s*", raw):
        raise GradsieveError(f"{where} holds {raw[:20]!r}; a label is a whole number from 0 up.")
    return int(raw)


def folder_splits(directory: Path, setting: str, size: int) -> Splits:
    """The folders ``train``, ``test`` and, if there is one, ``dev``, with a folder for each class.

    ``"10pct"``: each class's first tenth of the training files; ``"full"``: all. Where there is no dev, the last tenth
    of those, by class. ``val`` stands in for what is missing; the paper tests on ImageNet's.
    """
    here = [name for name in ("dev", "test", "val", "validation") if (directory / name).is_dir()]
    dev_name, test_name = roles(here)
    if test_name is None or not (directory / "train").is_dir():
        raise GradsieveError(f"{directory} must hold the folders train, and test or val, with a folder for each class.")
    source = Folder(directory / "train", size)
    counts = torch.bincount(source.labels, minlength=len(source.classes))
    least = 1 if dev_name else 2
    if (fewest := int(counts.min())) < least:
        folder = directory / "train" / source.classes[int(counts.argmin())]
        raise GradsieveError(f"{folder} needs two images or more, for training and for dev; it has {fewest}.")
    place = torch.arange(len(source.labels)) - (counts.cumsum(0) - counts)[source.labels]  # (N,), in the class
    kept = _share(counts, setting).clamp(min=least)[source.labels]
    dev, test = (Folder(directory / n, size, source.classes) if n else None for n in (dev_name, test_name))
    assert test is not None
    return replace(
        _split(source, place, kept, dev, test, len(source.classes)), classes=tuple(map(readable, source.classes))
    )


def shard_splits(directory: Path, setting: str, size: int) -> Splits:
    """``train*.tar``, ``test*.tar`` and, if there are such, ``dev*.tar``; or folders of these names.

    ``"10pct"``: the first tenth of the training shards; ``"full"``: all. Where there is no dev, the last tenth of
    those. ``val*.tar`` stands in for what is missing.
    """
    tars = files_by_split(directory, "tar")
    dev_name, test_name = roles([name for name, found in tars.items() if found])
    train = tars["train"]
    if not train or not test_name:
        raise GradsieveError(f"{directory} must hold the shards train*.tar, and test*.tar or val*.tar.")
    kept = int(_share(torch.tensor(len(train)), setting))
    least = 1 if dev_name else 2
    if kept < least:
        raise GradsieveError(
            f"{directory} has training shards: {len(train)}. The setting {setting} needs "
            f"{10 * least if setting == '10pct' else least} or more, for dev is made of whole ones."
        )
    source = Shards(train[:kept], size)
    num_classes = int(source.labels.max()) + 1
    if num_classes > 100 * len(source.labels):
        row = int(source.labels.argmax())
        raise GradsieveError(f"{source.locate(row)[1]} has label {num_classes - 1}, more than there can be classes.")
    dev, test = (Shards(tars[name], size) if name else None for name in (dev_name, test_name))
    assert test is not None
    for other in (dev, test):
        if other is not None:
            other.check_labels(num_classes)
    return _split(source, source.index[:, 0], torch.tensor(kept), dev, test, num_classes)


def roles(present: Sequence[str]) -> tuple[str | None, str | None]:
    """Which of the splits present are dev and test; one called val is whichever is missing, test first."""
    spare = [name for name in present if name.startswith("val")][:1]
    test = "test" if "test" in present else next(iter(spare), None)
    return ("dev" if "dev" in present else next((name for name in spare if name != test), None)), test


def _share(count: Tensor, setting: str) -> Tensor:
    if setting not in ("10pct", "full"):
        raise GradsieveError(f"unknown setting {setting!r}; choose 10pct or full.")
    return count // 10 if setting == "10pct" else count


def _split(
    source: Pictures, place: Tensor, kept: Tensor, dev: Pictures | None, test: Pictures, num_classes: int
) -> Splits:
    """The first `kept` places (files of a class, or shards); without a dev set the last tenth of them is dev."""
    posted = ImageSet.whole(source if dev is None else Joined(source, dev))
    first_dev = kept if dev is not None else kept - (kept // 10).clamp(min=1)
    count = len(source.labels)
    dev_set = posted[count:] if dev is not None else posted[(first_dev <= place) & (place < kept)]
    train = posted[:count][place < first_dev]
    return Splits(train, dev_set, ImageSet.whole(test), num_classes, IMAGENET_MEAN, IMAGENET_DEVIATION)


def files_by_split(directory: Path, extension: str) -> defaultdict[str, list[Path]]:
    """Files here and a folder down, by name, under the first of train, dev, val, test to begin a word of their path."""
    splits = defaultdict(list)
    for path in sorted([*directory.glob(f"*.{extension}"), *directory.glob(f"*/*.{extension}")]):
        if match := SPLIT.search(path.relative_to(directory).as_posix().lower()):
            splits[match[1]].append(path)
    return splits
