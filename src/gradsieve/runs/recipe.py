"""Recipes: a TOML file that holds only what differs from the defaults, checked against a typed description."""

import difflib
import hashlib
import json
import tomllib
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..errors import GradsieveError

Number = Annotated[float, Field(strict=True)]
Positive = Annotated[Number, Field(gt=0)]
NotNegative = Annotated[Number, Field(ge=0)]
Share = Annotated[Number, Field(ge=0, le=1)]
PositiveShare = Annotated[Number, Field(gt=0, le=1)]
Count = Annotated[int, Field(strict=True, ge=1)]


class Settings(BaseModel):
    """A part of a recipe. An unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _none_by_name(cls, content: Any) -> Any:
        """TOML has no null: the word "none" stands for it, where a key may be None."""
        if not isinstance(content, dict):
            return content
        optional = {name for name, field in cls.model_fields.items() if type(None) in get_args(field.annotation)}
        return {key: None if value == "none" and key in optional else value for key, value in content.items()}


class Recipe(Settings):
    """What every task's recipe has."""

    name: str
    task: str
    description: str
    needs: str = "nothing"
    """What the user must bring."""
    steps: Count
    """Optimizer steps."""
    log_every: Count = 50
    evaluate_every: Count = 1000
    checkpoint_every: Count = 1000
    scores: Count = 20
    """How many times in a run the examples' weights are written down."""

    @property
    def hash(self) -> str:
        """Of everything that has a say in the result."""
        content = with_a_say({"recipe": self.model_dump(mode="json")})
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


class SPCLSettings(Settings):
    start: PositiveShare = 0.5
    """Share of each batch that is let in at first."""
    full_at: Share = 0.5
    """Share of the steps after which all are let in."""


def recipe_names() -> list[str]:
    """Those that come with the package."""
    return sorted(f.name.removesuffix(".toml") for f in _folder().iterdir() if f.name.endswith(".toml"))


def load_recipe(name: str, overrides: Iterable[str], tasks: Mapping[str, type[Recipe]]) -> Recipe:
    """The recipe of that name, or in that TOML file, with ``key=value`` overrides such as ``optimizer.lr=0.1``."""
    content = _content(name)
    for override in overrides:
        _apply(content, override)
    task = str(content.get("task"))
    if task not in tasks:
        raise GradsieveError(f"recipe {name}: task must be one of {', '.join(tasks)}, not {task!r}.")
    try:
        return tasks[task].model_validate(content)
    except ValidationError as error:
        raise GradsieveError(f"recipe {name}: " + "; ".join(_sentences(error, tasks[task]))) from error


NO_SAY = ("description", "needs", "log_every", "checkpoint_every", "data.workers")


def with_a_say(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run without those keys of its recipe that do not change what it computes."""

    def kept(content: Mapping[str, Any], path: str) -> dict[str, Any]:
        return {
            key: kept(value, f"{path}{key}.") if isinstance(value, Mapping) else value
            for key, value in content.items()
            if path + key not in NO_SAY
        }

    return dict(settings) | {"recipe": kept(settings.get("recipe", {}), "")}


def differences(old: Mapping[str, Any], new: Mapping[str, Any], path: str = "") -> list[str]:
    """Which keys of two resolved recipes differ, and how."""
    found = []
    for key in dict.fromkeys([*old, *new]):
        a, b = old.get(key), new.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found += differences(a, b, f"{path}{key}.")
        elif a != b:
            found.append(f"{path}{key} was {a!r} and is {b!r}")
    return found


def _folder() -> Any:
    return files("gradsieve") / "recipes"


def _content(name: str) -> dict[str, Any]:
    own = Path(name)
    if name in recipe_names():
        raw, stem = (_folder() / f"{name}.toml").read_bytes(), name
    elif own.suffix == ".toml" and own.is_file():
        raw, stem = own.read_bytes(), own.stem
    else:
        raise GradsieveError(
            f"unknown recipe {name!r}{_nearest(name, recipe_names())}. There are {', '.join(recipe_names())}; "
            "or give the path of a .toml file."
        )
    try:
        return {"name": stem, **tomllib.loads(raw.decode("utf-8-sig"))}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise GradsieveError(f"recipe {name} is not valid TOML: {error}.") from error


def _apply(content: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise GradsieveError(f"--set wants key=value, for instance steps=1000, not {override!r}.")
    *parents, last = key.strip().split(".")
    for parent in parents:
        content = content.setdefault(parent, {})
        if not isinstance(content, dict):
            raise GradsieveError(f"--set {override}: {parent} is a value, not a section.")
    content[last] = _value(text.strip())


def _value(text: str) -> Any:
    """As TOML reads it; what TOML does not understand is text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _sentences(error: ValidationError, model: type[BaseModel]) -> list[str]:
    sentences = []
    for problem in error.errors():
        path = [str(part) for part in problem["loc"]]
        if problem["type"] == "extra_forbidden":
            known = _keys(model, path[:-1])
            nearest = _nearest(path[-1], known)
            where = f"{'.'.join(path[:-1])} has" if path[:-1] else "there are"
            sentences.append(f"unknown key {'.'.join(path)}{nearest} ({where} {', '.join(known)})")
        else:
            found = "" if problem["type"] == "missing" else f", not {problem['input']!r}"
            sentences.append(f"{'.'.join(path)}: {problem['msg']}{found}")
    return sentences


def _keys(model: type[BaseModel], path: list[str]) -> list[str]:
    for part in path:
        annotation = model.model_fields[part].annotation
        annotation = next(
            (a for a in get_args(annotation) if a is not type(None)), annotation
        )  # of one that may be None
        assert isinstance(annotation, type)
        assert issubclass(annotation, BaseModel)
        model = annotation
    return list(model.model_fields)


def _nearest(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f", did you mean {close[0]}?" if close else ""
