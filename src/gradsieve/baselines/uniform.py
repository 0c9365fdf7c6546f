"""Plain training: every example weighs the same."""

from typing import Any

from torch import Tensor, nn

from ..parameters import LossFn, checked_losses


class Uniform:
    """The mean of the losses, under the contract of a method: ``loss(batch)``, ``step()``, state."""

    def __init__(self, model: nn.Module, loss_fn: LossFn):
        self.model, self.loss_fn = model, loss_fn

    def loss(self, batch: Any) -> Tensor:
        return checked_losses(self.loss_fn(self.model, batch), batch).mean()

    def step(self) -> None:
        return None

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass
