"""The run directory, the same for every task.

::

    recipe.json  environment.json  metrics.jsonl  result.json
    final/model.safetensors  final/scorer.safetensors
    best/model.safetensors                   the parameters that dev chose
    scores/step-N.safetensors                each training example's latest weight, float16, 1 is uniform
    checkpoints/step-N/                      tensors.safetensors, state.json
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import GradsieveError
from .checkpoint import as_json, load_checkpoint, save_checkpoint, save_json, save_tensors, written_whole
from .recipe import Recipe, differences

KEPT = 2
"""Checkpoints that stay."""


class RunDirectory:
    """Everything that a run leaves behind. Whatever is written is written whole or not at all.

    Args:
        path: the folder.
        resume: go on with the run that is there; without it, a folder that holds a run is refused.
    """

    def __init__(self, path: Path, recipe: Recipe, method: str, seed: int, *, resume: bool):
        self.path, self.metrics = path, path / "metrics.jsonl"
        self._resolved = resolved = {"recipe": recipe.model_dump(mode="json"), "method": method, "seed": seed}
        if (path / "recipe.json").is_file():
            if not resume:
                raise GradsieveError(f"{path} holds a run already. Go on with it by --resume, or give another --out.")
            try:
                found = json.loads((path / "recipe.json").read_text())
            except ValueError as error:
                raise GradsieveError(f"{path / 'recipe.json'} is damaged ({error}). Give another --out.") from error
            if changed := differences(found, resolved):
                raise GradsieveError(
                    f"{path} holds another run: {'; '.join(changed)}. Resume with the same settings, "
                    "or give another --out."
                )

    def open(self, environment: Mapping[str, Any]) -> None:
        """Begins to write, once all that could be refused has been looked at."""
        save_json(self.path / "recipe.json", self._resolved)
        save_json(self.path / "environment.json", environment)

    @property
    def result(self) -> dict[str, Any] | None:
        """What the run came to, if it has ended."""
        file = self.path / "result.json"
        return json.loads(file.read_text()) if file.is_file() else None

    def log(self, record: Mapping[str, Any]) -> None:
        """One line of metrics.jsonl; it has a "step"."""
        try:
            with self.metrics.open("a") as file:
                file.write(as_json(record) + "\n")
        except OSError as error:
            raise GradsieveError(
                f"cannot write {self.metrics} ({error.strerror}). The last checkpoint is intact: go on with --resume."
            ) from error

    def save_tensors(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """The file ``name.safetensors``, for instance ``final/model``."""
        save_tensors(self.path / f"{name}.safetensors", tensors)

    def save_scores(self, step: int, weights: Tensor) -> None:
        self.save_tensors(f"scores/step-{step:09}", {"weights": weights.half()})

    def save_checkpoint(self, step: int, state: Mapping[str, Any]) -> None:
        save_checkpoint(self.path / f"checkpoints/step-{step:09}", {"step": step, "state": state})
        for old in self._checkpoints()[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)

    def restore(self) -> tuple[int, Any] | None:
        """Step and state of the latest checkpoint that can be read; what the run wrote after it is forgotten."""
        folders = self._checkpoints()
        reasons = []
        for folder in reversed(folders):
            try:
                found = load_checkpoint(folder)
            except GradsieveError as error:
                reasons.append(str(error))
                continue
            self._forget_after(found["step"])
            return found["step"], found["state"]
        if folders:
            raise GradsieveError(" ".join(reasons) + " Remove the checkpoints folder to begin the run anew.")
        self._forget_after(0)
        return None

    def finish(self, result: Mapping[str, Any]) -> None:
        """Writes result.json, the sign that the run has ended."""
        save_json(self.path / "result.json", result)

    def _checkpoints(self) -> list[Path]:
        return sorted((self.path / "checkpoints").glob("step-*"))

    def _forget_after(self, step: int) -> None:
        for file in (self.path / "scores").glob("step-*.safetensors"):
            if int(file.stem.removeprefix("step-")) > step:
                file.unlink()
        if self.metrics.is_file():
            lines = self.metrics.read_text().splitlines()
            kept = [line for line in lines if _step(line) <= step]
            with written_whole(self.metrics) as place:
                place.write_text("".join(line + "\n" for line in kept))


def _step(line: str) -> float:
    """Of a line of metrics; a line that was cut short counts as late."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError):
        return float("inf")
