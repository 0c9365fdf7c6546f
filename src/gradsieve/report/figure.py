"""The look of every picture."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib

INK, QUIET = "#1f2933", "#7b8794"


@contextmanager
def drawn(file: Path, *, title: str, up: str) -> Iterator[Any]:
    """Axes over training steps to draw on; what is drawn on them becomes `file`."""
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.2), dpi=150)
    try:
        yield axes
        axes.set_xlabel("training step", color=INK)
        axes.set_ylabel(up, color=INK)
        axes.set_title(title, loc="left", color=INK, fontsize=12)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=INK)
        figure.tight_layout()
        figure.savefig(file)
    finally:
        plt.close(figure)


def name_at_the_end(axes: Any, name: str, height: float, colour: str) -> None:
    """A curve's name, right of where it ends."""
    axes.annotate(
        name,
        (1, height),
        (6, 0),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        color=colour,
        va="center",
    )
