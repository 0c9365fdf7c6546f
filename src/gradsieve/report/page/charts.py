"""The charts of the page."""

from collections.abc import Sequence

from .pieces import ROW, Spec, chart, colour, dash, level, line, named, points, rows, steps, told, upright

KINDS = ("weight", "loss", "cleanlab")
"""Of scores that find wrong labels."""
STEERED, HELD_OUT = "seen by the method", "held out"
WEIGHT_TICKS = [0, 0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32]


def curves(
    names: Sequence[str],
    numbers: Sequence[int],
    y: str,
    *,
    compared: float | None = None,
    two: bool = False,
    tested: bool = False,
    zero: bool = False,
) -> Spec:
    """One line for each of `names`: one run, or the mean over its seeds with their range.

    Args:
        names: what the page calls the methods.
        numbers: which colour and dash each has.
        y: what is shown.
        compared: a level to compare with.
        two: each has two lines, of examples that steer it and of others that were held out.
        tested: test results are there too, as diamonds.
        zero: the axis begins at 0.
    """
    tooltip = [
        told("variant", "method"),
        told("step", form=",d"),
        told("value", y, ".4~g"),
        told("range", "over seeds"),
    ]
    scale = {"zero": zero}
    styles = {"color": named("variant", names, [colour(number) for number in numbers])}
    if two:
        tooltip.insert(1, told("kind", "examples"))
        styles["strokeDash"] = named("kind", [STEERED, HELD_OUT], [[4, 3], [1, 0]], legend={"symbolType": "stroke"})
    else:
        styles["strokeDash"] = named("variant", names, [dash(number) for number in numbers])
    apart = {"detail": {"field": "kind"}} if two else {}
    band = {
        "mark": {"type": "area", "opacity": 0.12, "clip": True},
        "encoding": {"y": upright("low", scale=scale), "y2": {"field": "high"}, "strokeDash": None, **apart},
    }
    up = upright("value", scale=scale)
    layers = [band, line(up), points(up, tooltip, "step", "variant", *(["kind"] if two else []))]
    if tested:
        layers = [{**layer, "transform": [{"filter": "isValid(datum.value)"}]} for layer in layers]
        mark = {"type": "point", "shape": "diamond", "filled": True, "size": 120, "opacity": 1}
        told_of = [told("variant", "method"), told("test", "test at the end", ".4~g"), told("range", "over seeds")]
        encoding = {"y": upright("test"), "strokeDash": None, "tooltip": told_of}
        layers.append({"transform": [{"filter": "isValid(datum.test)"}], "mark": mark, "encoding": encoding})
    return chart(
        [*layers, *([] if compared is None else [level("y", compared)])],
        params=[{"name": "first", "value": 0}, {"name": "last", "value": 1}],
        encoding={"x": steps(zoomed=True), **styles},
    )


def intervals(names: Sequence[str], numbers: Sequence[int], x: str) -> Spec:
    """For each method its seeds as dots, the mean, and the 95% interval of the mean."""
    tooltip = [told("variant", "method"), told("value", x, ".2f"), told("what", "is")]
    axis = {"field": "value", "type": "quantitative", "title": x, "scale": {"zero": False, "padding": 12}}

    def dots(test: str, size: int) -> Spec:
        mark = {"type": "point", "filled": True, "size": size, "stroke": "var(--paper)", "strokeWidth": 1}
        return {"transform": [{"filter": test}], "mark": mark, "encoding": {"x": axis, "tooltip": tooltip}}

    interval = {
        "transform": [{"filter": "isValid(datum.low)"}],
        "mark": {"type": "rule", "strokeWidth": 4, "opacity": 0.45},
        "encoding": {"x": {**axis, "field": "low"}, "x2": {"field": "high"}},
    }
    colours = named("variant", names, [colour(number) for number in numbers])
    layers = [interval, dots("datum.what != 'mean'", 40), dots("datum.what == 'mean'", 130)]
    return chart(layers, encoding={"y": rows(names), "color": colours}, height=ROW * len(names))


def weights_over_time(groups: Sequence[str]) -> Spec:
    """The middle half and the middle nine tenths of the weights, group by group."""
    scale = {"type": "symlog", "constant": 0.1, "zero": True}
    tooltip = [told("group"), told("step", form=",d")]
    tooltip += [told(f"q{q}", f"{q}% weigh less than", ".3~g") for q in (5, 25, 50, 75, 95)]

    def y(field: str) -> Spec:
        found = upright(field, scale=scale)
        return found | {"axis": found["axis"] | {"values": WEIGHT_TICKS, "format": ".2~f"}}

    def band(low: str, high: str, opacity: float) -> Spec:
        return {"mark": {"type": "area", "opacity": opacity}, "encoding": {"y": y(low), "y2": {"field": high}}}

    shown = points(y("q50"), tooltip, "step", "group")
    layers = [band("q5", "q95", 0.1), band("q25", "q75", 0.25), line(y("q50")), level("y", 1), shown]
    return chart(layers, encoding={"x": steps(), "color": _groups(groups)})


