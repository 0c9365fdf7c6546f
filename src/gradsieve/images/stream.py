"""Batches as a pure function of seed and step: whoever knows the step can go on from there."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ..errors import GradsieveError
from ..parameters import to_device
from ..randomness import seeded
from ..runs.team import ALONE, Team
from .data import ImageSet

Batch = tuple[Tensor, ...]
"""Images (B, C, H, W), labels (B,), place of each example in its set (B,); and its weight (B,) if the set has any."""

SHARDS_AT_ONCE = 16
"""A pass over shards mixes the examples of this many."""


class Shuffled(Dataset[Batch]):
    """Item t is the training batch of step t: pass after pass over the set, each in an order of its own.

    A pass leaves out the few examples that do not fill a batch; they come in another one. Each of a team gets its part.
    """

    def __init__(self, images: ImageSet, batch_size: int, *seed: object, team: Team = ALONE):
        self.images, self.seed, self.team = images, seed, team
        self.batch_size = min(batch_size, len(images))
        self.per_pass = len(images) // self.batch_size
        self._pass: tuple[int, Tensor] = (-1, torch.empty(0))

    def __getitem__(self, step: int) -> Batch:
        number, place = divmod(step, self.per_pass)
        if self._pass[0] != number:
            self._pass = number, self._order(number)
        index = self.team.part(self._pass[1][place * self.batch_size : (place + 1) * self.batch_size])
        return self.images.read(index, seeded(*self.seed, "view", step, *self.team.own))

    def _order(self, number: int) -> Tensor:
        generator = seeded(*self.seed, "order", number)
        order = torch.randperm(len(self.images), generator=generator)
        shards = self.images.source.shards
        if shards is None:
            return order
        # Files are read one group after the other; within a group the order is random.
        shards = shards[self.images.rows]
        rank = torch.randperm(int(shards.max()) + 1, generator=generator)[shards] // SHARDS_AT_ONCE  # (N,)
        return order[rank[order].argsort(stable=True)]


class InOrder(Dataset[Batch]):
    """Item t is the t-th batch of one pass, in the set's own order, as evaluation sees it."""

    def __init__(self, images: ImageSet, batch_size: int):
        self.chunks = torch.arange(len(images)).split(batch_size)
        self.images = images

    def __len__(self) -> int:
        return len(self.chunks)

    def __getitem__(self, step: int) -> Batch:
        return self.images.read(self.chunks[step])


class _Caught(Dataset[Any]):
    """Gives an error as an item: one that a worker process raises would arrive with its traceback as message."""

    def __init__(self, batches: Dataset[Batch]):
        self.batches = batches

    def __getitem__(self, step: int) -> Batch | GradsieveError:
        try:
            return self.batches[step]
        except GradsieveError as error:
            return error


class Stream:
    """Batches from a step on, on the device and ready for the network. It knows its step, so it can be resumed.

    Args:
        batches: `Shuffled`, without end, or `InOrder`.
        prepare: ``prepare(pixels, step)`` on the device.
        device: where to; a GPU is fed from pinned memory without waiting.
        workers: processes that read ahead.
        weights: of each example of the set, to be given with it.
    """

    def __init__(
        self,
        batches: Dataset[Batch],
        prepare: Callable[[Tensor, int], Tensor],
        device: torch.device,
        workers: int = 0,
        weights: Tensor | None = None,
    ):
        self.weights = None if weights is None else weights.to(device)
        self.batches, self.prepare, self.device, self.workers = batches, prepare, device, workers
        self.step = 0

    def __iter__(self) -> Iterator[Batch]:
        end = len(self.batches) if isinstance(self.batches, InOrder) else sys.maxsize
        loader = DataLoader(
            _Caught(self.batches),
            batch_size=None,
            sampler=range(self.step, end),
            num_workers=self.workers,
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator(),  # else each start would draw from the global one
        )
        for batch in loader:
            if isinstance(batch, GradsieveError):
                raise batch
            pixels, labels, index = to_device(batch, self.device)
            images = self.prepare(pixels, self.step)
            self.step += 1
            yield (images, labels, index) if self.weights is None else (images, labels, index, self.weights[index])

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]
