"""Figures over training steps, run by run and averaged over seeds."""

from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any

from .read import Run

Points = dict[int, float]
"""Step -> figure."""
BUDGET = 60_000
"""Figures in the whole page, about."""
FEWEST, MOST = 30, 150
"""Points of a curve, at most, whatever the number of runs."""


def noted(run: Run, *keys: str) -> Points:
    """A figure of metrics.jsonl by step, for instance ``noted(run, "dev", "loss")``."""
    found = {}
    for line in run.lines:
        value: Any = line
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        if isinstance(value, int | float) and isfinite(value):
            found[line["step"]] = float(value)
    return found


def effective_share(run: Run) -> Points:
    """Effective sample size as a share of the batch, in per cent."""
    batch = run.recipe.get("batch_size", 1)
    size = min(batch, run.about.get("sizes", {}).get("train", batch))
    return {step: 100 * value / size for step, value in noted(run, "effective_sample_size").items()}


def points_each(curves: int) -> int:
    """How many points each of so many curves may have."""
    return max(FEWEST, min(MOST, BUDGET // max(1, curves)))


def binned(series: Sequence[Points], steps: int, points: int) -> tuple[list[int], list[list[float | None]]]:
    """All series on one grid of at most `points` bins: the last step of each bin, and means in it, None where none is.

    Series that are no denser than the grid stay as they are.
    """
    width = max(1.0, steps / points)

    def bin_of(step: int) -> int:
        return int(-(-step // width))

    sums: list[dict[int, list[float]]] = [{} for _ in series]
    ends: dict[int, int] = {}
    for own, each in zip(sums, series, strict=True):
        for step, value in each.items():
            own.setdefault(bin_of(step), []).append(value)
            ends[bin_of(step)] = max(step, ends.get(bin_of(step), 0))
    order = sorted(ends)
    rows = [[sum(own[b]) / len(own[b]) if b in own else None for b in order] for own in sums]
    return [ends[b] for b in order], rows


def over_seeds(rows: Sequence[Sequence[float | None]]) -> dict[str, list[float | None]]:
    """Mean and range of several runs at each step, of those that got so far."""
    found: dict[str, list[float | None]] = {"value": [], "low": [], "high": []}
    for values in zip(*rows, strict=True):
        known = [value for value in values if value is not None]
        found["value"].append(sum(known) / len(known) if known else None)
        found["low"].append(min(known) if known else None)
        found["high"].append(max(known) if known else None)
    return found


def curve(variants: Sequence[Mapping[int, Run]], read: Callable[[Run], Points], points: int) -> dict[str, Any] | None:
    """One figure of all runs, as the page wants it; None if nobody has noted it.

    ``step`` is common to all; ``runs`` has for each variant its seeds' values, ``mean`` what `over_seeds` gives.
    """
    runs = [run for variant in variants for run in variant.values()]
    series = {id(run): read(run) for run in runs}
    if not any(series.values()):
        return None
    steps, rows = binned([series[id(run)] for run in runs], max(run.steps for run in runs), points)
    by_run = dict(zip(map(id, runs), rows, strict=True))
    return {
        "step": steps,
        "runs": [{seed: rounded(by_run[id(run)]) for seed, run in variant.items()} for variant in variants],
        "mean": [
            {key: rounded(values) for key, values in over_seeds([by_run[id(r)] for r in variant.values()]).items()}
            for variant in variants
        ],
    }


def rounded(values: Sequence[float | None], digits: int = 4) -> list[float | None]:
    """To so many significant digits: nobody sees more in a picture, and the page is to be small."""
    return [None if value is None else float(f"{value:.{digits}g}") for value in values]