def histogram(groups: Sequence[str]) -> Spec:
    """How many examples have had which mean weight."""
    x = {
        "field": "low",
        "type": "quantitative",
        "title": "mean weight over training",
        "scale": {"type": "log", "base": 2, "nice": False},
        "axis": {"values": [2.0**k for k in (-7, -5, -3, -1, 0, 1, 3, 5)], "format": ".2~r"},
    }
    y = upright("top", scale={"zero": True})
    tooltip = [told("group"), told("low", "weight from", ".3~g"), told("high", "to", ".3~g")]
    tooltip.append(told("count", "examples", ",d"))
    encoding = {"x": x, "x2": {"field": "high"}, "y": y, "y2": {"field": "bottom"}, "tooltip": tooltip}
    encoding |= {"color": _groups(groups)}
    bars = {"mark": {"type": "rect", "stroke": "var(--paper)", "strokeWidth": 1}, "encoding": encoding}
    return chart([bars, level("x", 1)])


def classes(count: int) -> Spec:
    """Each class's share of the data, and of the weight in training."""
    x = {"type": "quantitative", "title": "share, %", "scale": {"zero": True}}
    kinds = ["in the data", "as trained"]
    tooltip = [told("label", "class"), told("kind", "share"), told("share", "%", ".2f")]
    least, most = ({"aggregate": which, "field": "share"} for which in ("min", "max"))
    between = {
        "mark": {"type": "rule", "strokeWidth": 2, "opacity": 0.45, "color": "var(--quiet)"},
        "encoding": {"x": {**least, **x}, "x2": most},
    }
    legend = {"symbolOpacity": 1}
    dots = {
        "mark": {"type": "point", "filled": True, "size": 90, "opacity": 1},
        "encoding": {
            "x": {"field": "share", **x},
            "color": named("kind", kinds, ["var(--c0)", "var(--c1)"], legend=legend),
            "shape": named("kind", kinds, ["square", "circle"], legend=legend),
            "tooltip": tooltip,
        },
    }
    axis = {"labelColor": "var(--ink)", "labelLimit": 110, "grid": True, "domain": False, "ticks": False}
    y = {"field": "label", "type": "nominal", "title": None, "sort": None, "axis": axis}
    return chart([between, dots], encoding={"y": y}, height=24 * count)


def precision(kinds: Sequence[str]) -> Spec:
    """Of the k most suspicious examples, how many are wrong, by each kind of score."""
    x = {"field": "k", "type": "quantitative", "title": "k, the most suspicious first", "scale": {"nice": False}}
    y = upright("precision", scale={"domain": [0, 100]})
    numbers = [1 + KINDS.index(kind) for kind in kinds]
    colours = named("kind", kinds, [colour(number) for number in numbers], legend={"symbolType": "stroke"})
    dashes = named("kind", kinds, [dash(number) for number in numbers], legend={"symbolType": "stroke"})
    tooltip = [told("kind", "score"), told("k", form=",d"), told("precision", "wrong among them, %", ".1f")]
    return chart([line(y), points(y, tooltip, "k", "kind")], encoding={"x": x, "color": colours, "strokeDash": dashes})


def times(names: Sequence[str], parts: Sequence[str]) -> Spec:
    """Seconds of each method's runs by part, one after the other in a bar."""
    legend = {"columns": {"expr": "width < 480 ? 1 : 3"}, "symbolType": "square", "labelLimit": 260}
    encoding = {
        "x": {
            "field": "seconds",
            "type": "quantitative",
            "title": "seconds, mean over seeds",
            "stack": "zero",
            "axis": {"tickCount": 6},
        },
        "color": named("part", parts, [colour(number) for number in range(len(parts))], legend=legend),
        "order": {"field": "order", "type": "quantitative"},
        "tooltip": [told("variant", "method"), told("part"), told("seconds", form=",.3~g")],
    }
    mark = {"type": "bar", "stroke": "var(--paper)", "strokeWidth": 1, "height": {"band": 0.72}}
    return chart([{"mark": mark, "encoding": encoding}], encoding={"y": rows(names)}, height=ROW * len(names))


def languages(names: Sequence[str], y: str, *, compared: float | None = None) -> Spec:
    """One line for each language."""
    legend = {"symbolType": "stroke", "columns": {"expr": "width < 480 ? 4 : 8"}}
    encoding = {
        "x": steps(),
        "color": named("language", names, [colour(number + 1) for number in range(len(names))], legend=legend),
        "strokeDash": named("language", names, [dash(number + 1) for number in range(len(names))], legend=legend),
    }
    tooltip = [told("language"), told("step", form=",d"), told("value", y, ".3~g")]
    shown = points(upright("value"), tooltip, "step", "language")
    levels = [] if compared is None else [level("y", compared)]
    return chart([line(upright("value")), shown, *levels], encoding=encoding)


def _groups(names: Sequence[str]) -> Spec:
    """Right labels are blue, wrong ones orange, wherever they are known."""
    colours = {"right labels": colour(1), "wrong labels": colour(2)}
    legend = {"symbolType": "square", "symbolOpacity": 1} if len(names) > 1 else None
    return named("group", names, [colours.get(name, colour(1)) for name in names], legend=legend)
