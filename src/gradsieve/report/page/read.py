"""Runs as their directories tell of them, ended or still going."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from ...errors import GradsieveError

DEPTH = 3
"""Folders below the given one in which runs are looked for; a comparison's lie two below."""


@dataclass(frozen=True)
class Run:
    """What there is to know of one run."""

    path: Path
    settings: Mapping[str, Any]
    """Recipe, method, seed and data, as the run began."""

    @property
    def recipe(self) -> Mapping[str, Any]:
        recipe: Mapping[str, Any] = self.settings["recipe"]
        return recipe

    @property
    def method(self) -> str:
        return str(self.settings["method"])

    @property
    def seed(self) -> int:
        return int(self.settings["seed"])

    @cached_property
    def lines(self) -> list[dict[str, Any]]:
        """Of metrics.jsonl; one that is just being written is left out."""
        file = self.path / "metrics.jsonl"
        texts = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else []
        found = [_parsed(text) for text in texts]
        return [line for line in found if isinstance(line, dict) and isinstance(line.get("step"), int)]

    @cached_property
    def result(self) -> dict[str, Any] | None:
        """What the run came to; None while it has not ended."""
        return self.optional("result.json") or None

    @property
    def step(self) -> int:
        """The last one that is known of."""
        return max((line["step"] for line in self.lines), default=0)

    @property
    def steps(self) -> int:
        return int(self.recipe["steps"])

    @cached_property
    def weights(self) -> tuple[np.ndarray, np.ndarray]:
        """Steps (S,) and the latest weight of each training example then (S, N), nan before it had one."""
        files = sorted((self.path / "scores").glob("step-*.safetensors"))
        found = [(int(file.stem.removeprefix("step-")), _tensors(file).get("weights")) for file in files]
        known = [(step, weights.astype(np.float32)) for step, weights in found if weights is not None]
        if not known:
            return np.zeros(0, int), np.zeros((0, 0), np.float32)
        return np.array([step for step, _ in known]), np.stack([weights for _, weights in known])

    @cached_property
    def examples(self) -> Mapping[str, np.ndarray]:
        """Labels, thumbnails, losses: what images/examples.py has written; of older runs, which are damaged at most."""
        older = _tensors(self.path / "damaged.safetensors")
        if "damaged" in older and len(older["damaged"]) != self.weights[1].shape[1]:
            older = {}
        return older | _tensors(self.path / "examples.safetensors")

    @cached_property
    def about(self) -> dict[str, Any]:
        """Sizes, classes and names of examples."""
        return self.optional("examples.json")

    def optional(self, name: str) -> dict[str, Any]:
        """A JSON file of the run, or nothing if it is not there."""
        file = self.path / name
        found = _parsed(file.read_text(encoding="utf-8", errors="replace")) if file.is_file() else {}
        return found if isinstance(found, dict) else {}


def find_runs(folders: Sequence[Path]) -> list[Run]:
    """The runs in the folders, each once. A run within a run, as retraining makes, counts as part of it."""
    found: dict[Path, Run] = {}
    for folder in folders:
        if not folder.is_dir():
            raise GradsieveError(f"{folder} is no folder. Give the folder of a run or of a comparison.")
        paths = _run_folders(folder, DEPTH)
        if not paths:
            raise GradsieveError(f"{folder} holds no run. Give the --out of `gradsieve train` or `gradsieve compare`.")
        found |= {path.resolve(): _run(path) for path in paths}
    return list(found.values())


def _run_folders(folder: Path, depth: int) -> list[Path]:
    if (folder / "recipe.json").is_file():
        return [folder]
    below = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    return [found for path in below for found in _run_folders(path, depth - 1)] if depth else []


def _run(path: Path) -> Run:
    settings = _parsed((path / "recipe.json").read_text(encoding="utf-8", errors="replace"))
    run = Run(path, settings)
    try:
        whole = run.steps > 0 and run.seed >= 0 and bool(run.method) and isinstance(run.recipe["task"], str)
    except (KeyError, TypeError, ValueError):
        whole = False
    if not whole:
        raise GradsieveError(f"{path / 'recipe.json'} is damaged. Leave this run out, or train it anew.")
    return run


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _tensors(file: Path) -> dict[str, np.ndarray]:
    """Of a file that may be missing, or may be removed as we look."""
    try:
        return load_file(file) if file.is_file() else {}
    except (OSError, SafetensorError) as error:
        raise GradsieveError(f"{file} cannot be read ({error}). Remove it, or train the run anew.") from error
