"""How the weights of right and wrong labels part company."""

from pathlib import Path

import matplotlib
import numpy as np

INK, QUIET, RIGHT, WRONG = "#1f2933", "#7b8794", "#1b7f5c", "#c2410c"


def plot_weights(
    right: list[list[float]], wrong: list[list[float]], file: Path, *, title: str, window: int = 40
) -> None:
    """One curve each over training steps, with the range over seeds; 1 is the weight in plain training."""
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.2), dpi=150)
    for runs, colour, name in ((right, RIGHT, "right labels"), (wrong, WRONG, "wrong labels")):
        curves = np.stack([_smooth(np.asarray(run), window) for run in runs])
        steps = np.arange(1, curves.shape[1] + 1)
        axes.fill_between(steps, curves.min(0), curves.max(0), color=colour, alpha=0.18, linewidth=0)
        axes.plot(steps, curves.mean(0), color=colour, linewidth=2)
        axes.annotate(
            name, (steps[-1], curves.mean(0)[-1]), (6, 0), textcoords="offset points", color=colour, va="center"
        )
    axes.axhline(1, color=QUIET, linewidth=1, linestyle=(0, (4, 3)))
    axes.annotate("plain training", (len(right[0]), 1), (6, 0), textcoords="offset points", color=QUIET, va="center")
    axes.set_xlabel("training step", color=INK)
    axes.set_ylabel("mean weight (uniform = 1)", color=INK)
    axes.set_ylim(0, None)
    axes.set_xlim(0, len(right[0]))
    axes.set_title(title, loc="left", color=INK, fontsize=12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK)
    figure.tight_layout()
    figure.savefig(file)
    plt.close(figure)


def _smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Mean over the last `window` steps, or as many as there were; steps without such examples are left out."""
    known = np.isfinite(values)
    sums, counts = np.cumsum(np.where(known, values, 0.0)), np.cumsum(known)
    sums[window:], counts[window:] = sums[window:] - sums[:-window], counts[window:] - counts[:-window]
    return sums / np.maximum(counts, 1)
