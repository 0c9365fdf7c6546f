"""A state of training on disk: tensors as safetensors, everything else as JSON. Loading executes nothing.

A checkpoint is a folder that appears under its name only when it is complete: it is written under another name,
flushed to the disk and renamed.
"""

import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..errors import GradsieveError

PLAIN = (str, int, float, bool, type(None))
GO_ON = "What was written before is intact: make room or mend the folder, then go on with --resume."
OTHER_OUT = "Give another file as --out."


def save_checkpoint(folder: Path, state: Mapping[str, Any]) -> None:
    """Writes the tree `state` of dicts, lists, tuples, tensors and plain values as `folder`, all or nothing."""
    tensors: dict[str, Tensor] = {}
    tree = _encoded(state, "", tensors)
    with written_whole(folder) as place:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        _save(tensors, place / "tensors.safetensors")
        (place / "state.json").write_text(json.dumps(tree))
        _flush(place / "state.json")
        shutil.rmtree(folder, ignore_errors=True)  # of the same step, before a resume


def load_checkpoint(folder: Path) -> Any:
    """The tree that `save_checkpoint` was given, tensors on the CPU."""
    try:
        tensors = load_file(folder / "tensors.safetensors")
        return _decoded(json.loads((folder / "state.json").read_text()), tensors)
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise GradsieveError(f"checkpoint {folder} cannot be read ({error}).") from error


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """One safetensors file, all or nothing."""
    with written_whole(path) as place:
        _save(tensors, place)


def save_json(path: Path, value: Any) -> None:
    """One JSON file, all or nothing."""
    with written_whole(path) as place:
        place.write_text(as_json(value, indent=1) + "\n")
        _flush(place)


def load_json(path: Path, advice: str) -> dict[str, Any]:
    """The object in a JSON file; `advice` says what to do if there is none."""
    try:
        found = json.loads(path.read_text())
        if isinstance(found, dict):
            return found
        raise ValueError("no JSON object")
    except (OSError, ValueError) as error:
        raise GradsieveError(f"{path} is damaged ({error}). {advice}") from error


def as_json(value: Any, indent: int | None = None) -> str:
    """JSON that every reader accepts: numbers that are not finite become null."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


@contextmanager
def written_whole(path: Path, advice: str = GO_ON) -> Iterator[Path]:
    """Gives a place to write to; what is there at the end becomes `path`, and after an error nothing is left."""
    place = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield place
        os.replace(place, path)
        _flush(path.parent)
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise GradsieveError(f"cannot write {path} ({reason}). {advice}") from error
    finally:
        _remove(place)


def forget_unfinished(folder: Path) -> None:
    """Removes what kills in the midst of `written_whole` have left in the folder and below it.

    safetensors writes to a file of its own first, whose name is ``.tmp`` and six random characters.
    """
    for place in list(folder.rglob(".*")):
        if re.fullmatch(r"\..+\.\d+|\.tmp\w{6}", place.name):
            _remove(place)


def _remove(place: Path) -> None:
    """A file or a folder, if it is there."""
    shutil.rmtree(place, ignore_errors=True)
    with suppress(OSError):
        place.unlink()


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    own = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    storages: set[int] = set()
    for name, tensor in own.items():  # safetensors refuses tensors that share memory
        pointer = tensor.untyped_storage().data_ptr()
        own[name] = tensor.clone() if pointer in storages else tensor
        storages.add(pointer)
    save_file(own, path)
    _flush(path)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _flush(path: Path) -> None:
    """To the disk itself, so that a rename never outlives what it names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _encoded(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        name = f"{len(tensors)}{path}"  # paths alone may collide: a key can hold a slash
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, Mapping):
        return {"dict": [[key, _encoded(v, f"{path}/{key}", tensors)] for key, v in value.items()]}
    if isinstance(value, list | tuple):
        items = [_encoded(v, f"{path}/{i}", tensors) for i, v in enumerate(value)]
        return {"list" if isinstance(value, list) else "tuple": items}
    if isinstance(value, PLAIN):
        return value
    raise GradsieveError(f"a checkpoint holds tensors and plain values, but {path} is a {type(value).__name__}.")


def _decoded(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _decoded(v, tensors) for key, v in content}
    items = [_decoded(v, tensors) for v in content]
    return items if kind == "list" else tuple(items)
