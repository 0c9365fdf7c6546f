"""What the page shows of all runs at once: figures by training step, and where the time went, as plain data."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from ..comparison import LAST
from . import charts
from .curves import Points, curve, effective_share, noted, points_each, rounded
from .durations import IN_STEP, PARTS, mean_parts, step_times
from .naming import Entry
from .pieces import Figure
from .read import Run
from .verdicts import metric_name

Asked = dict[str, tuple[str, str, Callable[[Run], Points], float | None]]
"""Key of a figure -> title, note, how to read it from a run, a level to compare with."""
METRICS = {"images": ("accuracy", "loss"), "translation": ("bleu", "perplexity")}
"""Noted of dev."""
OVERHEAD = ("loss", "update", "method")
"""Parts of a step that a method may make longer."""


def curve_figures(methods: Sequence[Entry], task: str) -> dict[str, Figure]:
    """How training went."""
    metric, other = METRICS[task]
    asked: Asked = {
        "dev": (f"Dev {metric_name(metric)}", "Higher is better.", _noted("dev", metric), None),
        "dev_loss": (f"Dev {other}", "Lower is better.", _noted("dev", other), None),
        "loss": ("Training loss", "Of the batch at that step, as the method weighs it.", _noted("loss"), None),
        "effective": ("Effective share", "Effective sample size in per cent of the batch.", effective_share, 100.0),
        "reward_mean": ("Reward, mean", "Agreement with the dev gradient.", _noted("reward_mean"), 0.0),
        "reward_std": ("Reward, spread", "Standard deviation in the batch.", _noted("reward_std"), None),
    }
    return _figures(methods, asked, tested=metric)


def overhead_figures(methods: Sequence[Entry]) -> dict[str, Figure]:
    """What a step took, whole and by part. What lies above uniform's line is overhead."""
    note = "Milliseconds a step, mean since the evaluation before."
    asked: Asked = {"step": ("A whole step", note, step_times, None)}
    for part in OVERHEAD:
        asked[f"step_{part}"] = (IN_STEP[part].capitalize(), note, partial(step_times, names=[part]), None)
    return _figures(methods, asked, zero=True)


def _figures(
    methods: Sequence[Entry], asked: Asked, *, tested: str | None = None, zero: bool = False
) -> dict[str, Figure]:
    """Those that anybody has noted; test results by the metric `tested` go with the one called ``dev``."""
    variants = [entry.runs for entry in methods]
    points = points_each(sum(map(len, variants)) * len(asked))
    figures = {}
    for key, (title, note, read, compared) in asked.items():
        if (data := curve(variants, read, points)) is not None:
            results = _results(variants, tested) if tested and key == "dev" else []
            spec = charts.curves(*_styles(methods), title, compared=compared, tested=bool(results), zero=zero)
            note += " Diamonds: test, measured once at the end." * bool(results)
            figures[key] = Figure(title, note, "curve", spec, [data | {"test": results} if results else data])
    return figures


def holdout_figure(methods: Sequence[Entry], task: str) -> Figure | None:
    """Loss or perplexity on the examples that steer a method, and on some that do not; None if nobody has noted both.

    Algorithm 1 is steered by dev, from which a part may be held back. Algorithm 2 is steered by training sentences of
    the low-resource language, and all of dev is held out.
    """
    other = METRICS[task][1]
    steers, held_out = ("steering", "dev") if task == "translation" else ("dev", "dev_holdout")
    variants = [entry.runs for entry in methods]
    points = points_each(2 * sum(map(len, variants)))
    seen, held = (curve(variants, _noted(which, other), points) for which in (steers, held_out))
    if seen is None or held is None:
        return None
    spec = charts.curves(*_styles(methods), other, two=True)
    both = [seen | {"kind": charts.STEERED}, held | {"kind": charts.HELD_OUT}]
    title = "Perplexity of sentences" if task == "translation" else "Loss on dev examples"
    return Figure(title, "Dashed: those that steer the method.", "curve", spec, both)


def time_figure(methods: Sequence[Entry]) -> Figure | None:
    parts = {entry.name: mean_parts(entry.runs.values()) for entry in methods}
    used = [part for part in PARTS if any(part in own for own in parts.values())]
    rows = [
        {"variant": name, "part": part, "seconds": rounded([own[part]])[0], "order": used.index(part)}
        for name, own in parts.items()
        for part in used
        if part in own
    ]
    if not rows:
        return None
    spec = charts.times([entry.name for entry in methods], used)
    return Figure("Where the time went", "Training and what is done around it.", "rows", spec, rows)


def _results(variants: Sequence[Mapping[int, Run]], metric: str) -> list[dict[int, float]]:
    """Of each variant, seed by seed, the last parameters' test result; empty if no run has ended."""
    known = [{seed: run.result[LAST][metric] for seed, run in runs.items() if run.result} for runs in variants]
    return known if any(known) else []


def _styles(methods: Sequence[Entry]) -> tuple[list[str], list[int]]:
    """What the page calls the methods, and the number of each one's colour and dash."""
    return [entry.name for entry in methods], [entry.number for entry in methods]


def _noted(*keys: str) -> Callable[[Run], Points]:
    return lambda run: noted(run, *keys)
