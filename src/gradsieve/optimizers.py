"""Appendix A.1, equations 8 to 17: the optimizer's own derivative g'.

The optimizer moves theta by g(x), x being the training gradient: theta_t = theta_{t-1} - g(x). By the chain rule
an example's reward is d_theta . g'(x) grad l_i, so the direction of Eq. 2 becomes v = g'(x) * d_theta,
coordinate by coordinate.
"""

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from .parallel import local


def sgd_derivative(
    lr: float | Tensor, momentum: float = 0.0, dampening: float = 0.0, nesterov: bool = False
) -> float | Tensor:
    """Eq. 11 and 14: g'(x) = lr, whatever the momentum; Nesterov's look-ahead adds momentum * lr.

    Torch's dampening scales every gradient but the very first; here it scales all of them.
    """
    taken = 1 - dampening if momentum else 1.0
    return lr * (1 + momentum * taken) if nesterov else lr * taken


def adam_derivative(
    x: Tensor, v_t: Tensor, step: Tensor | int, lr: float | Tensor, beta2: float, epsilon: float
) -> Tensor:
    """Eq. 17, exact, not its approximation.

    g'(x) = lr sqrt(1 - beta2^t) (beta2 v_{t-1} + eps) / (beta2 v_{t-1} + (1 - beta2) x^2 + eps)^{3/2}

    Args:
        x: the gradient that the optimizer used.
        v_t: its second moment after the step, beta2 v_{t-1} + (1 - beta2) x^2.
        step: t, counted from 1.
    """
    decayed = (v_t - (1 - beta2) * x.square()).clamp_min(0)  # beta2 v_{t-1}
    correction = (1 - beta2**step) ** 0.5
    return lr * correction * (decayed + epsilon) / (v_t + epsilon) ** 1.5


def is_known(optimizer: Optimizer) -> bool:
    """Whether g' is known: SGD (momentum, Nesterov), Adam and AdamW. Warns if not."""
    amsgrad = any(group.get("amsgrad") for group in optimizer.param_groups)
    if type(optimizer) in (SGD, Adam, AdamW) and not amsgrad:
        return True
    warnings.warn(
        f"gradsieve does not know the derivative g' of {type(optimizer).__name__}{' with amsgrad' if amsgrad else ''}: "
        "rewards use the plain dev gradient. Pass optimizer_aware=False to say that this is what you want.",
        stacklevel=3,
    )
    return False


def optimizer_derivative(
    optimizer: Optimizer, theta: Mapping[str, Tensor], theta_prev: Mapping[str, Tensor]
) -> dict[str, float | Tensor]:
    """g'(x) by parameter name, for SGD, Adam and AdamW; to be called as ``optimizer.step()`` ends.

    A parameter that the optimizer does not move (not in a group, or without a gradient) is absent: its g' is zero.

    Args:
        theta: the model's parameters, as the optimizer holds them, with their gradients x.
        theta_prev: their values before the step; Adam's weight decay enters x through them.
    """
    derivative: dict[str, float | Tensor] = {}
    for name, group, parameter in _held(optimizer, theta):
        x = parameter.grad
        if x is None:
            continue
        x = local(x)
        if isinstance(optimizer, SGD):
            derivative[name] = sgd_derivative(group["lr"], group["momentum"], group["dampening"], group["nesterov"])
            continue
        decoupled = isinstance(optimizer, AdamW) or group.get("decoupled_weight_decay")
        if group["weight_decay"] and not decoupled:
            x = (-x if group["maximize"] else x) + group["weight_decay"] * theta_prev[name]
        state = optimizer.state[parameter]
        v_t, t = local(state["exp_avg_sq"]), local(state["step"])
        derivative[name] = adam_derivative(x, v_t, t, group["lr"], group["betas"][1], group["eps"])
    return derivative


def no_derivative(optimizer: Optimizer, theta: Mapping[str, Tensor]) -> dict[str, float | Tensor]:
    """G' = 1, Eq. 2 as printed, for the parameters that the optimizer holds."""
    return {name: 1.0 for name, _, _ in _held(optimizer, theta)}


def load_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """``optimizer.load_state_dict``, with moments laid out in memory as their parameters are.

    Fused optimizers read both as raw memory, and a file may have lost the layout (channels last).
    """
    optimizer.load_state_dict(state)
    for parameter, moments in optimizer.state.items():
        for name, value in moments.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                moments[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


Owner = TypeVar("Owner")


def after_each_step(optimizer: Optimizer, owner: Owner, callback: Callable[[Owner], None]) -> None:
    """Calls ``callback(owner)`` as every ``optimizer.step()`` ends, for as long as the owner lives."""
    alive = weakref.ref(owner)  # or the user's optimizer would keep the owner, and its tensors, for ever

    def hook(*_: Any) -> None:
        if (found := alive()) is not None:
            callback(found)

    weakref.finalize(owner, optimizer.register_step_post_hook(hook).remove)


def _held(optimizer: Optimizer, theta: Mapping[str, Tensor]) -> Iterator[tuple[str, dict[str, Any], Tensor]]:
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in theta.items():
        if id(parameter) in groups:
            yield name, groups[id(parameter)], parameter
