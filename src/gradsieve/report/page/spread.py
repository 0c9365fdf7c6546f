"""How the weights of the training examples lie, at each time they were written down and over the whole of training."""

import warnings
from typing import Any

import numpy as np

from .curves import rounded

LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)
EDGES = 2.0 ** np.arange(-7, 5.5, 0.5)
"""Of the histogram's bars, from 1/128 to 32 times the weight in plain training; what lies beyond goes to the ends."""


def mean_weights(weights: np.ndarray) -> np.ndarray:
    """Of each example over time, (N,), nan if it never had one. `weights`: (S, N)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of examples that never had a weight
        return np.nanmean(weights, axis=0)


def groups(count: int, damaged: np.ndarray | None) -> dict[str, np.ndarray]:
    """Which examples are told apart: right and wrong labels, if that is known and there are both."""
    if damaged is None or len(damaged) != count or not damaged.any() or damaged.all():
        return {"all examples": np.ones(count, bool)}
    return {"right labels": ~damaged, "wrong labels": damaged}


def quantiles(steps: np.ndarray, weights: np.ndarray, damaged: np.ndarray | None) -> list[dict[str, Any]]:
    """For each group, the quantiles of its weights at each step."""
    found = []
    for name, members in groups(weights.shape[1], damaged).items():
        known = [(step, own) for step, row in zip(steps, weights, strict=True) if len(own := _finite(row[members]))]
        rows = [np.quantile(own, LEVELS).tolist() for _, own in known]
        columns = {f"q{round(100 * level)}": rounded([row[i] for row in rows]) for i, level in enumerate(LEVELS)}
        found.append({"group": name, "step": [int(step) for step, _ in known], **columns})
    return found


def histogram(mean: np.ndarray, damaged: np.ndarray | None) -> list[dict[str, Any]]:
    """For each group, how many examples have had which mean weight: stacked bars between `EDGES`, no empty ones."""
    found, bottom = [], np.zeros(len(EDGES) - 1, int)
    for name, members in groups(len(mean), damaged).items():
        own = np.clip(_finite(mean[members]), EDGES[0], EDGES[-1] * (1 - 1e-6))
        counts, _ = np.histogram(own, EDGES)
        for low, high, count, base in zip(EDGES[:-1], EDGES[1:], counts, bottom, strict=True):
            if count:
                bar = {"low": float(low), "high": float(high), "bottom": int(base), "top": int(base + count)}
                found.append({"group": name, "count": int(count), **bar})
        bottom += counts
    return found


def class_shares(labels: np.ndarray, mean: np.ndarray, num_classes: int) -> list[tuple[float, float]]:
    """Of each class, its share of the data and of the weight given in training, both in per cent (Figure 4)."""
    known = np.isfinite(mean)
    data = np.bincount(labels, minlength=num_classes).astype(float)
    trained = np.bincount(labels[known], weights=mean[known], minlength=num_classes)
    return list(zip(100 * data / max(1, data.sum()), 100 * trained / max(1e-12, trained.sum()), strict=True))


def _finite(values: np.ndarray) -> np.ndarray:
    return values[np.isfinite(values)]
