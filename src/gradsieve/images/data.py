"""Image sets: where the pixels lie, which rows of them count, and what their labels are.

A `Source` reads pixels. An `ImageSet` is a view of one: rows and labels. Splits, damage and the union of training and
dev set are all views; no pixel is copied.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ..errors import GradsieveError


class Source(Protocol):
    """Pixels at rest: in memory, in files, in shards."""

    labels: Tensor
    """(N,), int64."""
    shards: Tensor | None
    """(N,), which file each image lies in if a pass should go file by file; else None."""

    @property
    def checksum(self) -> str:
        """Tells this data from any other; part of a run's signature."""
        ...

    def read(self, rows: Sequence[int], generator: torch.Generator | None) -> Tensor:
        """Images as bytes, (B, C, H, W) uint8. A generator asks for the random view of training."""
        ...

    def id(self, row: int) -> str:
        """Tells an image from all others of its kind, in any set that has it."""
        ...


@dataclass(frozen=True)
class ImageSet:
    """Rows of a source with their labels, which need not be the source's own."""

    source: Source
    rows: Tensor  # (N,)
    labels: Tensor  # (N,)

    @classmethod
    def whole(cls, source: Source) -> "ImageSet":
        return cls(source, torch.arange(len(source.labels)), source.labels)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: slice | Tensor) -> "ImageSet":
        return ImageSet(self.source, self.rows[index], self.labels[index])

    def __add__(self, other: "ImageSet") -> "ImageSet":
        if other.source is not self.source:
            raise GradsieveError("only sets of the same source can be joined.")
        return ImageSet(self.source, torch.cat([self.rows, other.rows]), torch.cat([self.labels, other.labels]))

    def read(self, index: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """A batch: pixels (B, C, H, W) uint8, labels (B,), place in the set (B,)."""
        return self.source.read(self.rows[index].tolist(), generator), self.labels[index], index


@dataclass(frozen=True)
class Splits:
    """What an experiment needs."""

    train: ImageSet
    dev: ImageSet
    test: ImageSet
    num_classes: int
    mean: tuple[float, ...]
    """Per channel, of a pixel's byte; the network sees (byte - mean) / deviation."""
    deviation: tuple[float, ...]
    damaged: Tensor | None = None
    """(N,), which training examples have a label made wrong; None where nobody damaged anything."""
    removed: Tensor | None = None
    """Which examples of the undamaged training set are gone; None where none are."""
    dev_holdout: ImageSet | None = None
    """Dev examples that no method sees; None where none are kept back."""
    classes: tuple[str, ...] = ()
    """What people call the classes, where the data say."""
    weights: Tensor | None = None
    """(N,), what each training example's loss is multiplied by, 1 on the average; None for 1 everywhere."""
    selection: str = ""
    """Checksum of the scores that the training set was filtered or weighted by."""

    @property
    def checksum(self) -> str:
        parts = dict.fromkeys(s.source.checksum for s in (self.train, self.dev, self.test))
        if self.selection:
            parts[self.selection] = None
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]


@dataclass
class Memory:
    """Pixels in memory, (N, C, H, W) uint8. Its random views are made on the device, by augment.py."""

    pixels: Tensor
    labels: Tensor
    shards: Tensor | None = field(default=None, init=False)

    def read(self, rows: Sequence[int], generator: torch.Generator | None) -> Tensor:
        return self.pixels[torch.as_tensor(rows)]

    def id(self, row: int) -> str:
        return str(row)

    @cached_property
    def checksum(self) -> str:
        digest = hashlib.sha256(self.pixels.numpy().tobytes())
        digest.update(self.labels.numpy().tobytes())
        return digest.hexdigest()[:16]


class Joined:
    """Two sources in one: the second's rows follow the first's."""

    def __init__(self, first: Source, second: Source):
        self.first, self.second = first, second
        self.labels = torch.cat([first.labels, second.labels])
        self.shards: Tensor | None = None
        if first.shards is not None and second.shards is not None:
            self.shards = torch.cat([first.shards, second.shards + first.shards.max() + 1])
        self.checksum = f"{first.checksum}+{second.checksum}"

    def read(self, rows: Sequence[int], generator: torch.Generator | None) -> Tensor:
        places = map(self.place, rows)
        return torch.cat([source.read([row], generator) for source, row in places])

    def id(self, row: int) -> str:
        source, row = self.place(row)
        return source.id(row)

    def place(self, row: int) -> tuple[Source, int]:
        """The source that has the row, and its number there."""
        count = len(self.first.labels)
        return (self.first, row) if row < count else (self.second, row - count)


