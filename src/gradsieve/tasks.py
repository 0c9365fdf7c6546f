"""The tasks that recipes are for: how each is described, trained and measured."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import GradsieveError
from .images import methods as image_methods
from .images import train as image_training
from .images.recipe import ImageRecipe
from .runs.recipe import Recipe, load_recipe
from .translation import methods as translation_methods
from .translation import train as translation_training
from .translation.recipe import TranslationRecipe


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


TASKS = {
    "images": Task(ImageRecipe, image_methods.METHODS, "accuracy", image_training.train, image_training.check),
    "translation": Task(
        TranslationRecipe, translation_methods.METHODS, "bleu", translation_training.train, translation_training.check
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
