"""What the runs came to, in words and figures: the first thing that the page says."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..comparison import (
    BASE,
    LAST,
    NO_CHOICE,
    Row,
    decided,
    half_interval,
    oracle_shares,
    summarize,
    table,
    verdict,
)
from .intervals import Kind, own_interval, result_points
from .naming import Experiment
from .read import Run

UNITS = {"accuracy": "%", "bleu": " BLEU"}


@dataclass(frozen=True)
class Tile:
    """A figure in large type."""

    name: str
    value: str
    note: str
    tone: str = ""


@dataclass(frozen=True)
class Judgement:
    """Of one experiment."""

    title: str
    headline: str
    tone: str
    """``helps``, ``hurts`` or nothing."""
    lines: Sequence[tuple[str, str]]
    """Tone and verdict of every method."""
    tiles: Sequence[Tile]
    head: Sequence[str]
    body: Sequence[Sequence[str]]
    caption: str
    going: Sequence[str]
    """Which runs have not ended, and where they are."""
    points: Sequence[Mapping[str, Any]]
    """Result of each run, and mean and interval of each method, for the chart."""


def judge(experiment: Experiment, kind: Kind) -> Judgement:
    ended = {
        variant: {seed: run for seed, run in runs.items() if run.result is not None}
        for variant, runs in experiment.variants.items()
    }
    ended = {variant: runs for variant, runs in ended.items() if runs}
    results = {v: {seed: run.result or {} for seed, run in runs.items()} for v, runs in ended.items()}
    rows = summarize(results, kind.metric, judged=kind.judged, bootstrap=_bootstrap(ended, kind)) if results else []
    head, body = table(rows) if rows else ([], [])
    if shares := oracle_shares(rows):
        head.append("share of oracle's gain")
        for row, cells in zip(rows, body, strict=True):
            cells.append("-" if row.variant in (BASE, *NO_CHOICE) else f"{shares[row.variant]:.0%}")
    lines = [(decided(row) or "", _spelt(verdict(row))) for row in rows if row.variant != BASE and row.gain is not None]
    star = _star(rows)
    headline, tone = _headline(star, experiment, kind)
    return Judgement(
        title=experiment.title,
        headline=headline,
        tone=tone,
        lines=lines,
        tiles=_tiles(star, rows, ended, kind),
        head=head,
        body=body,
        caption=f"Test {metric_name(kind.metric)}, ± standard deviation over seeds; 95%: of the mean; {kind.caption}.",
        going=[
            f"{variant}, seed {seed}: step {run.step:,} of {run.steps:,}"
            for variant, runs in experiment.variants.items()
            for seed, run in runs.items()
            if run.result is None
        ],
        points=result_points(ended, kind),
    )


def metric_name(metric: str) -> str:
    """As people write it."""
    return {"bleu": "BLEU"}.get(metric, metric)


def _spelt(text: str) -> str:
    """With the signs that a page has and a terminal may lack."""
    return re.sub(r"(?<=[ (])-(?=\d)", "\N{MINUS SIGN}", text.replace(" +- ", " ± "))


def _bootstrap(ended: Mapping[str, Mapping[int, Run]], kind: Kind) -> dict[str, tuple[float, ...]] | None:
    """Of each method with those seeds that have ended for it and for uniform."""
    if kind.bootstrap is None or BASE not in ended:
        return None
    found = {}
    for variant, runs in ended.items():
        seeds = [seed for seed in runs if seed in ended[BASE] and variant != BASE]
        folders = {BASE: [ended[BASE][seed].path for seed in seeds], variant: [runs[seed].path for seed in seeds]}
        found[variant] = kind.bootstrap(folders, BASE)[variant] if seeds else ()
    return found


def _star(rows: Sequence[Row]) -> Row | None:
    """The method that the page is about: the first with DDS in its name, else the first that is no yardstick."""
    chosen = [row for row in rows if "dds" in row.variant.partition(":")[0]]
    others = [row for row in rows if row.variant.partition(":")[0] not in (BASE, *NO_CHOICE)]
    return next(iter([*chosen, *others, *rows]), None)


def _headline(star: Row | None, experiment: Experiment, kind: Kind) -> tuple[str, str]:
    if star is None:
        runs = [run for runs in experiment.variants.values() for run in runs.values()]
        if len(runs) == 1:
            return f"{next(iter(experiment.variants))} is at step {runs[0].step:,} of {runs[0].steps:,}", ""
        return f"None of {len(runs)} runs has ended yet", ""
    if star.gain is None:
        value = star.last if kind.judged == LAST or star.best is None else star.best
        return f"{star.variant} reaches {value:.1f}{UNITS.get(kind.metric, '')} on test", ""
    if found := decided(star):
        half = "" if star.bootstrap or star.gain_interval is None else f" ± {star.gain_interval:.1f}"
        return f"{star.variant} {found} by {abs(star.gain):.1f}{half} points", found
    if not star.bootstrap and star.gain_interval is None:
        return _spelt(f"{star.variant}: {star.gain:+.1f} points on one seed, too little for a verdict"), ""
    return f"No evidence that {star.variant} helps here", ""


def _tiles(star: Row | None, rows: Sequence[Row], ended: Mapping[str, Mapping[int, Run]], kind: Kind) -> list[Tile]:
    if star is None:
        return []
    shown = [row for row in rows if row.variant == BASE and row is not star] + [star]
    unit = UNITS.get(kind.metric, "").strip()
    tiles = []
    for row in shown:
        values = [(run.result or {})[kind.judged][kind.metric] for run in ended[row.variant].values()]
        mean, note = sum(values) / len(values), f"test {metric_name(kind.metric)}, "
        half = half_interval(values)
        if half is not None:
            note += f"± {half:.1f} (95%, {len(values)} seeds)"
        else:
            note += _alone(next(iter(ended[row.variant].values())), mean, kind)
        tiles.append(Tile(row.variant, f"{mean:.1f}{unit if unit == '%' else ''}", note, "star" * (row is star)))
    if star.time_ratio is not None and star.variant != BASE:
        tiles.append(Tile("time", f"{star.time_ratio:.1f}x", f"of uniform's, {star.seconds:,.0f} s of training a run"))
    if star.effective_share is not None and star.effective_share < 1:
        note = "of each batch counts: effective sample size over batch size"
        tiles.append(Tile("effective share", f"{star.effective_share:.0%}", note))
    return tiles


def _alone(run: Run, value: float, kind: Kind) -> str:
    """The interval of a single run, in words."""
    interval, count = own_interval(run, value, kind), run.about.get("sizes", {}).get("test")
    if interval is None:
        return "one seed"
    over = f"{count:,} test examples" if count else "test sentences"
    return f"{interval[0]:.1f} to {interval[1]:.1f} (95% over {over}, one seed)"
