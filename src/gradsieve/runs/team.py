"""The processes of one run, as torchrun starts them. Of one process alone, nothing here does anything."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from ..errors import GradsieveError, check
from ..record import StepRecord

Value = TypeVar("Value")


@contextmanager
def joined(device: torch.device) -> Iterator[None]:
    """Inside, the processes that torchrun has started belong together."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield
        return
    store, rank, size = next(rendezvous("env://"))
    # torchrun's store outlives its processes: after a restart they would find the addresses of those that have died.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"restart-{attempt}", store)  # type: ignore[attr-defined]
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "gloo" in str(error):
            raise GradsieveError(
                "another process of this run was lost. What was saved is intact: go on with --resume, "
                "or let torchrun do so with --max-restarts."
            ) from error
        raise
    finally:
        dist.destroy_process_group()


def start(processes: int) -> int:
    """Runs this very command in as many processes, by torchrun; returns its exit code."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return subprocess.run([*torchrun, "-m", "gradsieve", *sys.argv[1:]], check=False).returncode


class Team:
    """Those who train one model: each takes its part of every batch, and the first one writes things down."""

    rank: int
    size: int

    def __init__(self) -> None:
        several = dist.is_available() and dist.is_initialized()
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def own(self) -> tuple[int, ...]:
        """What random numbers of its own are seeded with besides, (): one process draws those that it always drew."""
        return () if self.size == 1 else (self.rank,)

    def part(self, batch: Tensor) -> Tensor:
        """An equal part of a joint batch, in order."""
        return batch if self.size == 1 else batch.chunk(self.size)[self.rank]

    def check_divides(self, size: int, what: str) -> None:
        check(
            size % self.size == 0,
            f"{what} is {size}, which {self.size} processes cannot share evenly. "
            f"Make it a multiple of {self.size}, or start another number of processes.",
        )

    def wrapped(self, model: nn.Module) -> nn.Module:
        return model if self.size == 1 else DistributedDataParallel(model)

    def wait(self) -> None:
        """Until all are here."""
        if self.size > 1:
            dist.barrier()

    def told(self, value: Value | None) -> Value:
        """What the first one says."""
        said = [value]
        if self.size > 1:
            dist.broadcast_object_list(said, src=0)
        assert said[0] is not None
        return said[0]

    def summed(self, value: Tensor) -> Tensor:
        if self.size > 1:
            value = value.detach().clone()
            dist.all_reduce(value)
        return value

    def average(self, tensors: list[Tensor]) -> None:
        """Each tensor becomes the mean of what all have, in place."""
        if self.size > 1:
            for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
                work.wait()
            torch._foreach_div_(tensors, self.size)

    def gathered(self, part: Tensor) -> Tensor:
        """The joint batch of which each has an equal part."""
        if self.size == 1:
            return part
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part.detach().contiguous())
        return torch.cat(parts)

    def joint(self, record: Any) -> Any:
        """The record of a step with the figures of the joint batch."""
        if self.size == 1 or not isinstance(record, StepRecord):
            return record
        rewards = None if record.rewards is None else self.gathered(record.rewards)
        return replace(record, weights=self.gathered(record.weights), rewards=rewards)

    def reseed(self, *parts: int) -> None:
        """Else all would drop out the same units."""
        if self.rank:
            torch.manual_seed(hash((*parts, self.rank)) % 2**62)


ALONE = Team()
