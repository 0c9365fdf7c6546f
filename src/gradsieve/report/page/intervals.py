"""How sure a result is: over seeds, or over the test examples of a single run."""

from collections.abc import Callable, Mapping
from math import sqrt
from typing import Any, Protocol

from ..comparison import half_interval
from .languages import bleu_interval
from .read import Run


class Kind(Protocol):
    """What is to be known of a task."""

    @property
    def metric(self) -> str: ...
    @property
    def judged(self) -> str: ...
    @property
    def caption(self) -> str: ...
    @property
    def bootstrap(self) -> Callable[..., dict[str, tuple[float, ...]]] | None: ...


def wilson(per_cent: float, count: int) -> tuple[float, float]:
    """95% interval of a share that was measured on so many examples."""
    z, p = 1.96, per_cent / 100
    middle = (p + z * z / (2 * count)) / (1 + z * z / count)
    half = z * sqrt(p * (1 - p) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return 100 * (middle - half), 100 * (middle + half)


def own_interval(run: Run, value: float, kind: Kind) -> tuple[float, float] | None:
    """The 95% interval of a single run over test examples, where it can be had."""
    count = run.about.get("sizes", {}).get("test")
    if kind.metric == "accuracy" and count:
        return wilson(value, count)
    half = bleu_interval(run) if kind.metric == "bleu" else None
    return None if half is None else (value - half, value + half)


def result_points(ended: Mapping[str, Mapping[int, Run]], kind: Kind) -> list[dict[str, Any]]:
    """Each run's result, and each method's mean with its interval."""
    found: list[dict[str, Any]] = []
    for variant, runs in ended.items():
        values = {seed: (run.result or {})[kind.judged][kind.metric] for seed, run in runs.items()}
        mean, half = sum(values.values()) / len(values), half_interval(list(values.values()))
        if len(values) > 1:
            found += [{"variant": variant, "value": v, "what": f"seed {seed}"} for seed, v in values.items()]
        interval = (
            (mean - half, mean + half) if half is not None else own_interval(next(iter(runs.values())), mean, kind)
        )
        ends = {} if interval is None else dict(zip(("low", "high"), interval, strict=True))
        found.append({"variant": variant, "value": mean, "what": "mean", **ends})
    return found
