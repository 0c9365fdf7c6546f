"""How much of each language a run uses, by step: the paper's Figures 5 and 6, read from run directories."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from .drawing import COLOURS, apart, drawn


def usage_curves(run: Path) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Steps, and the share of each language at each of them."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    noted = {line["step"]: line["usage"] for line in lines if "usage" in line}
    languages = next(iter(noted.values())) if noted else {}
    return np.array([*noted]), {name: np.array([usage[name] for usage in noted.values()]) for name in languages}


def plot_usage(runs: Sequence[Path], file: Path, *, title: str) -> None:
    """One curve for each language: its share of the sentences drawn, mean over the runs and, shaded, their range."""
    curves = [usage_curves(run) for run in runs]
    steps = sorted(set.intersection(*(set(steps.tolist()) for steps, _ in curves)))
    names = sorted(curves[0][1], key=lambda name: -curves[0][1][name][-1])
    ends = []
    with drawn(file, title, "training step", "share of the sentences drawn, %") as axes:
        for number, name in enumerate(names):
            values = np.stack([100 * np.interp(steps, its, usage[name]) for its, usage in curves])  # (runs, steps)
            colour, dashes = COLOURS[number % len(COLOURS)], "-" if number < len(COLOURS) else "--"
            axes.fill_between(steps, values.min(0), values.max(0), color=colour, alpha=0.18, linewidth=0)
            axes.plot(steps, values.mean(0), color=colour, linewidth=2, linestyle=dashes)
            ends.append((values.mean(0)[-1], name, colour))
        axes.set_ylim(0, None)
        axes.set_xlim(0, max(1, steps[-1]))
        heights = apart([end for end, _, _ in ends], axes.get_ylim()[1])
        for height, (_, name, colour) in zip(heights, ends, strict=True):
            place = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
            axes.annotate(name, (1, height), (6, 0), color=colour, va="center", **place)
