"""One training step as DDS sees it, from the first loss() to step(): its micro-batches, their weights, theta before."""

import weakref
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .activations import Heard
from .forward import TrainingForward
from .joint import Joint
from .last_layer import Outline
from .learner import Scored
from .parallel import check_gradients_are_synchronised, local


@dataclass
class Turn:
    """What `loss()` leaves for `step()`."""

    joint: Joint
    theta: dict[str, nn.Parameter]
    theta_prev: dict[str, Tensor]
    """theta_{t-1}; empty if no rewards are to be measured."""
    forwards: list[TrainingForward] = field(default_factory=list)
    """One for each micro-batch."""
    scored: list[Scored] = field(default_factory=list)
    outlines: list[Outline | None] = field(default_factory=list)
    """By the last layer, if psi is to learn without what a batch has in common."""
    heard: list[Heard | None] = field(default_factory=list)
    """By all layers, if rewards come from activations."""
    backwarded: bool = False
    """Whether the backward of the latest micro-batch has run."""
    stepped: bool = False
    derivative: dict[str, float | Tensor] | None = None
    """g', set when the optimizer steps."""

    @property
    def learning(self) -> bool:
        return bool(self.theta_prev)

    def goes_on(self, model: nn.Module) -> bool:
        """Whether gradients of this very step are there already, so that a further micro-batch adds to them."""
        if self.stepped or not self.backwarded:
            return False
        if self.joint.world.sharded:
            check_gradients_are_synchronised(model)
        return any(p.grad is not None for p in model.parameters())

    def add(
        self, model: nn.Module, forward: TrainingForward, scored: Scored, outline: Outline | None, heard: Heard | None
    ) -> Tensor:
        """The weights of a further micro-batch, (b,); gradients of those before it are scaled down to theirs."""
        factor = self.joint.join(scored.logits, forward.sizes)
        if factor is not None:
            torch._foreach_mul_([local(p.grad) for p in model.parameters() if p.grad is not None], factor)
        self.forwards.append(forward)
        self.scored.append(scored)
        self.outlines.append(outline)
        self.heard.append(heard)
        self.backwarded = False
        return self.joint.own_weights()[-1]

    def listen(self, loss: Tensor) -> None:
        """For its backward. The user may keep the loss; that shall not keep the turn."""
        me = weakref.ref(self)

        def hook(_: Tensor) -> None:
            if (turn := me()) is not None:
                turn.backwarded = True

        loss.register_hook(hook)

    def weights(self) -> Tensor:
        """Of all micro-batches, (B,)."""
        return torch.cat(self.joint.own_weights())

    def finite(self) -> dict[str, Tensor]:
        return {
            "loss": torch.stack([forward.losses.isfinite().all() for forward in self.forwards]).all(),
            "score": torch.stack([part.finite for part in self.scored]).all(),
        }
