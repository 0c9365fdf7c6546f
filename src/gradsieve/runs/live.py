"""A run while it goes on: its weights in a few characters for the terminal, its figures for TensorBoard."""

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import GradsieveError

BINS, WIDEST = 9, 2.0
"""Bars, and the logarithm to base 2 of the weight at either end: the outer bars are 1/4 and 4, the middle one is 1."""
BARS, PLAIN_BARS = " ▁▂▃▄▅▆▇█", " .:-=+*#@"
FLUSH = 10
"""Seconds, after which figures are on the disk."""


def histogram(weights: Tensor, *, plain: bool = False) -> str:
    """How many examples weigh how much, from a quarter of the uniform weight, 1, to four times; nan are left out."""
    known = weights[weights.isfinite()].float()
    place = known.clamp_min(1e-30).log2().clamp(-WIDEST, WIDEST) / WIDEST  # -1 to 1
    counts = torch.bincount(((place + 1) / 2 * (BINS - 1)).round().long(), minlength=BINS)
    levels = (counts * 8 / counts.max().clamp_min(1)).ceil().long().tolist()  # where there is one, a bar is seen
    bars = PLAIN_BARS if plain else BARS
    return f"1/4|{''.join(bars[level] for level in levels)}|4"


def check_tensorboard() -> None:
    """Before hours are spent."""
    if find_spec("tensorboard") is None:
        raise GradsieveError("--tensorboard needs the package tensorboard: pip install 'gradsieve[tensorboard]'")


class Events:
    """TensorBoard's event files of one run, in its folder ``tensorboard``.

    Args:
        run: the run's folder.
        step: that it goes on from; what was written for later ones is forgotten.
    """

    def __init__(self, run: Path, step: int):
        check_tensorboard()
        from torch.utils.tensorboard import SummaryWriter

        later = step + 1 if step else None
        self.writer: Any = SummaryWriter(str(run / "tensorboard"), purge_step=later, flush_secs=FLUSH)

    def log(self, record: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl: each number in it, under its name."""
        for name, value in numbers({key: value for key, value in record.items() if key != "step"}):
            self.writer.add_scalar(name, value, record["step"])

    def weights(self, step: int, weights: Tensor) -> None:
        known = weights[weights.isfinite()].float().cpu()
        if len(known):
            self.writer.add_histogram("weights", known, step)

    def close(self) -> None:
        self.writer.close()


def numbers(content: Mapping[str, Any] | list[Any], path: str = "") -> Iterator[tuple[str, float]]:
    """All that are in the tree, by names such as ``dev/accuracy``."""
    items = content.items() if isinstance(content, Mapping) else enumerate(content)
    for key, value in items:
        if isinstance(value, Mapping | list):
            yield from numbers(value, f"{path}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{path}{key}", float(value)
