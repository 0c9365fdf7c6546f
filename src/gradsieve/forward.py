"""The training forward, kept so that the reward pass can see it again: same dropout masks, buffers, modes."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .errors import check
from .parallel import Sizes, World, reshard, unwrapped
from .parameters import Direction, LossFn, Modes, checked_losses, device_of, full_precision, modes_of, snapshot
from .randomness import RandomState, random_state
from .reward import EPSILON, Theta, rewards


@dataclass(frozen=True)
class TrainingForward:
    """One pass over a training batch at theta_{t-1}."""

    model: nn.Module
    """The user's own, inside of DistributedDataParallel."""
    world: World
    loss_fn: LossFn
    batch: Any
    losses: Tensor
    """l_i(theta_{t-1}), (B,), free of any graph."""
    sizes: Sizes
    """Of the batches of all processes."""
    state: RandomState
    """Before the pass."""
    buffers: dict[str, Tensor]
    """Before the pass; empty if nobody is going to see it again."""
    modes: Modes
    """In the pass; empty likewise."""
    autocast: torch.dtype | None

    def rewards(
        self,
        direction: Direction,
        *,
        estimator: str,
        cosine: bool = False,
        theta: Theta | None = None,
        epsilon: float = EPSILON,
    ) -> Tensor:
        """v . grad l_i at `theta`, which must be theta_{t-1}; by default the present parameters, (B,)."""
        return rewards(
            self.model,
            self.loss_fn,
            self.batch if self.autocast is None else full_precision(self.batch),
            direction,
            estimator=estimator,
            cosine=cosine,
            theta=theta,
            # Losses in reduced precision are no base for a small difference.
            losses=self.losses if self.autocast is None else None,
            state=self.state,
            buffers=self.buffers,
            modes=self.modes,
            epsilon=epsilon,
            world=self.world,
        ).detach()


def training_forward(
    model: nn.Module, loss_fn: LossFn, batch: Any, *, who: str, again: bool, world: World
) -> tuple[Tensor, TrainingForward]:
    """The losses with their graph, (B,), and the pass without it; `again` if the reward pass is to see it."""
    check(torch.is_grad_enabled(), f"{who}.loss() must run with gradients enabled; it is called under no_grad.")
    own, device = unwrapped(model), device_of(model)
    state = random_state(device)
    buffers, modes = (snapshot(dict(own.named_buffers())), modes_of(own)) if again else ({}, ())
    losses = checked_losses(loss_fn(model, batch), batch)  # (B,)
    if world.sharded:  # FSDP2 leaves the root's parameters whole after the pass
        reshard(own)
    check(losses.requires_grad, "the losses carry no gradient; loss_fn must not detach or run under no_grad.")
    autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    sizes = world.sizes(len(losses))
    check(sizes.total > 0, f"{who}.loss() was given an empty batch. Leave such batches out.")
    seen = TrainingForward(own, world, loss_fn, batch, losses.detach(), sizes, state, buffers, modes, autocast)
    return losses, seen
