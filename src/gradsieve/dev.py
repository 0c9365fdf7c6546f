"""The dev set: its gradient, and its batches without end, from any loader, with a position that can be saved."""

from collections.abc import Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from .errors import GradsieveError
from .parallel import ALONE, World, local
from .parameters import LossFn, Modes, checked_losses, to_device, untouched
from .randomness import RandomState, RandomStream, random_state

DEV_MODES = ("eval", "train")


def dev_gradient(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    theta: dict[str, nn.Parameter],
    *,
    mode: str,
    modes: Modes = (),
    autocast: torch.dtype | None = None,
    world: World = ALONE,
) -> tuple[Tensor, dict[str, Tensor]]:
    """J(theta_t, dev batch) and its gradient d_theta, line 7 of Algorithm 1. ``.grad`` is not involved.

    `mode` is ``"train"``, every module in the mode that it trains in, noted in `modes` or else its present one, or
    ``"eval"``: BatchNorm's running statistics, no dropout. `autocast` is the training forward's precision; float16,
    whose gradients underflow without a GradScaler, is not followed. Of several processes each has a dev batch of its
    own, and J is the mean over all of them.
    """
    device = next(iter(theta.values())).device
    low = torch.autocast(device.type, torch.bfloat16, autocast == torch.bfloat16, cache_enabled=False)
    with untouched(model, training=False if mode == "eval" else None, modes=modes), torch.enable_grad():
        with low, _batchnorm_errors():
            losses = checked_losses(loss_fn(model, batch), batch, "loss_fn on a dev batch")
        dev_loss = losses.mean() * (len(losses) / world.sizes(len(losses)).total)
        d_theta = _of_shards(dev_loss, theta, world) if world.sharded else _of_copies(dev_loss, theta, world)
    return world.summed(dev_loss), d_theta


def _of_copies(dev_loss: Tensor, theta: dict[str, nn.Parameter], world: World) -> dict[str, Tensor]:
    found: Sequence[Tensor | None] = torch.autograd.grad(dev_loss, list(theta.values()), allow_unused=True)
    d_theta = {}
    for (name, p), g in zip(theta.items(), found, strict=True):
        if g is not None:
            d_theta[name] = g.to_dense() if g.is_sparse else g
        elif world.size > 1:  # another process may have used it
            d_theta[name] = torch.zeros_like(p)
    world.add_up(list(d_theta.values()))
    return d_theta


def _of_shards(dev_loss: Tensor, theta: dict[str, nn.Parameter], world: World) -> dict[str, Tensor]:
    """FSDP2 leaves gradients, meaned over the processes, in ``.grad`` only; what was there is put back."""
    own = {name: p.grad for name, p in theta.items()}
    for p in theta.values():
        p.grad = None
    (dev_loss * world.size).backward()
    d_theta = {name: local(p.grad) for name, p in theta.items() if p.grad is not None}
    for name, p in theta.items():
        p.grad = own[name]
    return d_theta


@contextmanager
def _batchnorm_errors() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        if "Expected more than 1 value per channel" not in str(error):
            raise
        raise GradsieveError(
            "a dev batch of one example has no BatchNorm statistics of its own. "
            "Make the dev loader with drop_last=True or another batch size, or pass dev_mode='eval'."
        ) from error


class DevBatches:
    """Draws from `loader` pass after pass. Shuffling uses `stream`, or the loader's own generator if it has one; a
    DistributedSampler is told the number of each pass.

    A loader with a state of its own, such as torchdata's StatefulDataLoader, is resumed by it; of any other the saved
    pass is begun anew and what had been drawn of it is skipped.
    """

    def __init__(self, loader: Iterable[Any], stream: RandomStream):
        if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
            raise GradsieveError(f"dev_loader must be a re-iterable of batches, not {type(loader).__name__}.")
        if isinstance(loader, Iterator):
            raise GradsieveError(
                "dev_loader can be iterated only once (it is an iterator or generator). "
                "Pass the DataLoader itself, or a list of batches."
            )
        with suppress(TypeError):  # a loader of an unsized data set has a length that fails; draw() will see
            if isinstance(loader, Sized) and len(loader) == 0:
                raise GradsieveError(_EMPTY)
        self.loader = loader
        self.stream = stream
        self._batches: Iterator[Any] | None = None
        self._passes = self._drawn = 0
        self._start: tuple[RandomState, list[torch.Tensor]] = (stream.state, [])

    def draw(self) -> Any:
        """The next batch, on the stream's device."""
        with self.stream:
            batch = next(self._batches, _END) if self._batches is not None else _END
            if batch is _END:
                self._begin()
                assert self._batches is not None
                batch = next(self._batches, _END)
            if batch is _END:
                raise GradsieveError(_EMPTY)
            self._drawn += 1
            return to_device(batch, self.stream.device)

    def _begin(self) -> None:
        self._start = (random_state(self.stream.device), [g.get_state() for g in self._generators()])
        for owner in self._owners():
            if hasattr(owner, "set_epoch"):
                owner.set_epoch(self._passes)
        self._batches, self._drawn = iter(self.loader), 0
        self._passes += 1

    def _owners(self) -> tuple[Any, ...]:
        """Of the loader's order."""
        batch_sampler = getattr(self.loader, "batch_sampler", None)
        inner = (getattr(self.loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
        return (self.loader, *inner)

    def _generators(self) -> list[torch.Generator]:
        """Those that the loader shuffles with, each once."""
        found = [getattr(owner, "generator", None) for owner in self._owners()]
        return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())

    def state_dict(self) -> dict[str, Any]:
        now = {"begun": self._batches is not None, "passes": self._passes}
        with suppress(AttributeError):  # accelerate's loaders have the method, but not always a state
            return {**now, "loader": self.loader.state_dict()}  # type: ignore[attr-defined]
        return {**now, "drawn": self._drawn, "start": self._start[0], "generators": self._start[1]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._batches, self._drawn = None, 0
        self._passes = max(0, state.get("passes", 0) - 1)  # the pass that goes on is begun anew
        if "loader" in state:
            try:
                self.loader.load_state_dict(state["loader"])  # type: ignore[attr-defined]
            except AttributeError as error:
                raise GradsieveError(
                    "the saved dev_loader had a state of its own, and this one takes none. "
                    "Resume with a loader that is made in the same way."
                ) from error
            return
        if not state["begun"]:
            return
        generators = self._generators()
        if len(generators) != len(state["generators"]):
            raise GradsieveError(
                f"the saved dev_loader shuffled with {len(state['generators'])} generators of its own, this one with "
                f"{len(generators)}. Resume with a loader that is made in the same way."
            )
        own = self.stream.state
        self.stream.state = {device: value.cpu() for device, value in state["start"].items()}
        for generator, saved in zip(generators, state["generators"], strict=True):
            generator.set_state(saved.cpu())
        for _ in range(state["drawn"]):
            self.draw()
        self.stream.state = own


_END = object()
_EMPTY = "dev_loader is empty: it must give at least one batch. Check the dev set and drop_last."
