"""Image sets as tensors in memory, and damage of a known kind."""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from ..errors import GradsieveError

CIFAR10_MD5 = {
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
}
CIFAR10_RECORD = 1 + 3 * 32 * 32


@dataclass(frozen=True)
class ImageSet:
    """Images (N, C, H, W) in float32, labels (N,)."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: slice | Tensor) -> "ImageSet":
        return ImageSet(self.images[index], self.labels[index])

    def dataset(self) -> TensorDataset:
        """Examples as (image, label, index in the set)."""
        return TensorDataset(self.images, self.labels, torch.arange(len(self)))

    def loader(
        self, batch_size: int, *, generator: torch.Generator | None = None, drop_last: bool = False
    ) -> DataLoader[tuple[Tensor, ...]]:
        """Shuffled if there is a generator to shuffle with."""
        return DataLoader(
            self.dataset(), batch_size, shuffle=generator is not None, generator=generator, drop_last=drop_last
        )


@dataclass(frozen=True)
class Splits:
    """What an experiment needs. `damaged` tells for each training example whether its label was made wrong."""

    train: ImageSet
    dev: ImageSet
    test: ImageSet
    num_classes: int
    damaged: Tensor


def digits(*, seed: int, num_dev: int = 100, num_test: int = 597) -> Splits:
    """scikit-learn's 1,797 bundled digits, 8x8, split at random by `seed`: 1,100 for training by default."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16  # (N, 1, 8, 8)
    everything = ImageSet(images, torch.tensor(bunch.target, dtype=torch.long))
    order = torch.randperm(len(everything), generator=torch.Generator().manual_seed(seed))
    dev, test, train = order[:num_dev], order[num_dev : num_dev + num_test], order[num_dev + num_test :]
    return _splits(everything[train], everything[dev], everything[test])


def cifar10_4k(directory: Path) -> Splits:
    """The paper's CIFAR-10 (4,000): the first 4,000 images as posted, the last 400 of them the dev set."""
    first = _normalized(*_read_cifar10(directory / "data_batch_1.bin"))
    test = _normalized(*_read_cifar10(directory / "test_batch.bin"))
    return _splits(first[:3600], first[3600:4000], test)


def with_label_noise(splits: Splits, share: float, *, seed: int) -> Splits:
    """Gives `share` of the training labels another class, drawn uniformly from the wrong ones."""
    generator = torch.Generator().manual_seed(seed)
    labels = splits.train.labels.clone()
    chosen = torch.randperm(len(labels), generator=generator)[: round(share * len(labels))]
    shift = torch.randint(1, splits.num_classes, (len(chosen),), generator=generator)
    labels[chosen] = (labels[chosen] + shift) % splits.num_classes
    damaged = torch.zeros(len(labels), dtype=torch.bool)
    damaged[chosen] = True
    return replace(splits, train=ImageSet(splits.train.images, labels), damaged=damaged)


def _splits(train: ImageSet, dev: ImageSet, test: ImageSet) -> Splits:
    return Splits(train, dev, test, 10, torch.zeros(len(train), dtype=torch.bool))


def _read_cifar10(path: Path) -> tuple[Tensor, Tensor]:
    """The official binary layout: a byte of label and 3,072 of pixels for each image."""
    if not path.is_file():
        raise GradsieveError(f"{path} is missing: give the folder that holds CIFAR-10's binary version.")
    raw = path.read_bytes()
    if hashlib.md5(raw, usedforsecurity=False).hexdigest() != CIFAR10_MD5[path.name]:
        raise GradsieveError(f"{path} is damaged: its checksum is not that of CIFAR-10. Fetch it again.")
    table = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(-1, CIFAR10_RECORD)
    return table[:, 1:].view(-1, 3, 32, 32), table[:, 0].long()


def _normalized(pixels: Tensor, labels: Tensor) -> ImageSet:
    mean = torch.tensor([0.4914, 0.4822, 0.4465]).view(3, 1, 1)
    deviation = torch.tensor([0.2470, 0.2435, 0.2616]).view(3, 1, 1)
    return ImageSet((pixels.float() / 255 - mean) / deviation, labels)
