"""What the charts are made of: Vega-Lite specifications without data, which the page's script puts in.

Colours are the page's CSS variables, so that light, dark and paper need one drawing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Spec = dict[str, Any]

HEIGHT, ROW = 220, 34
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', 'Helvetica Neue', Arial, sans-serif"
"""By name, not "inherit": the library must measure it."""
COLOURS = 9
DASHES: tuple[list[int], ...] = ([4, 3], [1, 0], [2, 2], [8, 3, 2, 3], [7, 3], [12, 4], [1, 3])
SEEN: list[Spec] = [{"test": "datum.alone", "value": 1}, {"param": "hover", "empty": False, "value": 1}]
"""When a point is: if it is all that a line has, and under the pointer."""

CONFIG: Spec = {
    "background": None,
    "font": FONT,
    "view": {"stroke": None},
    "axis": {
        "labelColor": "var(--quiet)",
        "titleColor": "var(--quiet)",
        "labelFontSize": 12,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
        "domainColor": "var(--line)",
        "tickColor": "var(--line)",
        "gridColor": "var(--grid)",
        "labelOverlap": True,
        "aria": False,
    },
    "axisX": {"grid": False, "titlePadding": 8},
    "legend": {
        "labelColor": "var(--ink)",
        "labelFontSize": 12,
        "symbolStrokeWidth": 2,
        "orient": "bottom",
        "title": None,
        "aria": False,
    },
    "mark": {"aria": False},
}


@dataclass(frozen=True)
class Figure:
    """A chart. The script fills it from `data`, by its kind: ``curve``, ``rows``, ``detail`` for one run at a time."""

    title: str
    note: str
    kind: str
    spec: Spec
    data: Any


def colour(number: int) -> str:
    """There are nine; then they come again, with other dashes."""
    return f"var(--c{number % COLOURS})"


def dash(number: int) -> list[int]:
    return DASHES[number % len(DASHES)]


def chart(layers: list[Spec], *, encoding: Spec | None = None, params: list[Spec] | None = None, **more: Any) -> Spec:
    """As wide as the page lets it be."""
    return {
        "width": "container",
        "height": HEIGHT,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "data": {"name": "rows"},
        "params": params or [],
        "encoding": encoding or {},
        "layer": layers,
        "config": CONFIG,
    } | more


def upright(field: str, **more: Any) -> Spec:
    """The y axis. What it shows stands above the chart."""
    axis = {"domain": False, "ticks": False, "tickCount": 5}
    return {"field": field, "type": "quantitative", "title": None, "scale": {"zero": False}, "axis": axis} | more


def steps(*, zoomed: bool = False) -> Spec:
    """The x axis of all that goes by training steps."""
    scale: Spec = {"nice": False, "zero": False}
    if zoomed:
        scale |= {"domainMin": {"expr": "first"}, "domainMax": {"expr": "last"}}
    axis = {"tickCount": 6, "labelExpr": "datum.value < 10000 ? format(datum.value, ',') : format(datum.value, '~s')"}
    return {"field": "step", "type": "quantitative", "title": "training step", "scale": scale, "axis": axis}


def rows(names: Sequence[str]) -> Spec:
    """A y axis with a row for each name."""
    axis = {"labelColor": "var(--ink)", "labelFontSize": 13, "domain": False, "ticks": False}
    axis["labelLimit"] = {"expr": "containerSize()[0] < 480 ? 120 : 220"}
    return {"field": "variant", "type": "nominal", "title": None, "sort": list(names), "axis": axis}


def named(field: str, names: Sequence[str], values: Sequence[Any], **more: Any) -> Spec:
    """A colour, dash or shape for each name; without a legend, unless one is asked for."""
    scale = {"domain": list(names), "range": list(values)}
    return {"field": field, "type": "nominal", "scale": scale, "legend": None} | more


def line(y: Spec, **more: Any) -> Spec:
    return {"mark": {"type": "line", "strokeWidth": 2.25, "clip": True}, "encoding": {"y": y} | more}


def points(y: Spec, tooltip: list[Spec], *fields: str) -> Spec:
    """Where the pointer is near one, it is seen and tells its figures."""
    select = {"type": "point", "on": "pointermove", "nearest": True, "fields": list(fields), "clear": "pointerout"}
    encoding = {"y": y, "opacity": {"condition": SEEN, "value": 0}, "strokeDash": {"value": [1, 0]}, "tooltip": tooltip}
    mark = {"type": "point", "filled": True, "size": 70, "clip": True}
    return {"mark": mark, "params": [{"name": "hover", "select": select}], "encoding": encoding}


def level(channel: str, value: float) -> Spec:
    """A thin line to compare with."""
    mark = {"type": "rule", "strokeDash": [3, 3], "opacity": 0.8, "color": "var(--quiet)", "clip": True}
    nothing = dict.fromkeys(("x", "y", "color", "strokeDash"))
    return {"data": {"values": [{}]}, "mark": mark, "encoding": nothing | {channel: {"datum": value}}}


def told(field: str, title: str | None = None, form: str | None = None) -> Spec:
    """A line of a tooltip."""
    found = {"field": field, "title": title or field}
    return found | ({"format": form} if form else {})
