"""What is examined: copies of the user's objects, as DDS would use them."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..dev import dev_gradient
from ..optimizers import is_known, no_derivative, optimizer_derivative
from ..parameters import (
    Direction,
    LossFn,
    checked_losses,
    device_of,
    full_precision,
    snapshot,
    to_device,
    trainable,
)
from ..randomness import RandomState, random_state
from ..reward import rewards
from ..reweight import DDS
from .copies import duplicates, muted

DEFAULTS = {name: p.default for name, p in signature(DDS).parameters.items() if p.kind is Parameter.KEYWORD_ONLY}
"""Of the settings of `DDS`."""
PLAIN_STEPS = 3
"""Taken before rewards are measured: Adam's g' at its very first step is that of no other."""


@dataclass(frozen=True)
class Point:
    """A training step as the reward pass sees it: Eq. 2 between theta_{t-1} and theta_t."""

    model: nn.Module
    """At theta_t."""
    theta_prev: dict[str, Tensor]
    buffers: dict[str, Tensor]
    state: RandomState
    losses: Tensor  # (B,), at theta_{t-1}
    derivative: Mapping[str, float | Tensor]


class Case:
    """No check changes what another one sees, but for the trial, which comes last.

    Args:
        model, scorer, optimizer, train_batch, dev_batch: copies.
        settings: further arguments of `DDS`.
        autocast: the precision that training opens around the forward pass; None for none.
    """

    def __init__(
        self,
        model: nn.Module,
        scorer: nn.Module | None,
        loss_fn: LossFn,
        optimizer: Optimizer,
        train_batch: Any,
        dev_batch: Any,
        settings: Mapping[str, Any],
        autocast: torch.dtype | None,
    ):
        self.loss_fn, self.autocast, self.device = loss_fn, autocast, device_of(model)
        self.train_batch, self.dev_batch = train_batch, to_device(dev_batch, self.device)
        self.settings = {**DEFAULTS, **settings}
        loader, own = [self.dev_batch], {"seed": 0, **settings}
        with muted():  # an unknown optimizer is found by the check of it
            dds = DDS(model, scorer, loss_fn, optimizer, loader, **own)
            often = {**own, "scorer_optimizer": dds.scorer_optimizer}
            often |= {"update_every": 1, "replay": 0}  # rewards at every step, weights that need not prove their worth
            if own.get("overhead") is not None:
                often |= {"overhead": None, "alignment": "full" if dds.last_layer is None else "last_layer"}
            self.dds = DDS(model, dds.scorer, loss_fn, optimizer, loader, **often)
            self.known = is_known(optimizer)
        self.still = not started(self.dds.optimizer)

    @property
    def model(self) -> nn.Module:
        return self.dds.model

    def low(self) -> AbstractContextManager[Any]:
        """The training forward's precision."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, self.autocast, cache_enabled=False)

    def losses(self, model: nn.Module, batch: Any) -> Tensor:
        with self.low():
            return checked_losses(self.loss_fn(model, batch), batch)

    @cached_property
    def point(self) -> Point:
        """After a few plain steps on another copy."""
        model, optimizer = duplicates((self.model, self.dds.optimizer))
        theta = trainable(model)
        for _ in range(PLAIN_STEPS):
            state, buffers = random_state(self.device), snapshot(dict(model.named_buffers()))
            theta_prev = snapshot(theta)
            losses = self.losses(model, self.train_batch)
            plain_step(optimizer, losses.mean())
        aware = self.settings["optimizer_aware"] and self.known
        derivative = optimizer_derivative(optimizer, theta, theta_prev) if aware else no_derivative(optimizer, theta)
        return Point(model, theta_prev, buffers, state, losses.detach(), derivative)

    def dev_gradient(
        self, model: nn.Module, rows: Tensor | None = None, mode: str | None = None, batch: Any = None
    ) -> dict[str, Tensor]:
        """d_theta over some examples of the dev batch, by default all of them."""
        batch = self.dev_batch if batch is None else batch

        def loss_fn(model: nn.Module, _: Any) -> Tensor:
            losses = checked_losses(self.loss_fn(model, batch), batch, "loss_fn on a dev batch")
            return losses if rows is None else losses[rows]

        mode = mode or self.settings["dev_mode"]
        return dev_gradient(model, loss_fn, None, trainable(model), mode=mode, autocast=self.autocast)[1]

    def direction(self, rows: Tensor | None = None) -> dict[str, Tensor]:
        """V of Eq. 2, g' times the dev gradient at theta_t, from some of the dev examples."""
        d_theta = self.dev_gradient(self.point.model, rows)
        return {name: g * d_theta[name] for name, g in self.point.derivative.items() if name in d_theta}

    @cached_property
    def estimator(self) -> str:
        """The one that DDS uses; where it fails here, which is a finding of its own, another to go on with."""
        direction = self.direction()
        for estimator in (self.settings["reward"], "jvp", "finite_difference"):
            with suppress(Exception):
                self.rewards(direction, estimator=estimator, rows=slice(0, 1))
                return estimator
        return "per_example"

    def rewards(
        self,
        direction: Direction,
        *,
        estimator: str | None = None,
        rows: slice = slice(None),
        state: RandomState | None = None,
    ) -> Tensor:
        """r_i at theta_{t-1} for some of the training examples, by default all, as DDS would measure them."""
        point, batch = self.point, self.train_batch if self.autocast is None else full_precision(self.train_batch)
        return rewards(
            point.model,
            lambda model, _: checked_losses(self.loss_fn(model, batch), batch)[rows],
            None,
            direction,
            estimator=estimator or self.estimator,
            theta=point.theta_prev,
            state=state or point.state,
            buffers=point.buffers,
            epsilon=self.settings["epsilon"],
        ).detach()


def started(optimizer: Optimizer) -> bool:
    """Gives a learning rate that a schedule holds at 0 for the moment its later value. Whether there is one now."""
    for group in optimizer.param_groups:
        if group["lr"] == 0:
            group["lr"] = group.get("initial_lr", 0)
    return any(bool(group["lr"] != 0) for group in optimizer.param_groups)


def plain_step(optimizer: Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
