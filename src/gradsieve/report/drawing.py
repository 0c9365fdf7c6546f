"""What all pictures have in common."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

INK = "#1f2933"
COLOURS = ("#c2410c", "#1b7f5c", "#2563a8", "#8b5cb0", "#a87d1f", "#c0407f", "#4b8f9e", "#5c6670")


@contextmanager
def drawn(file: Path, title: str, x: str, y: str) -> Iterator[Any]:
    """Axes to draw on; what is drawn on them becomes `file`."""
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.2), dpi=150)
    try:
        yield axes
        axes.set_xlabel(x, color=INK)
        axes.set_ylabel(y, color=INK)
        axes.set_title(title, loc="left", color=INK, fontsize=12)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=INK)
        figure.tight_layout()
        figure.savefig(file)
    finally:
        plt.close(figure)


def apart(values: Sequence[float], height: float) -> list[float]:
    """Places for labels that do not lie over each other: where two would, the higher one makes room."""
    places, last = list(values), -np.inf
    for number in np.argsort(values):
        places[number] = last = max(values[number], last + height / 20)
    return places
