"""theta: what it is made of, and how to lend a model other values without leaving a trace.

Everything here writes through ``.data``. Autograd's version counters do not see such writes, so a
training graph that still waits for its ``backward`` stays valid, and the values are put back bit for bit.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .errors import GradsieveError
from .parallel import ALONE, World, is_shard, local, reshard

Direction = Mapping[str, Tensor]
"""Parameter name -> tensor of the parameter's shape. A name that is absent counts as zero."""

LossFn = Callable[[nn.Module, Any], Tensor]
"""``loss_fn(model, batch)``: one loss per example, ``(B,)``."""

Modes = Sequence[tuple[nn.Module, bool]]
"""Modules, and whether each trains."""


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def names_of(model: nn.Module) -> dict[int, str]:
    """By id; a parameter that several modules share goes by its first name, as in `trainable`."""
    return {id(p): name for name, p in model.named_parameters()}


def device_of(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def snapshot(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A copy of the values, free of any graph; of parameters that are sharded, of this process's shards."""
    return dict(zip(values, copies([local(value.detach()) for value in values.values()]), strict=True))


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    made = [torch.empty_like(t) for t in tensors]
    fill(made, tensors)
    return made


def fill(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """All at once: on a GPU one kernel for each kind of number instead of one for each tensor."""
    for kind in {t.dtype for t in targets}:
        pairs = [(t, value) for t, value in zip(targets, values, strict=True) if t.dtype == kind]
        torch._foreach_copy_([t for t, _ in pairs], [value for _, value in pairs])


def norm(direction: Direction, world: World = ALONE) -> Tensor:
    """||v||, a 0-dimensional tensor in float32 at least; of shards, over all processes."""
    tensors = [_at_least_float32(v) for v in direction.values()]
    length = torch.nn.utils.get_total_norm(tensors) if tensors else torch.zeros(())
    return world.summed(length.square()).sqrt() if world.sharded else length


def moved(theta: Mapping[str, Tensor], direction: Direction, step: Tensor) -> dict[str, Tensor]:
    """theta + step * v, for the parameters that v moves."""
    if not direction:
        return {}
    names = list(direction)
    values = torch._foreach_mul([direction[n] for n in names], step)
    torch._foreach_add_(values, [local(theta[n].detach()) for n in names])
    return dict(zip(names, values, strict=True))


@contextmanager
def lent(model: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, the named parameters hold `values`; afterwards their own, bit for bit.

    In place, so that compiled, sharded or otherwise wrapped modules see the values too.
    """
    parameters = dict(model.named_parameters())
    sharded = any(is_shard(parameters[name]) for name in values)
    here = [local(parameters[name].data) for name in values]
    own = copies(here)
    try:
        fill(here, [local(value.detach()) for value in values.values()])
        yield
    finally:
        if sharded:  # FSDP2 may have left parameters whole after the pass
            reshard(model)
        fill(here, own)


@contextmanager
def untouched(
    model: nn.Module,
    *,
    training: bool | None = None,
    modes: Modes = (),
    buffers: Mapping[str, Tensor] | None = None,
) -> Iterator[None]:
    """Buffers (BatchNorm statistics) and train/eval modes are afterwards what they were before.

    `training` sets the mode inside. Recurrent layers stay as they are: cuDNN differentiates them in
    training mode only. `modes` sets that of each module by itself, as `modes_of` has noted it. `buffers` sets buffers
    inside, by name: power iterations and the like go on from there.
    """
    modules = dict(model.named_modules())
    before = [(module, module.training) for module in modules.values()]
    own = {
        f"{path}.{leaf}".lstrip("."): (module, leaf, buffer)
        for path, module in modules.items()
        for leaf, buffer in module._buffers.items()
        if buffer is not None
    }
    here = {name: buffer.data for name, (_, _, buffer) in own.items()}
    saved = copies(list(here.values()))
    try:
        lends = {name: value for name, value in (buffers or {}).items() if name in own}
        fitting = [name for name, value in lends.items() if value.shape == here[name].shape]
        fill([here[name] for name in fitting], [lends[name] for name in fitting])
        for name in lends.keys() - fitting:  # it has grown since
            module, leaf, _ = own[name]
            module._buffers[leaf] = lends[name].clone()
        _set_modes(modes)
        if training is not None:
            _set_modes([(module, training) for module, _ in before if not isinstance(module, nn.RNNBase)])
        yield
    finally:
        _set_modes(before)
        fill(list(here.values()), saved)
        for module, leaf, buffer in own.values():
            module._buffers[leaf] = buffer


def modes_of(model: nn.Module) -> Modes:
    """Whether each module trains."""
    return [(module, module.training) for module in model.modules()]


def _set_modes(modes: Modes) -> None:
    for module, mode in modes:
        if module.training != mode:
            module.training = mode


def checked_losses(losses: Any, batch: Any, who: str = "loss_fn") -> Tensor:
    """The losses, if they are one per example; else an error that says what to change.

    A fused loss that returns a mean would silently disable all weighting.
    """
    if not isinstance(losses, Tensor):
        raise GradsieveError(f"{who} must return a tensor with one loss per example, not {type(losses).__name__}.")
    tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim]
    rows = {t.shape[0] for t in tensors}
    expected = f"({min(rows)},)" if len(rows) == 1 else "(B,)"
    if losses.ndim != 1:
        raise GradsieveError(
            f"{who} must return one loss per example, shape {expected}, but returned shape {tuple(losses.shape)}. "
            "Ask the loss for reduction='none' and average over everything but the batch."
        )
    sizes = {size for t in tensors for size in t.shape} | {len(batch) if isinstance(batch, list | tuple) else 0}
    if tensors and len(losses) not in sizes:
        raise GradsieveError(
            f"{who} returned {len(losses)} losses, but nothing in the batch has that size (expected shape {expected}). "
            "Return one loss per example."
        )
    if not losses.is_floating_point():
        raise GradsieveError(f"{who} must return floating-point losses, not {losses.dtype}.")
    return _at_least_float32(losses)


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with all its tensors on the device; from pinned memory without waiting."""

    def move(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(device, non_blocking=True)
        return leaf.to(device) if hasattr(leaf, "to") else leaf

    return pytree.tree_map(move, batch)


def full_precision(batch: Any) -> Any:
    """The batch with its half-precision tensors in float32."""
    return pytree.tree_map_only(Tensor, _at_least_float32, batch)


def _at_least_float32(value: Tensor) -> Tensor:
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
