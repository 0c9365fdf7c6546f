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
LAST, BEST = "test", "test_best_by_dev"
"""Where a result holds what the last parameters came to, and those that dev chose."""
TRAINS_ON_DEV = "uniform+dev"
NO_CHOICE = (TRAINS_ON_DEV, "oracle")
"""Rows to measure others by."""
SHARED = ("steps", "batch_size", "data", "damage", "dev_holdout")
"""Keys of a recipe that no method of a comparison may change for itself."""


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
    chrf: float | None
    """By dev, for translations."""
    gain: float | None
    """Over uniform, paired by seed."""
    gain_interval: float | None
    p_value: float | None
    """Of the paired t-test against uniform, over seeds."""
    signs: tuple[bool, ...]
    """Of each seed, whether it gains."""
    bootstrap: tuple[float, ...] | None
    """p of the paired bootstrap over test sentences against uniform, for each seed; None where there are none."""
    effective_share: float | None
    seconds: float
    time_ratio: float | None
    """To uniform."""


def summarize(
    results: Results,
    metric: str,
    *,
    judged: str = LAST,
    bootstrap: Mapping[str, tuple[float, ...]] | None = None,
) -> list[Row]:
    """One row for each variant, in the order given; gains are those of the `judged` parameters."""
    return [_row(variant, results, metric, judged, bootstrap) for variant in results]


def half_interval(values: list[float]) -> float | None:
    """Half of the 95% interval of the mean, by Student's t."""
    if len(values) < 2:
        return None
    return float(student.ppf(0.975, len(values) - 1)) * stdev(values) / sqrt(len(values))


def decided(row: Row) -> str | None:
    """``"helps"``, ``"hurts"``, or None while the evidence is not enough for either."""
    if row.gain is None:
        return None
    if row.bootstrap:  # a difference counts if the bootstrap finds it with every seed
        certain = max(row.bootstrap) < 0.05 and len(set(row.signs)) == 1
    else:
        certain = row.gain_interval is not None and row.p_value is not None and row.p_value < 0.05
    return ("helps" if row.gain > 0 else "hurts") if certain else None


def verdict(row: Row) -> str:
    """In plain words, whether the variant is worth its price."""
    name = row.variant
    if row.gain is None:
        return f"{name}: nothing to compare it with; run uniform too."
    if row.bootstrap:
        return _bootstrap_verdict(row, row.gain, row.bootstrap)
    if row.gain_interval is None or row.p_value is None:
        return f"{name}: {row.gain:+.1f} points over uniform on one seed: no verdict without more seeds."
    amount = f"{abs(row.gain):.1f} +- {row.gain_interval:.1f} points (p = {row.p_value:.2g}, {row.seeds} seeds)"
    if found := decided(row):
        return f"{name} {found} by {amount}."
    if name.partition(":")[0] in NO_CHOICE:
        return f"{name}: no evidence of a difference ({row.gain:+.1f} +- {row.gain_interval:.1f} points)."
    return (
        f"{name}: no evidence that it helps here ({row.gain:+.1f} +- {row.gain_interval:.1f} points, "
        f"p = {row.p_value:.2g}, {row.seeds} seeds): use uniform."
    )


def _bootstrap_verdict(row: Row, gain: float, bootstrap: tuple[float, ...]) -> str:
    seeds = f"{row.seeds} seed{'s' * (row.seeds > 1)}"
    found = f"paired bootstrap p = {', '.join(f'{p:.2g}' for p in bootstrap)}, {seeds}"
    if way := decided(row):
        return f"{row.variant} {way} by {abs(gain):.1f} points ({found})."
    return f"{row.variant}: no evidence that it helps here ({gain:+.1f} points, {found}): use uniform."


def oracle_shares(rows: list[Row]) -> dict[str, float]:
    """Share of the oracle's gain, (method - uniform+dev) / (oracle - uniform+dev), where all three were run."""
    last = {row.variant: row.last for row in rows}
    if "oracle" not in last or TRAINS_ON_DEV not in last or last["oracle"] <= last[TRAINS_ON_DEV]:
        return {}
    span = last["oracle"] - last[TRAINS_ON_DEV]
    return {variant: (value - last[TRAINS_ON_DEV]) / span for variant, value in last.items()}


def table(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """Head and body as text, without columns that have nothing to say."""
    texts = [_cells(row) for row in rows]
    head = [name for name in texts[0] if name == "method" or any(text[name] != "-" for text in texts)]
    return head, [[text[name] for name in head] for text in texts]


def _cells(row: Row) -> dict[str, str]:
    return {
        "method": row.variant,
        "last": _spread(row.last, row.last_spread),
        "95%": _or_dash(row.last_interval, "± {:.1f}"),
        "best by dev": "-" if row.best is None else _spread(row.best, row.best_spread),
        "chrF by dev": _or_dash(row.chrf, "{:.1f}"),
        "gain over uniform": "-" if row.gain is None else _spread(row.gain, row.gain_interval, "{:+.1f}"),
        "p": "-" if row.bootstrap else _or_dash(row.p_value, "{:.2g}"),
        "bootstrap p": ", ".join(f"{p:.2g}" for p in row.bootstrap or ()) or "-",
        "effective share": _or_dash(row.effective_share, "{:.2f}"),
        "time": _or_dash(row.time_ratio, "{:.2f}x"),
    }


def markdown(rows: list[Row]) -> str:
    """The table for a document. Spreads are standard deviations over seeds, that of the gain its 95% interval."""
    head, body = table(rows)
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _row(
    variant: str,
    results: Results,
    metric: str,
    judged: str,
    bootstrap: Mapping[str, tuple[float, ...]] | None,
) -> Row:
    own, base = results[variant], results.get(BASE, {})
    last = [result[LAST][metric] for result in own.values()]
    best = [result[BEST][metric] for result in own.values()]
    chrf = [result[BEST]["chrf"] for result in own.values() if "chrf" in result[BEST]]
    shared = [seed for seed in own if seed in base and variant != BASE]
    gains = [own[seed][judged][metric] - base[seed][judged][metric] for seed in shared]
    seconds = mean(result["seconds"] for result in own.values())
    sizes = [result["effective_share"] for result in own.values() if "effective_share" in result]
    return Row(
        variant=variant,
        seeds=len(own),
        last=mean(last),
        last_spread=_deviation(last),
        last_interval=half_interval(last),
        best=None if variant.startswith(TRAINS_ON_DEV) else mean(best),
        best_spread=_deviation(best),
        chrf=mean(chrf) if chrf else None,
        gain=mean(gains) if gains else None,
        gain_interval=half_interval(gains),
        p_value=_p_value(gains),
        signs=tuple(gain > 0 for gain in gains),
        bootstrap=None if bootstrap is None else bootstrap.get(variant, ()),
        effective_share=mean(sizes) if sizes else None,
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
