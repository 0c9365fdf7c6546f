"""What the baselines share: the contract of a method around a rule that weighs one minibatch."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..dev import DevBatches
from ..errors import GradsieveError
from ..forward import TrainingForward, training_forward
from ..parallel import Sizes, World
from ..parameters import LossFn, device_of, trainable
from ..randomness import RandomStream
from ..record import StepRecord


def quantile(losses: Tensor, share: float) -> Tensor:
    """The smallest loss that at least `share` of the batch do not exceed: one of the losses, never between two."""
    count = math.ceil(share * len(losses) - 1e-9)  # 0.56 * 25 is a little above 14
    return losses.sort().values[max(count, 1) - 1]


class Weighting(ABC):
    """A method whose weights are known once the training forward is done. Subclasses write `_weigh`."""

    sees_again = False
    """Whether `_weigh` measures rewards."""

    def __init__(self, model: nn.Module, loss_fn: LossFn):
        if not trainable(model):
            raise GradsieveError("the model has no parameter that requires a gradient.")
        self.model, self.loss_fn, self.world = model, loss_fn, World(model)
        self.steps = 0
        self._skipped = torch.zeros((), dtype=torch.long, device=device_of(model))
        self._weighed: StepRecord | None = None

    @abstractmethod
    def _weigh(self, forward: TrainingForward) -> StepRecord:
        """Weighs the batch of a training forward."""

    def loss(self, batch: Any) -> Tensor:
        """sum_i w_i l_i(theta_{t-1}): a scalar to call ``backward()`` on.

        Of several processes each returns its part of the sum times their number, as their mean makes the gradient.
        """
        losses, forward = training_forward(
            self.model, self.loss_fn, batch, who=type(self).__name__, again=self.sees_again, world=self.world
        )
        self._weighed = self._weigh(forward)
        return (self._weighed.weights * losses).sum() * self.world.size

    def step(self) -> StepRecord:
        """Ends the training step, after ``optimizer.step()``."""
        record, self._weighed = self._weighed, None
        if record is None:
            who = type(self).__name__
            raise GradsieveError(f"{who}.step() needs the batch of loss(): call loss() first, then step() once.")
        self.steps += 1
        self._skipped += ~torch.stack(list(record.finite.values())).all()
        return record

    def _jointly(self, rule: Callable[[Tensor], Tensor], own: Tensor, sizes: Sizes) -> Tensor:
        """Of the weights that a rule gives the examples of all processes, those of this one's."""
        return rule(self.world.gathered(own, sizes))[sizes.place]

    @property
    def skipped(self) -> int:
        """In how many steps something was not finite, so that weights were uniform. Reading it waits for the device."""
        return int(self._skipped)

    def _record(
        self,
        forward: TrainingForward,
        weights: Tensor,
        finite: dict[str, Tensor],
        *,
        rewards: Tensor | None = None,
        dev_loss: Tensor | None = None,
    ) -> StepRecord:
        """Of these weights; or of uniform ones if any part of the step was not finite."""
        good = self.world.agreed(torch.stack(list(finite.values())).all())
        weights = torch.where(good, weights, 1 / forward.sizes.total).detach()
        squares = self.world.summed(weights.square().sum())
        size = (1 / squares).nan_to_num(posinf=0.0)  # no weight at all is no sample at all
        return StepRecord(self.steps + 1, rewards, weights, size, dev_loss, finite)

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs besides model and optimizer. To be taken after `step()`."""
        return {"steps": self.steps, "skipped": self._skipped.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]
        self._skipped = state["skipped"].to(self._skipped.device).clone()
        self._weighed = None


class DevWeighting(Weighting):
    """A weighting that learns from dev batches, with random numbers of its own; the global ones are never touched."""

    def __init__(self, model: nn.Module, loss_fn: LossFn, dev_loader: Iterable[Any], seed: int | None):
        super().__init__(model, loss_fn)
        seed = self.world.told(torch.initial_seed() % 2**63 if seed is None else seed)
        self.stream = RandomStream(device_of(model), seed + self.world.rank)
        self.dev = DevBatches(dev_loader, self.stream)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "random": dict(self.stream.state), "dev": self.dev.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.stream.state = {device: value.cpu() for device, value in state["random"].items()}
        self.dev.load_state_dict(state["dev"])
