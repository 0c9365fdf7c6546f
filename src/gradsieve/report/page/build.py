"""From run directories to one HTML file that needs nothing else: no network, no other file."""

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import vl_convert
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from ... import __version__
from ...errors import GradsieveError
from ...runs.checkpoint import OTHER_OUT, written_whole
from ..comparison import BASE
from . import charts
from .details import detail_figures, details, detection_rows
from .detection import suspicions
from .facts import facts
from .gallery import Picture, gallery
from .intervals import Kind
from .languages import samples
from .naming import Entry, Experiment, entries, experiments
from .over_steps import curve_figures, holdout_figure, overhead_figures, time_figure
from .pieces import Figure, colour, dash
from .read import Run, find_runs
from .verdicts import Judgement, judge, metric_name

VEGA_LITE = "6.1"
"""6.4 writes "undefined" where a tooltip should name the nearest line (vega-lite, pull request 9707)."""
SNIPPET = "window.vegaEmbed = vegaEmbed;"
"""What the page's script takes from the library."""
FEW = 5
"""If there are more methods, only uniform and those with DDS in their name are drawn until others are chosen."""
PICTURES = 1_500_000
"""Characters of thumbnails in the page, about."""


def write_report(folders: Sequence[Path], out: Path | None, tasks: Mapping[str, Kind]) -> Path:
    """Makes the page about the runs in `folders`, by default as report.html in the first of them; returns its path."""
    page = render(find_runs(folders), tasks)
    place = folders[0] / "report.html" if out is None else out
    with written_whole(place, OTHER_OUT) as part:
        part.write_text(page, encoding="utf-8", errors="backslashreplace")
    return place


def render(runs: Sequence[Run], tasks: Mapping[str, Kind]) -> str:
    """The page as text."""
    kinds = {str(run.recipe["task"]) for run in runs}
    if len(kinds) > 1 or not kinds <= set(tasks):
        raise GradsieveError(f"these runs are for {' and '.join(sorted(kinds))}. Make a report of each task by itself.")
    task = kinds.pop()
    found = experiments(runs)
    methods = entries(found)
    scores = {entry.key(seed): suspicions(run) for entry in methods for seed, run in entry.runs.items()}
    known = {e.key(seed): details(run, scores[e.key(seed)]) for e in methods for seed, run in e.runs.items()}
    judgements = [judge(experiment, tasks[task]) for experiment in found]
    lines, overhead = curve_figures(methods, task), overhead_figures(methods)
    figures = lines | overhead | detail_figures(known) | _result_figures(judgements, methods, tasks[task])
    others = {"holdout": holdout_figure(methods, task), "time": time_figure(methods)}
    figures |= {key: figure for key, figure in others.items() if figure is not None}
    script = _own("page.js")
    return _template().render(
        version=__version__,
        judgements=judgements,
        described=[_described(experiment) for experiment in found],
        figures=figures,
        lines=list(lines),
        overhead=list(overhead),
        methods=[_method(entry, len(methods) <= FEW) for entry in methods],
        seeds=sorted({seed for entry in methods for seed in entry.runs}),
        chosen=_chosen(methods, known),
        steps=max(run.steps for run in runs),
        detection=detection_rows(methods, scores),
        galleries=_galleries(methods),
        samples=samples({entry.name: next(iter(entry.runs.values())) for entry in methods}),
        recipes=[(e.name, _indented(next(iter(e.runs.values())).settings)) for e in methods],
        style=Markup(_own("page.css")),
        library=Markup(_library()),
        script=Markup(script),
        hashes=[_hash(_library()), _hash(script)],
        data=_data(methods, figures, known, runs),
        task=task,
    )


def _data(
    methods: Sequence[Entry], figures: Mapping[str, Figure], known: Mapping[str, Any], runs: Sequence[Run]
) -> dict[str, Any]:
    """What the script draws from."""
    return {
        "methods": [{"name": entry.name} for entry in methods],
        "steps": max(run.steps for run in runs),
        "charts": {key: {"kind": f.kind, "spec": f.spec, "data": f.data} for key, f in figures.items()},
        "details": known,
    }


def _result_figures(judgements: Sequence[Judgement], methods: Sequence[Entry], kind: Kind) -> dict[str, Figure]:
    """A chart of results for each experiment that has more than one to show."""
    figures = {}
    for number, judgement in enumerate(judgements):
        known = {point["variant"] for point in judgement.points}
        own = [entry for entry in methods if entry.experiment == number and entry.variant in known]
        if len(own) > 1:
            metric = f"test {metric_name(kind.metric)}"
            spec = charts.intervals([e.variant for e in own], [e.number for e in own], metric)
            several = any(point["what"] != "mean" for point in judgement.points)
            over = (
                "Mean and its 95% interval; small dots are seeds." if several else "With its 95% interval, over test."
            )
            note = f"T{metric[1:]}. {over}"
            figures[f"result{number}"] = Figure("Results", note, "rows", spec, judgement.points)
    return figures


def _described(experiment: Experiment) -> dict[str, Any]:
    run = next(iter(next(iter(experiment.variants.values())).values()))
    return {"description": str(run.recipe.get("description", "")), "facts": facts(run)}


def _method(entry: Entry, few: bool) -> dict[str, Any]:
    return {
        "name": entry.name,
        "checked": few or entry.variant == BASE or "dds" in entry.variant.partition(":")[0],
        "colour": colour(entry.number),
        "dash": " ".join(map(str, dash(entry.number))),
        "runs": [(entry.key(seed), seed) for seed in entry.runs],
    }


def _chosen(methods: Sequence[Entry], known: Mapping[str, Mapping[str, Any]]) -> str:
    """The run to look at first: of the method that the page is about, else the one with most to show."""
    keys = [entry.key(seed) for entry in sorted(methods, key=lambda e: e.number != 1) for seed in entry.runs]
    return max(keys, key=lambda key: len(known[key]))


def _galleries(methods: Sequence[Entry]) -> dict[str, dict[str, list[Picture]]]:
    """By run; the first seed of every method, then the second, while there is room."""
    found, left = {}, PICTURES
    most = max(len(entry.runs) for entry in methods)
    for place in range(most):
        for entry in methods:
            for seed in [*entry.runs][place : place + 1]:
                own = gallery(entry.runs[seed]) if left > 0 else {}
                left -= sum(len(picture.source) for pictures in own.values() for picture in pictures)
                if own:
                    found[entry.key(seed)] = own
    return found


def _breakable(text: str) -> Markup:
    """A method's name, which may be long, with places where a line may end."""
    return Markup(re.sub(r"([:=])", r"\1<wbr>", str(escape(text)))) if len(text) > 20 else escape(text)


def _indented(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)


def _hash(script: str) -> str:
    """By which the page's security policy knows its own scripts; no other ever runs."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


@cache
def _library() -> str:
    """Vega, Vega-Lite and Vega-Embed, as the package vl-convert-python brings them."""
    version = VEGA_LITE if VEGA_LITE in vl_convert.get_vegalite_versions() else None
    return str(vl_convert.javascript_bundle(SNIPPET, version)).replace("</script", "<\\/script")


@cache
def _template() -> Any:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["breakable"] = _breakable
    return environment.from_string(_own("page.html.j2"))


@cache
def _own(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")
