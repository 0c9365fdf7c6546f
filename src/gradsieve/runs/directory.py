"""The run directory, the same for every task.

::

    recipe.json  environment.json  metrics.jsonl  time.json  result.json
    final/model.safetensors  final/scorer.safetensors
    final/input.json  final/direction.safetensors    images: what it takes to use the scorer on other data
    best/step-N.safetensors                  the parameters that dev chose
    scores/step-N.safetensors                each training example's latest weight, float16, 1 is uniform
    damaged.safetensors                      which training examples were damaged, where that is known
    examples.json  examples.safetensors      images: sizes, classes, labels, losses, a few thumbnails with their names
    checkpoints/step-N/                      tensors.safetensors, state.json
    tensorboard/                             event files, if asked for
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import Tensor

from ..errors import GradsieveError
from .checkpoint import (
    as_json,
    forget_unfinished,
    load_checkpoint,
    load_json,
    save_checkpoint,
    save_json,
    save_tensors,
    written_whole,
)
from .recipe import Recipe, differences, with_a_say
from .team import Team

KEPT = 2
"""Checkpoints that stay."""
ANOTHER = "Give another --out."


class RunDirectory:
    """Everything that a run leaves behind. Whatever is written is written whole or not at all.

    Of several processes the first one writes; the others may call everything, and read.

    Args:
        path: the folder.
        data: checksum of the data.
        resume: go on with the run that is there; without it, a folder that holds a run is refused.
    """

    def __init__(self, path: Path, recipe: Recipe, method: str, seed: int, data: str, *, resume: bool):
        self.path, self.metrics, self.team = path, path / "metrics.jsonl", Team()
        self._settings = {"recipe": recipe.model_dump(mode="json"), "method": method, "seed": seed, "data": data}
        if path.exists() and not path.is_dir():
            raise GradsieveError(f"{path} is a file. Give a folder as --out.")
        self._begun = (path / "recipe.json").exists()
        if not self._begun and path.is_dir() and any(not file.name.startswith(".") for file in path.iterdir()):
            raise GradsieveError(f"{path} has files of another kind in it. Give a new or empty folder as --out.")
        if self._begun and not resume:
            raise GradsieveError(f"{path} holds a run already. Go on with it by --resume, or give another --out.")
        found = load_json(path / "recipe.json", ANOTHER) if self._begun else self._settings
        with suppress(KeyError, ValidationError):  # a setting that an older version did not have is at its default
            found = found | {"recipe": type(recipe).model_validate(found["recipe"]).model_dump(mode="json")}
        if changed := differences(with_a_say(found), with_a_say(self._settings)):
            raise GradsieveError(
                f"{path} holds another run: {'; '.join(changed)}. Resume with the same settings, or give another --out."
            )

    @property
    def result(self) -> dict[str, Any] | None:
        """What the run came to, if it has ended."""
        file = self.path / "result.json"
        return load_json(file, ANOTHER) if file.exists() else None

    @contextmanager
    def opened(self, environment: Mapping[str, Any]) -> Iterator[None]:
        """Inside, the run may write; no other run may. To be entered once nothing is left to be refused."""
        self.team.wait()  # all have looked at what was there
        if not self.team.first:
            yield
            return
        with _locked(self.path):
            forget_unfinished(self.path)
            save_json(self.path / "recipe.json", self._settings)
            if not self._begun or not (self.path / "environment.json").exists():
                save_json(self.path / "environment.json", environment)
            yield

    def log(self, record: Mapping[str, Any]) -> None:
        """One line of metrics.jsonl; it has a "step"."""
        if not self.team.first:
            return
        try:
            with self.metrics.open("a") as file:
                file.write(as_json(record) + "\n")
        except OSError as error:
            raise GradsieveError(
                f"cannot write {self.metrics} ({error.strerror}). The last checkpoint is intact: go on with --resume."
            ) from error

    def save_tensors(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """The file ``name.safetensors``, for instance ``final/model``."""
        if self.team.first:
            save_tensors(self.path / f"{name}.safetensors", tensors)

    def save_scores(self, step: int, weights: Tensor) -> None:
        self.save_tensors(f"scores/{numbered(step)}", {"weights": weights.half()})

    def save_times(self, times: Mapping[str, Any]) -> None:
        """Seconds of training, of what is done around its steps, and of the parts of those steps that were timed."""
        if self.team.first:
            save_json(self.path / "time.json", times)

    def save_checkpoint(self, step: int, state: Mapping[str, Any]) -> None:
        if not self.team.first:
            return
        save_checkpoint(self.path / "checkpoints" / numbered(step), {"step": step, "state": state})
        for old in self._checkpoints()[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)

    def restore(self) -> tuple[int, Any] | None:
        """Step and state of the latest checkpoint that can be read; what the run wrote after it is forgotten."""
        if not self._begun:
            return None
        folders = self._checkpoints()
        reasons = []
        for folder in reversed(folders):
            try:
                found = load_checkpoint(folder)
                step, state = found["step"], found["state"]
            except (GradsieveError, KeyError, TypeError) as error:
                reasons.append(f"{folder.name}: {error}")
                continue
            self._forget_after(step)
            self.team.wait()
            return step, state
        if folders:
            raise GradsieveError(
                f"no checkpoint of {self.path} can be read ({'; '.join(reasons)}). Begin anew with another --out."
            )
        self._forget_after(0)
        return None

    def finish(self, result: Mapping[str, Any]) -> None:
        """Writes result.json, the sign that the run has ended."""
        if self.team.first:
            save_json(self.path / "result.json", result)
        self.team.wait()

    def _checkpoints(self) -> list[Path]:
        return sorted((self.path / "checkpoints").glob("step-*"))

    def _forget_after(self, step: int) -> None:
        if not self.team.first:
            return
        for file in (self.path / "scores").glob("step-*.safetensors"):
            if file.stem > numbered(step):
                file.unlink()
        if self.metrics.is_file():
            lines = self.metrics.read_text().splitlines()
            kept = [line for line in lines if _step(line) <= step]
            with written_whole(self.metrics) as place:
                place.write_text("".join(line + "\n" for line in kept))


def numbered(step: int) -> str:
    """Names that sort as their steps do."""
    return f"step-{step:09}"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Inside, the folder is this process's own. The lock goes with the process, however that ends."""
    try:
        import fcntl
    except ImportError:  # Windows
        path.mkdir(parents=True, exist_ok=True)
        yield
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = (path / ".lock").open("w")
    except OSError as error:
        raise GradsieveError(f"cannot write into {path} ({error.strerror}). Give another folder as --out.") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise GradsieveError(f"another process is at work in {path}. Wait for it, or stop it.") from error
        yield


def _step(line: str) -> float:
    """Of a line of metrics; a line that was cut short counts as late."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
