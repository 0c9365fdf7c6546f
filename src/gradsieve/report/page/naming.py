"""Which runs belong to the same experiment, and what to call them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..comparison import BASE, SHARED
from .read import Run

UNNAMED = ("name", "description", "needs", "log_every", "evaluate_every", "checkpoint_every", "scores", "data.workers")
"""Keys of a recipe that tell no methods apart."""
FIRST, LAST = (BASE, "uniform+dev"), ("oracle",)


@dataclass(frozen=True)
class Experiment:
    """Runs on the same data with the same budget."""

    title: str
    variants: Mapping[str, Mapping[int, Run]]
    """Method and what is special about it -> seed -> run."""


@dataclass(frozen=True)
class Entry:
    """A method, as the page knows it."""

    experiment: int
    variant: str
    name: str
    """The variant, and where there are several experiments, which one's."""
    number: int
    """Of its colour and dash."""
    runs: Mapping[int, Run]

    def key(self, seed: int) -> str:
        """Of one of its runs."""
        return f"{self.number}-{seed}"


def experiments(runs: Sequence[Run]) -> list[Experiment]:
    """The runs by experiment, in order of appearance; uniform first, the oracle last."""
    groups: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(_shared(run), []).append(run)
    titles = _titles(list(groups.values()))
    return [Experiment(title, _variants(group)) for title, group in zip(titles, groups.values(), strict=True)]


def entries(found: Sequence[Experiment]) -> list[Entry]:
    """Every method of every experiment. Uniform is grey, the first with DDS in its name has the first colour."""
    every = [(place, variant) for place, experiment in enumerate(found) for variant in experiment.variants]
    first = [own for own in every if own[1] == BASE][:1]
    second = [own for own in every if "dds" in own[1].partition(":")[0]][:1]
    nobody = (-1, "")
    order = [*(first or [nobody]), *(second or [nobody]), *(own for own in every if own not in (*first, *second))]
    return [
        Entry(
            place,
            variant,
            variant if len(found) == 1 else f"{variant} ({found[place].title})",
            order.index((place, variant)),
            found[place].variants[variant],
        )
        for place, variant in every
    ]


def flat(content: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """A nested recipe as one level of dotted keys."""
    found: dict[str, Any] = {}
    for key, value in content.items():
        found |= flat(value, f"{path}{key}.") if isinstance(value, Mapping) else {f"{path}{key}": value}
    return found


def _telling(run: Run) -> dict[str, Any]:
    return {key: value for key, value in flat(run.recipe).items() if key not in UNNAMED}


def _shared(run: Run) -> tuple[Any, ...]:
    own = {key: value for key, value in _telling(run).items() if key.split(".")[0] in (*SHARED, "task")}
    return (run.settings.get("data"), *(f"{key}={value}" for key, value in own.items()))


def _titles(groups: Sequence[Sequence[Run]]) -> list[str]:
    """The recipe's name, and where that is the same, what differs."""
    names = [str(group[0].recipe["name"]) for group in groups]
    recipes = [_telling(group[0]) for group in groups]
    titles = []
    for name, recipe in zip(names, recipes, strict=True):
        namesakes = [other for other, its in zip(recipes, names, strict=True) if its == name]
        own = [k for k in recipe if k.split(".")[0] in SHARED and any(recipe[k] != o.get(k) for o in namesakes)]
        titles.append(", ".join([name, *(f"{key}={recipe[key]}" for key in own)]))
    seen = Counter(titles)
    return [f"{title} ({number})" if seen[title] > 1 else title for number, title in enumerate(titles, 1)]


def _variants(runs: Sequence[Run]) -> dict[str, dict[int, Run]]:
    recipes = {run.path: _telling(run) for run in runs}
    plain = [run for run in runs if run.method == BASE] or runs
    common = Counter(tuple(map(str, recipes[run.path].items())) for run in plain).most_common(1)[0][0]
    base = next(recipes[run.path] for run in plain if tuple(map(str, recipes[run.path].items())) == common)
    found: dict[str, dict[int, Run]] = {}
    named = {run.path: _name(run, recipes[run.path], base) for run in runs}
    twins = Counter((named[run.path], run.seed) for run in runs)
    for run in sorted(runs, key=lambda run: (_place(run.method), named[run.path], run.seed)):
        name = named[run.path]
        if twins[name, run.seed] > 1:
            name = f"{name} [{run.path}]"
        found.setdefault(name, {})[run.seed] = run
    return found


def _name(run: Run, recipe: Mapping[str, Any], base: Mapping[str, Any]) -> str:
    own = [f"{key}={value}" for key, value in recipe.items() if value != base.get(key)]
    return ":".join([run.method, *own])


def _place(method: str) -> tuple[int, int, str]:
    if method in FIRST:
        return 0, FIRST.index(method), ""
    return (2 if method in LAST else 1), 0, method
