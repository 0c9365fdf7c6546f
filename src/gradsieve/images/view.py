"""Pictures of any shape, seen as squares: a random part for training, the centre for evaluation."""

import hashlib
import math
from collections.abc import Iterable, Sequence
from io import BytesIO
from pathlib import Path

import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from ..errors import GradsieveError

SCALE = (0.08, 1.0)
RATIO = (3 / 4, 4 / 3)
TRIES = 10
CENTRE = 224 / 256
"""What evaluation sees of the shorter side: as if it were scaled to 256 pixels for a view of 224."""

Box = tuple[float, float, float, float]


def decode(raw: bytes | Path, where: str) -> Image.Image:
    """The whole picture in RGB, whatever its mode. `where` names it to the user if it is broken."""
    try:
        with Image.open(BytesIO(raw) if isinstance(raw, bytes) else raw) as image:
            return _rgb(image)
    except Exception as error:  # a decoder raises whatever its format's parser happens to stumble over
        reason = "no known format" if isinstance(error, UnidentifiedImageError) else error
        raise GradsieveError(f"{where} cannot be read as an image ({reason}). Replace it or remove it.") from error


def _rgb(image: Image.Image) -> Image.Image:
    """`convert` alone would cut 16-bit pixels off at 255, and warn of palettes that have transparent colours."""
    if image.mode.startswith("I"):
        image = image.convert("I").point(lambda value: value * (1 / 256))
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB")


def training_view(image: Image.Image, size: int, generator: torch.Generator) -> Tensor:
    """A random part of the picture, scaled to the square and in half the cases mirrored: (3, size, size) uint8."""
    view = _square(image, size, random_box(*image.size, generator))
    return view.flip(2) if torch.rand((), generator=generator) < 0.5 else view


def evaluation_view(image: Image.Image, size: int) -> Tensor:
    """The shorter side scaled to size * 256 / 224 and the centre of that, in one go: (3, size, size) uint8."""
    side = CENTRE * min(image.size)
    left, top = ((length - side) / 2 for length in image.size)
    return _square(image, size, (left, top, left + side, top + side))


def random_box(width: int, height: int, generator: torch.Generator) -> Box:
    """Left, top, right and bottom of a random part of a picture.

    Its share of the area is uniform in `SCALE`, the logarithm of its aspect ratio uniform in `RATIO`'s. A box that does
    not fit is drawn anew; after ten the largest central one of a permitted ratio serves, as in torchvision's
    RandomResizedCrop. All tries are drawn at once, so that a view does not hang on the shapes of those before it.
    """
    low, high = (math.log(ratio) for ratio in RATIO)
    for share, aspect, x, y in torch.rand(TRIES, 4, generator=generator).tolist():
        area = width * height * (SCALE[0] + share * (SCALE[1] - SCALE[0]))
        ratio = math.exp(low + aspect * (high - low))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(x * (width - w + 1)), int(y * (height - h + 1))
            return left, top, left + w, top + h
    w, h = min(width, round(height * RATIO[1])), min(height, round(width / RATIO[0]))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def _square(image: Image.Image, size: int, box: Box) -> Tensor:
    pixels = image.resize((size, size), Image.Resampling.BILINEAR, box=box).tobytes()
    return torch.frombuffer(bytearray(pixels), dtype=torch.uint8).view(size, size, 3).permute(2, 0, 1)


class Pictures:
    """A source whose images lie encoded somewhere, in any shape: what folders, shards and tables share."""

    size: int
    """Pixels along a side of the view."""
    labels: Tensor
    shards: Tensor | None = None
    checksum: str

    def locate(self, row: int) -> tuple[bytes | Path, str]:
        """A row's encoded picture, or its file, and the name under which the user knows it."""
        raise NotImplementedError

    def id(self, row: int) -> str:
        raise NotImplementedError

    def length(self, row: int) -> int | None:
        """Bytes of a row's encoded picture, where they are known without reading it."""
        return None

    def read(self, rows: Sequence[int], generator: torch.Generator | None) -> Tensor:
        """Views of the rows, (B, 3, size, size) uint8: random ones with a generator, else central ones."""
        batch = torch.empty(len(rows), 3, self.size, self.size, dtype=torch.uint8)
        for place, row in zip(batch, rows, strict=True):
            image = decode(*self.locate(row))
            view = training_view(image, self.size, generator) if generator else evaluation_view(image, self.size)
            place.copy_(view)
        return batch

    def check_labels(self, num_classes: int) -> None:
        if len(beyond := (self.labels >= num_classes).nonzero()):
            row = int(beyond[0])
            raise GradsieveError(
                f"{self.locate(row)[1]} has label {int(self.labels[row])}, but the training set has {num_classes} "
                f"classes, 0 to {num_classes - 1}."
            )


def readable(name: str) -> str:
    """A file's name as text that can be written anywhere: bytes that are no text are spelt out."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def as_line(name: str) -> str:
    """`readable`, and on one line whatever is in it."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in readable(name))


def checksum(names: Iterable[str], *numbers: Tensor) -> str:
    """Tells sets apart by what can be known without reading every picture."""
    digest = hashlib.sha256("\0".join(names).encode("utf-8", "surrogateescape"))
    for tensor in numbers:
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()[:16]
