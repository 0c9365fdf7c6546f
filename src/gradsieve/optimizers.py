"""Appendix A.1, equations 8 to 17: the optimizer's own derivative g'.

The optimizer moves theta by g(x), x being the training gradient: theta_t = theta_{t-1} - g(x). By the chain rule
an example's reward is d_theta . g'(x) grad l_i, so the direction of Eq. 2 becomes v = g'(x) * d_theta,
coordinate by coordinate.
"""

import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from .parameters import Direction


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
        stacklevel=4,
    )
    return False


def optimizer_direction(
    optimizer: Optimizer,
    theta: Mapping[str, Tensor],
    theta_prev: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor | None],
    d_theta: Direction,
) -> dict[str, Tensor]:
    """V = g'(x) * d_theta after ``optimizer.step()``, for SGD, Adam and AdamW.

    Parameters that the optimizer does not move (not in a group, or without a gradient) are absent from v.

    Args:
        theta: the model's parameters, as the optimizer holds them.
        theta_prev: their values before the step; Adam's weight decay enters x through them.
        gradients: the training gradients that the optimizer used.
        d_theta: the dev gradient at theta_t.
    """
    groups: dict[int, dict[str, Any]] = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    direction = {}
    for name, parameter in theta.items():
        group, x = groups.get(id(parameter)), gradients.get(name)
        if group is None or x is None or name not in d_theta:
            continue
        derivative: float | Tensor
        if isinstance(optimizer, SGD):
            derivative = sgd_derivative(group["lr"], group["momentum"], group["dampening"], group["nesterov"])
        else:
            state = optimizer.state[parameter]
            if isinstance(optimizer, Adam) and not group.get("decoupled_weight_decay") and group["weight_decay"]:
                x = (-x if group["maximize"] else x) + group["weight_decay"] * theta_prev[name]
            derivative = adam_derivative(
                x, state["exp_avg_sq"], state["step"], group["lr"], group["betas"][1], group["eps"]
            )
        direction[name] = derivative * d_theta[name]
    return direction


def plain_direction(optimizer: Optimizer, theta: Mapping[str, Tensor], d_theta: Direction) -> dict[str, Tensor]:
    """V = d_theta, Eq. 2 as printed, for the parameters that the optimizer holds."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return {name: d_theta[name] for name, p in theta.items() if id(p) in held and name in d_theta}
