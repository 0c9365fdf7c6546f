"""The tasks that recipes are for: how each is described, trained and measured."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from .checkup import Diagnosis
from .errors import GradsieveError
from .images.methods import METHODS as IMAGE_METHODS
from .images.recipe import ImageRecipe
from .report.comparison import BEST, LAST
from .runs.recipe import Recipe, load_recipe
from .translation.methods import METHODS as TRANSLATION_METHODS
from .translation.recipe import TranslationRecipe


def later(module: str, name: str) -> Callable[..., Any]:
    """A function that is imported when it is called: nobody needs another task's packages."""

    def call(*arguments: Any, **settings: Any) -> Any:
        return getattr(import_module(f"{__package__}.{module}"), name)(*arguments, **settings)

    return call


@dataclass(frozen=True)
class Task:
    recipe: type[Recipe]
    methods: Collection[str]
    metric: str
    """What methods are compared by."""
    train: Callable[..., dict[str, Any]]
    """``train(recipe, method, seed=, data=, out=, resume=, device=, progress=)``."""
    check: Callable[..., None]
    """``check(recipe, method, data=, device=)`` raises what `train` would refuse."""
    doctor: Callable[..., Diagnosis]
    """``doctor(recipe, method, data=, device=, on_rows=)`` looks whether DDS can work."""
    judged: str = LAST
    """Which parameters a gain is measured with."""
    caption: str = "± of a gain is its 95% interval"
    bootstrap: Callable[..., dict[str, tuple[float, ...]]] | None = None
    """``bootstrap(runs, base)``: p of each method's difference from `base`, seed by seed, from their run folders."""
    picture: Callable[..., None] | None = None
    """``picture(runs, file, title=)`` draws what the runs of a method did."""


TASKS = {
    "images": Task(
        ImageRecipe,
        IMAGE_METHODS,
        "accuracy",
        later("images.train", "train"),
        later("images.train", "check"),
        later("images.checkup", "examine"),
    ),
    "translation": Task(
        TranslationRecipe,
        TRANSLATION_METHODS,
        "bleu",
        later("translation.train", "train"),
        later("translation.train", "check"),
        later("translation.checkup", "examine"),
        judged=BEST,
        caption="gains are of the parameters that dev chose; ± of a gain is its 95% interval",
        bootstrap=later("translation.score", "bootstrap_runs"),
        picture=later("report.usage", "plot_usage"),
    ),
}


def recipe_of(name: str, overrides: Sequence[str] = ()) -> Recipe:
    return load_recipe(name, overrides, {task: kind.recipe for task, kind in TASKS.items()})


def recipe_for(method: str, name: str, overrides: Sequence[str]) -> Recipe:
    """The recipe, if its task has such a method."""
    recipe = recipe_of(name, overrides)
    methods = TASKS[recipe.task].methods
    if method not in methods:
        raise GradsieveError(f"unknown method {method!r}; recipe {recipe.name} has {', '.join(methods)}.")
    return recipe
