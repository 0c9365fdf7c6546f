"""Several processes that train one model: which numbers are global, and how they come together.

Under DistributedDataParallel each process holds the whole model and a part of the batch. Under ``fully_shard`` (FSDP2)
it holds a part of every parameter besides, its *shard*, and all that DDS keeps of theta is kept shard by shard.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .errors import check


def data_parallel(model: nn.Module | None) -> DistributedDataParallel | None:
    """The model as DistributedDataParallel, compiled or not, if it is that."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, DistributedDataParallel) else None


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module: passes that no gradient is synchronised for go around DistributedDataParallel."""
    wrapper = data_parallel(model)
    return model if wrapper is None else wrapper.module


def is_shard(tensor: Tensor) -> bool:
    return hasattr(tensor, "to_local")  # a DTensor; importing it takes more than a second


def local(tensor: Tensor) -> Tensor:
    """What this process holds of it, in the same memory."""
    return tensor.to_local() if is_shard(tensor) else tensor  # type: ignore[attr-defined]


def sharded_like(value: Tensor, parameter: Tensor) -> Tensor:
    """What this process holds of something laid out as `parameter` is, as a distributed tensor."""
    if not is_shard(parameter) or is_shard(value):
        return value
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        value,
        parameter.device_mesh,  # type: ignore[attr-defined]
        parameter.placements,  # type: ignore[attr-defined]
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def shard_of(value: Tensor, parameter: Tensor) -> Tensor:
    """What this process is to hold of a value that is whole or distributed in some other way."""
    if not is_shard(parameter) or (not is_shard(value) and value.shape == local(parameter).shape != parameter.shape):
        return local(value)
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    if is_shard(value):
        return value.redistribute(mesh, placements).to_local()  # type: ignore[attr-defined]
    return distribute_tensor(value.to(parameter.device), mesh, placements).to_local()


def whole(value: Tensor, parameter: Tensor) -> Tensor:
    """All of a direction in `parameter`, of which this process holds its shard."""
    return sharded_like(value, parameter).full_tensor() if is_shard(parameter) else value  # type: ignore[attr-defined]


def _sharded_modules(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "_get_fsdp_state")]


def reshard(model: nn.Module) -> None:
    """Parameters that FSDP2 has put together are taken apart again, so that the next pass sees what shards hold."""
    for module in _sharded_modules(model):
        module.reshard()


def check_gradients_are_synchronised(model: nn.Module) -> None:
    """FSDP2 keeps gradients that it does not synchronise to itself, where they cannot be scaled."""
    groups = [module._get_fsdp_state()._fsdp_param_group for module in _sharded_modules(model)]
    check(
        all(group is None or group.reduce_grads for group in groups),
        "set_requires_gradient_sync(False) cannot be had with DDS: weights of earlier micro-batches change with "
        "each later one. Leave synchronisation on while accumulating.",
    )


class Sizes(NamedTuple):
    """How many examples each process has, and where this one's stand among all of them."""

    each: tuple[int, ...]
    rank: int

    @property
    def total(self) -> int:
        return sum(self.each)

    @property
    def place(self) -> slice:
        start = sum(self.each[: self.rank])
        return slice(start, start + self.each[self.rank])


class World:
    """The processes that train `model` together. Of a model that is not parallel there is one, and nothing is sent.

    `together` says that all processes do, if there are several, though the model does not show it.
    """

    def __init__(self, model: nn.Module | None = None, *, together: bool = False):
        parameters = [] if model is None else list(model.parameters())
        shards = [is_shard(p) for p in parameters]
        self.sharded = any(shards)
        self.group: Any = None
        if self.sharded:
            meshes = {p.device_mesh for p in parameters if is_shard(p)}  # type: ignore[attr-defined]
            check(
                all(shards) and len(meshes) == 1 and next(iter(meshes)).ndim == 1,
                "DDS works with fully_shard on the whole model and one mesh of one dimension; this model is sharded in "
                "part or in several dimensions. Call fully_shard(model) on the root too.",
            )
            self.group = next(iter(meshes)).get_group()
        elif (wrapper := data_parallel(model)) is not None:
            self.group = wrapper.process_group
        elif together and dist.is_available() and dist.is_initialized():
            self.group = dist.group.WORLD
        self.size = 1 if self.group is None else dist.get_world_size(self.group)
        self.rank = 0 if self.group is None else dist.get_rank(self.group)
        self._host = self.group
        if self.size > 1 and dist.get_backend(self.group) != "gloo":
            # Counts are exchanged between hosts, so that nobody waits for a device.
            self._host = dist.new_group(dist.get_process_group_ranks(self.group), backend="gloo")

    def sizes(self, own: int) -> Sizes:
        """How many examples each process has. Waits for the other hosts, not for a device."""
        if self.size == 1:
            return Sizes((own,), 0)
        counts = [torch.zeros(1, dtype=torch.long) for _ in range(self.size)]
        dist.all_gather(counts, torch.tensor([own]), group=self._host)
        return Sizes(tuple(int(count) for count in counts), self.rank)

    def gathered(self, values: Tensor, sizes: Sizes) -> Tensor:
        """A number or a row per example from all processes, in the order of their ranks, free of any graph."""
        values = values.detach()
        if self.size == 1:
            return values
        most, shape = max(sizes.each), values.shape[1:]
        rows = [values.new_empty((most, *shape)) for _ in range(self.size)]
        padding = values.new_zeros((most - len(values), *shape))
        dist.all_gather(rows, torch.cat([values, padding]), group=self.group)
        return torch.cat([row[:count] for row, count in zip(rows, sizes.each, strict=True)])

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Each tensor becomes the sum of what all processes have, in place."""
        if self.size > 1:
            for work in [dist.all_reduce(t, group=self.group, async_op=True) for t in tensors]:
                work.wait()

    def summed(self, value: Tensor) -> Tensor:
        total = value.detach().clone()
        self.add_up([total])
        return total

    def mean(self, total: Tensor, count: int) -> Tensor:
        """Of something in all processes, (d,), by the sum of the own ones and their number."""
        if self.size > 1:
            everywhere = self.summed(torch.cat([total, total.new_full((1,), count)]))
            return everywhere[:-1] / everywhere[-1]
        return total / count

    def agreed(self, good: Tensor) -> Tensor:
        """Whether it is true everywhere."""
        return good if self.size == 1 else self.summed((~good).long()) == 0

    def told(self, number: int) -> int:
        """The first process's number."""
        if self.size == 1:
            return number
        message = torch.tensor([number])
        dist.broadcast(message, group=self._host, group_src=0)
        return int(message)

    def alike(self, module: nn.Module) -> None:
        """Gives every process the first one's parameters and buffers."""
        if self.size > 1:
            for tensor in (*module.parameters(), *module.buffers()):
                group = self._host if tensor.device.type == "cpu" else self.group
                dist.broadcast(tensor.data, group=group, group_src=0)


ALONE = World()
