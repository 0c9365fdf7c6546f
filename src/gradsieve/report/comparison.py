"""What a set of results says: means, spread, intervals, and a plain verdict."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from statistics import mean, stdev
from typing import Any

from scipy.stats import t as student
from scipy.stats import ttest_1samp

Results = Mapping[str, Mapping[int, Mapping[str, Any]]]
"""Variant -> seed -> what its result.json holds."""

BASE = "uniform"
TRAINS_ON_DEV = "uniform+dev"
NO_CHOICE = (TRAINS_ON_DEV, "oracle")
"""Rows to measure others by."""


@dataclass(frozen=True)
class Row:
    """One variant over its seeds. A figure that cannot be had, such as a spread of one seed, is None."""

    variant: str
    seeds: int
    last: float
    last_spread: float | None
    last_interval: float | None
    """Half of the 95% interval of the mean."""
    best: float | None
    """By dev; None for a method that trains on dev."""
    best_spread: float | None
    gain: float | None
    """Over uniform, paired by seed."""
    gain_interval: float | None
    p_value: float | None
    """Of the paired t-test against uniform."""
    effective_share: float
    seconds: float
    time_ratio: float | None
    """To uniform."""


def summarize(results: Results, metric: str) -> list[Row]:
    """One row for each variant, in the order given."""
    return [_row(variant, results, metric) for variant in results]


def half_interval(values: list[float]) -> float | None:
    """Half of the 95% interval of the mean, by Student's t."""
    if len(values) < 2:
        return None
    return float(student.ppf(0.975, len(values) - 1)) * stdev(values) / sqrt(len(values))


def verdict(row: Row) -> str:
    """In plain words, whether the variant is worth its price."""
    name = row.variant
    if row.gain is None:
        return f"{name}: nothing to compare it with; run uniform too."
    if row.gain_interval is None or row.p_value is None:
        return f"{name}: {row.gain:+.1f} points over uniform on one seed: no verdict without more seeds."
    amount = f"{abs(row.gain):.1f} +- {row.gain_interval:.1f} points (p = {row.p_value:.2g}, {row.seeds} seeds)"
    if row.p_value < 0.05:
        return f"{name} {'helps' if row.gain > 0 else 'hurts'} by {amount}."
    if name.partition(":")[0] in NO_CHOICE:
        return f"{name}: no evidence of a difference ({row.gain:+.1f} +- {row.gain_interval:.1f} points)."
    return (
        f"{name}: no evidence that it helps here ({row.gain:+.1f} +- {row.gain_interval:.1f} points, "
        f"p = {row.p_value:.2g}, {row.seeds} seeds): use uniform."
    )


def oracle_shares(rows: list[Row]) -> dict[str, float]:
    """Share of the oracle's gain, (method - uniform+dev) / (oracle - uniform+dev), where all three were run."""
    last = {row.variant: row.last for row in rows}
    if "oracle" not in last or TRAINS_ON_DEV not in last or last["oracle"] <= last[TRAINS_ON_DEV]:
        return {}
    span = last["oracle"] - last[TRAINS_ON_DEV]
    return {variant: (value - last[TRAINS_ON_DEV]) / span for variant, value in last.items()}


HEAD = ("method", "last", "95%", "best by dev", "gain over uniform", "p", "effective share", "time")


def cells(row: Row) -> tuple[str, ...]:
    """The row as text, under HEAD."""
    return (
        row.variant,
        _spread(row.last, row.last_spread),
        _or_dash(row.last_interval, "± {:.1f}"),
        "-" if row.best is None else _spread(row.best, row.best_spread),
        "-" if row.gain is None else _spread(row.gain, row.gain_interval, "{:+.1f}"),
        _or_dash(row.p_value, "{:.2g}"),
        f"{row.effective_share:.2f}",
        _or_dash(row.time_ratio, "{:.1f}x"),
    )


def markdown(rows: list[Row]) -> str:
    """The table for a document. Spreads are standard deviations over seeds, that of the gain its 95% interval."""
    lines = [HEAD, ("---", *["---:"] * (len(HEAD) - 1)), *(cells(row) for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _row(variant: str, results: Results, metric: str) -> Row:
    own, base = results[variant], results.get(BASE, {})
    last = [result["test"][metric] for result in own.values()]
    best = [result["test_best_by_dev"][metric] for result in own.values()]
    shared = [seed for seed in own if seed in base and variant != BASE]
    gains = [own[seed]["test"][metric] - base[seed]["test"][metric] for seed in shared]
    seconds = mean(result["seconds"] for result in own.values())
    return Row(
        variant=variant,
        seeds=len(own),
        last=mean(last),
        last_spread=_deviation(last),
        last_interval=half_interval(last),
        best=None if variant.startswith(TRAINS_ON_DEV) else mean(best),
        best_spread=_deviation(best),
        gain=mean(gains) if gains else None,
        gain_interval=half_interval(gains),
        p_value=_p_value(gains),
        effective_share=mean(result["effective_share"] for result in own.values()),
        seconds=seconds,
        time_ratio=seconds / mean(result["seconds"] for result in base.values()) if base else None,
    )


def _p_value(gains: list[float]) -> float | None:
    """Of the paired t-test. Gains that do not vary at all leave nothing to doubt."""
    if len(gains) < 2:
        return None
    if stdev(gains) < 1e-9:
        return float(abs(gains[0]) < 1e-9)
    return float(ttest_1samp(gains, 0.0).pvalue)


def _deviation(values: list[float]) -> float | None:
    return stdev(values) if len(values) > 1 else None


def _spread(value: float, spread: float | None, form: str = "{:.1f}") -> str:
    return form.format(value) + ("" if spread is None else f" ± {spread:.1f}")


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
