"""How the weights of right and wrong labels part company, read from run directories."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from .figure import QUIET, drawn, name_at_the_end

RIGHT, WRONG = "#1b7f5c", "#c2410c"


def weight_curves(run: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Steps, mean weight of rightly and of wrongly labelled examples; 1 is the weight in plain training."""
    wrong = load_file(run / "damaged.safetensors")["damaged"]
    steps, means = [0], [(1.0, 1.0)]
    for file in sorted((run / "scores").glob("step-*.safetensors")):
        weights = load_file(file)["weights"].astype(np.float32)
        seen = np.isfinite(weights)
        if (seen & wrong).any() and (seen & ~wrong).any():
            steps.append(int(file.stem.removeprefix("step-")))
            means.append((weights[seen & ~wrong].mean(), weights[seen & wrong].mean()))
    return np.array(steps), *np.array(means).T


def plot_weights(runs: Sequence[Path], file: Path, *, title: str) -> None:
    """One curve for right and one for wrong labels over training steps, with the range over the runs."""
    every_steps, *curves = zip(*(weight_curves(run) for run in runs), strict=True)
    steps = every_steps[0]
    with drawn(file, title=title, up="mean weight (uniform = 1)") as axes:
        for values, colour, name in zip(
            map(np.stack, curves), (RIGHT, WRONG), ("right labels", "wrong labels"), strict=True
        ):
            axes.fill_between(steps, values.min(0), values.max(0), color=colour, alpha=0.18, linewidth=0)
            axes.plot(steps, values.mean(0), color=colour, linewidth=2)
            name_at_the_end(axes, name, values.mean(0)[-1], colour)
        axes.axhline(1, color=QUIET, linewidth=1, linestyle=(0, (4, 3)))
        name_at_the_end(axes, "plain training", 1, QUIET)
        axes.set_ylim(0, None)
        axes.set_xlim(0, max(1, steps[-1]))
