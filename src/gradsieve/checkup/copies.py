"""Copies of the user's objects, so that nothing of the user's changes."""

import copy
import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from ..errors import GradsieveError
from ..parameters import device_of, untouched
from ..randomness import random_state, replayed


@contextmanager
def muted() -> Iterator[None]:
    """Without warnings: what they would say is said by a finding."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def duplicates(objects: tuple[Any, ...]) -> tuple[Any, ...]:
    """Deep copies that belong together: the optimizer's copy holds the parameters of the model's copy."""
    memo: dict[int, Any] = {}
    try:
        found = copy.deepcopy(objects, memo)
        for original in [each for each in _all(objects) if isinstance(each, Optimizer)]:
            _complete(original, memo[id(original)], memo)
        return found
    except Exception as error:  # a module of the user's may fail in any way
        raise GradsieveError(
            f"the doctor works on copies, but copy.deepcopy fails here ({type(error).__name__}: {error}). Give modules "
            "that can be copied: without tensors that carry a graph, open files or the like."
        ) from error


def _all(objects: tuple[Any, ...]) -> list[Any]:
    """And what is in dictionaries among them."""
    return [*objects, *(value for each in objects if isinstance(each, dict) for value in each.values())]


def _complete(optimizer: Optimizer, copied: Optimizer, memo: dict[int, Any]) -> None:
    """Torch copies of an optimizer only what a checkpoint holds; one of the user's own may have more."""
    for name, value in vars(optimizer).items():
        if name not in vars(copied) and not callable(value):  # a schedule has put its own step() there
            setattr(copied, name, copy.deepcopy(value, memo))


def copied(batch: Any) -> Any:
    try:
        return copy.deepcopy(batch)
    except Exception:  # for instance a tensor that carries a graph
        return pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), batch)


@contextmanager
def nothing_changes(model: nn.Module, scorer: nn.Module | None) -> Iterator[None]:
    """Random states, buffers and modes are afterwards what they were, even if a loss_fn holds a model of its own."""
    numpy, device = sys.modules.get("numpy"), device_of(model)
    own, its = random.getstate(), numpy.random.get_state() if numpy else None
    try:
        with (
            replayed(device, random_state(device)),
            untouched(model),
            untouched(nn.Module() if scorer is None else scorer),
        ):
            yield
    finally:
        random.setstate(own)
        if numpy:
            numpy.random.set_state(its)
