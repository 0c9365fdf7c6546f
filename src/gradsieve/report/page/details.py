"""What the page shows of one run at a time, and how well its scores find wrong labels, as plain data."""

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

import numpy as np

from . import charts
from .detection import Suspicions, found, precision_curve
from .languages import agreement, usage
from .naming import Entry
from .pieces import Figure
from .read import Run
from .spread import class_shares, histogram, mean_weights, quantiles

MOST_CLASSES = 30
"""In the chart; of more, those whose share changed most."""


def details(run: Run, scores: Suspicions | None) -> dict[str, Any]:
    """What is shown of one run at a time, by chart; nothing for what the run has no records of."""
    steps, weights = run.weights
    examples: dict[str, Any] = {}
    if len(steps):
        damaged, given = run.examples.get("damaged"), mean_weights(weights)
        examples["weights"] = quantiles(steps, weights, damaged)
        examples["histogram"] = histogram(given, damaged)
        labels = run.examples.get("labels")
        if labels is not None and len(labels) == len(given):
            examples["classes"] = class_rows(labels, given, [str(name) for name in run.about.get("classes", [])])
    if scores is not None:
        by_kind, wrong = scores
        examples["precision"] = [{"kind": k, **precision_curve(s, wrong)} for k, s in by_kind.items()]
    examples |= {"usage": usage(run), "agreement": agreement(run)}
    return {name: data for name, data in examples.items() if data}


def class_rows(labels: np.ndarray, given: np.ndarray, classes: Sequence[str]) -> list[dict[str, Any]]:
    """Two rows for each class, or for those classes of many whose share has changed most."""
    count = max(len(classes), int(labels.max()) + 1)
    shares = class_shares(labels, given, count)
    names = [*classes, *map(str, range(len(classes), count))]
    order = sorted(range(count), key=lambda label: shares[label][0] - shares[label][1])
    if count > MOST_CLASSES:
        order = order[: MOST_CLASSES // 2] + order[-MOST_CLASSES // 2 :]
    return [
        {"label": names[label], "kind": kind, "share": round(shares[label][which], 3)}
        for label in order
        for which, kind in enumerate(("in the data", "as trained"))
    ]


def detail_figures(known: Mapping[str, Mapping[str, Any]]) -> dict[str, Figure]:
    """Charts of one run at a time, for what any of them has; `known` is what `details` gives, by run."""

    def values(name: str, *keys: str) -> list[str]:
        """Of a field, in all rows of those charts."""
        return list(dict.fromkeys(row[name] for own in known.values() for key in keys for row in own.get(key, [])))

    groups, languages = values("group", "weights"), sorted(values("language", "usage", "agreement"))
    kinds = [kind for kind in charts.KINDS if kind in values("kind", "precision")]
    labels = max((len(own.get("classes", [])) // 2 for own in known.values()), default=0)
    asked = {
        "weights": (
            "Weights over time",
            "Median, middle half and middle 90% of the examples' latest weights; 1 is plain training.",
            charts.weights_over_time(groups),
        ),
        "histogram": ("Weights in all", "How many examples have had which mean weight.", charts.histogram(groups)),
        "classes": ("Classes", "Share of the examples, and share of the weight they got.", charts.classes(labels)),
        "precision": (
            "Finding wrong labels",
            "Share of wrong labels among the k most suspicious examples, in per cent.",
            charts.precision(kinds),
        ),
        "usage": ("Usage", "Share of the sentences drawn, in per cent.", charts.languages(languages, "share, %")),
        "agreement": (
            "Agreement of gradients",
            "Cosine with the low-resource language's gradient: the reward.",
            charts.languages(languages, "cosine", compared=0.0),
        ),
    }
    return {
        key: Figure(title, note, "detail", spec, key)
        for key, (title, note, spec) in asked.items()
        if any(key in own for own in known.values())
    }


def detection_rows(methods: Sequence[Entry], scores: Mapping[str, Suspicions | None]) -> list[dict[str, str]]:
    """A row for each method and a cell for each kind of score: how well it finds the wrong labels, mean over seeds."""
    table = []
    for entry in methods:
        known = [own for seed in entry.runs if (own := scores[entry.key(seed)]) is not None]
        row: dict[str, str] = {}
        for kind in charts.KINDS:
            worth = [found(by_kind[kind], wrong) for by_kind, wrong in known if kind in by_kind]
            if worth:
                area, precision = (mean(getattr(one, name) for one in worth) for name in ("auroc", "precision"))
                row |= {f"{kind} AUROC": f"{area:.3f}", f"{kind} precision": f"{precision:.0%}"}
        if row:
            table.append({"method": entry.name, **row})
    return table
