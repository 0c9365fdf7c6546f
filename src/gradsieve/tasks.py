"""The tasks that recipes are for: how each is described, trained and measured."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import GradsieveError
from .images.methods import METHODS
from .images.recipe import ImageRecipe
from .images.train import check, train
from .runs.recipe import Recipe, load_recipe


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


TASKS = {"images": Task(ImageRecipe, METHODS, "accuracy", train, check)}


def recipe_of(name: str, overrides: Sequence[str] = ()) -> Recipe:
    return load_recipe(name, overrides, {task: kind.recipe for task, kind in TASKS.items()})


def recipe_for(method: str, name: str, overrides: Sequence[str]) -> Recipe:
    """The recipe, if its task has such a method."""
    recipe = recipe_of(name, overrides)
    methods = TASKS[recipe.task].methods
    if method not in methods:
        raise GradsieveError(f"unknown method {method!r}; recipe {recipe.name} has {', '.join(methods)}.")
    return recipe
