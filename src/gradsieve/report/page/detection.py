"""How well a score finds the wrong labels, where these are known."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import rankdata

from .read import Run
from .spread import mean_weights

Suspicions = tuple[Mapping[str, np.ndarray], np.ndarray]
"""By kind of score, how suspicious each example is; and which are wrong."""
POINTS = 40
"""Of the curve of precision."""


@dataclass(frozen=True)
class Found:
    """What a score is worth that ought to be high for wrong labels."""

    auroc: float
    precision: float
    """Share of wrong labels among the k most suspicious examples, k being as many as there are wrong ones."""


def auroc(suspicion: np.ndarray, wrong: np.ndarray) -> float:
    """Probability that a wrong label is more suspicious than a right one; ties count half."""
    ranks = rankdata(suspicion)
    count = int(wrong.sum())
    return float((ranks[wrong].sum() - count * (count + 1) / 2) / (count * (len(wrong) - count)))


def precision_at(suspicion: np.ndarray, wrong: np.ndarray, ks: np.ndarray) -> np.ndarray:
    """Expected share of wrong labels among the k most suspicious examples, ties broken at random."""
    order = np.argsort(-suspicion, kind="stable")
    _, group = np.unique(-suspicion[order], return_inverse=True)
    share = np.bincount(group, weights=wrong[order]) / np.bincount(group)
    return np.cumsum(share[group])[ks - 1] / ks


def found(suspicion: np.ndarray, wrong: np.ndarray) -> Found:
    count = int(wrong.sum())
    return Found(auroc(suspicion, wrong), float(precision_at(suspicion, wrong, np.array([count]))[0]))


def precision_curve(suspicion: np.ndarray, wrong: np.ndarray) -> dict[str, list[Any]]:
    ks = np.unique(np.linspace(1, len(wrong), POINTS).round().astype(int))
    return {"k": ks.tolist(), "precision": [round(100 * p, 2) for p in precision_at(suspicion, wrong, ks)]}


def suspicions(run: Run) -> Suspicions | None:
    """Low weight, high loss, low quality by cleanlab. None where nothing is to be found."""
    wrong = run.examples.get("damaged")
    if wrong is None or not wrong.any() or wrong.all():
        return None
    wrong, scores = wrong.astype(bool), {}
    _, weights = run.weights
    if weights.shape[1] == len(wrong):
        scores["weight"] = -mean_weights(weights)
    if "losses" in run.examples:
        scores["loss"] = run.examples["losses"].astype(np.float32)
    if "probabilities" in run.examples:
        quality = label_quality(run.examples["labels"], run.examples["probabilities"])
        if quality is not None:
            scores["cleanlab"] = -quality
    known = np.all([np.isfinite(score) for score in scores.values()], axis=0) if scores else np.zeros(0, bool)
    if not scores or not wrong[known].any() or wrong[known].all():
        return None
    return {kind: score[known] for kind, score in scores.items()}, wrong[known]


def label_quality(labels: np.ndarray, probabilities: np.ndarray) -> np.ndarray | None:
    """Cleanlab's, by the model's confidence in the label, adjusted for classes; None where it cannot tell."""
    try:
        from cleanlab.rank import get_label_quality_scores
    except ModuleNotFoundError:
        return None
    exact = probabilities.astype(np.float64)
    exact /= exact.sum(axis=1, keepdims=True)
    try:
        quality: np.ndarray = get_label_quality_scores(labels.astype(int), exact, adjust_pred_probs=True)
    except ValueError:  # a class without examples, for one
        return None
    return quality