def digits(*, seed: int, num_dev: int = 100, num_test: int = 597, held_out: bool = False) -> Splits:
    """scikit-learn's 1,797 bundled digits, 8x8, split at random by `seed`: 1,100 for training by default.

    `held_out` takes the last 200 of these in place of the test set, for choosing settings.
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    pixels = torch.tensor(bunch.images, dtype=torch.uint8).unsqueeze(1)  # (N, 1, 8, 8), 0 to 16
    everything = ImageSet.whole(Memory(pixels, torch.tensor(bunch.target, dtype=torch.long)))
    order = torch.randperm(len(everything), generator=torch.Generator().manual_seed(seed))
    dev, test, train = order[:num_dev], order[num_dev : num_dev + num_test], order[num_dev + num_test :]
    if held_out:
        train, test = train[:-200], train[-200:]
    classes = tuple(map(str, range(10)))
    return Splits(everything[train], everything[dev], everything[test], 10, (0.0,), (16.0,), classes=classes)


CIFAR10_MD5 = {
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
}
CIFAR10_RECORD = 1 + 3 * 32 * 32
CIFAR10_FOLDER = "cifar-10-batches-bin"
CIFAR10_MEAN, CIFAR10_DEVIATION = (125.3, 123.0, 113.9), (63.0, 62.1, 66.7)
CIFAR10_4K = 4000
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def cifar10(directory: Path, setting: str, *, held_out: bool = False) -> Splits:
    """CIFAR-10's binary version, in the order in which it is posted.

    ``"4k"``: the first 4,000 images, the last 400 of them for dev; needs batch 1 and the test batch only. ``"full"``:
    all 50,000, the last 5,000 of them for dev. `held_out` takes the images of batch 1 that ``"4k"`` leaves aside in
    place of the test set, for choosing settings.
    """
    if held_out and setting != "4k":
        raise GradsieveError("data.held_out: the full setting leaves no training image aside. Use data.setting=4k.")
    folder = directory / CIFAR10_FOLDER if (directory / CIFAR10_FOLDER).is_dir() else directory
    names = [name for name in CIFAR10_MD5 if name != "test_batch.bin"][: 1 if setting == "4k" else None]
    if missing := [name for name in (*names, "test_batch.bin") if not (folder / name).is_file()]:
        raise GradsieveError(
            f"{folder} lacks {', '.join(missing)} of CIFAR-10's binary version. Give the folder that holds them with "
            "--data, or fetch them with: gradsieve download cifar10 --out DIR"
        )
    parts = [_read_cifar10(folder / name) for name in names]
    posted = ImageSet.whole(Memory(*(torch.cat(p) for p in zip(*parts, strict=True))))
    posted, aside = (posted[:CIFAR10_4K], posted[CIFAR10_4K:]) if setting == "4k" else (posted, None)
    test = aside if held_out and aside else ImageSet.whole(Memory(*_read_cifar10(folder / "test_batch.bin")))
    num_train = len(posted) - len(posted) // 10
    train, dev = posted[:num_train], posted[num_train:]
    return Splits(train, dev, test, 10, CIFAR10_MEAN, CIFAR10_DEVIATION, classes=CIFAR10_CLASSES)


def _read_cifar10(path: Path) -> tuple[Tensor, Tensor]:
    """The official binary layout: a byte of label and 3,072 of pixels for each image."""
    raw = path.read_bytes()
    if len(raw) % CIFAR10_RECORD or not raw:
        raise GradsieveError(f"{path} is cut short: {len(raw):,} bytes are no whole number of images. Fetch it again.")
    if hashlib.md5(raw, usedforsecurity=False).hexdigest() != CIFAR10_MD5[path.name]:
        raise GradsieveError(f"{path} is damaged: its checksum is not that of CIFAR-10. Fetch it again.")
    table = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(-1, CIFAR10_RECORD)
    return table[:, 1:].view(-1, 3, 32, 32), table[:, 0].long()
