"""Equations 2 and 7: how well each example's gradient agrees with a direction.

    r_i = grad l_i(theta_{t-1}) . v            (2), v: the dev gradient at theta_t, or g' of it (optimizers.py)

Three estimators of the same numbers; `theta` is theta_{t-1} throughout, `direction` is v.

=====================  ==============================  ==========================================
estimator              what it costs                   what it needs
=====================  ==============================  ==========================================
``finite_difference``  one forward pass                parameters in float32 or wider; any module
``jvp``                one forward-mode pass           operators with forward-mode derivatives
``per_example``        one backward pass per example   nothing: the slow oracle
=====================  ==============================  ==========================================

Under BatchNorm in training mode `l_i` depends on the whole batch through its statistics. All three
differentiate through them: the gradient is that of `l_i` as the training forward computed it, not of an
example on its own.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call

from .errors import GradsieveError
from .kernels import forward_mode_errors, full_precision_only, plain_kernels
from .parallel import ALONE, World
from .parameters import Direction, LossFn, Modes, checked_losses, device_of, lent, moved, norm, trainable, untouched
from .randomness import RandomState, random_state, replayed

Theta = Mapping[str, Tensor]

EPSILON = 1e-3
"""Length of the step along v in finite differences: eps = EPSILON / ||v||."""


def finite_difference(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    direction: Direction,
    *,
    theta: Theta,
    losses: Tensor | None = None,
    epsilon: float = EPSILON,
    world: World = ALONE,
) -> Tensor:
    """Eq. 7: r_i = (l_i(theta + eps v) - l_i(theta)) / eps, with eps = epsilon / ||v||.

    `losses` are l_i(theta) if somebody has them already: the training forward does.
    """
    narrow = next((f"{name} is {v.dtype}" for name, v in theta.items() if torch.finfo(v.dtype).bits < 32), None)
    if narrow:
        raise GradsieveError(
            f"estimator 'finite_difference' needs parameters in float32 or wider, but {narrow}: "
            "a small step would be rounded away. Use estimator 'jvp', or keep the parameters in float32 under autocast."
        )
    eps = step_along(direction, epsilon, world)
    state = random_state(device_of(model))

    def losses_at(values: Theta) -> Tensor:
        with lent(model, values), torch.no_grad(), replayed(device_of(model), state), full_precision_only(model):
            return checked_losses(loss_fn(model, batch), batch)

    base = losses_at(theta) if losses is None else losses
    return (losses_at({**theta, **moved(theta, direction, eps)}) - base) / eps


def step_along(direction: Direction, epsilon: float = EPSILON, world: World = ALONE) -> Tensor:
    """eps = epsilon / ||v||: a step of eps v is epsilon long."""
    length = norm(direction, world)
    return epsilon / length.clamp_min(torch.finfo(length.dtype).tiny)


def jvp(model: nn.Module, loss_fn: LossFn, batch: Any, direction: Direction, *, theta: Theta) -> Tensor:
    """r_i exactly, by forward-mode differentiation of all losses along v."""
    with forward_ad.dual_level(), plain_kernels(model), forward_mode_errors():
        with warnings.catch_warnings():  # torch's own: its first dual tensor calls the deprecated torch.jit.script
            warnings.simplefilter("ignore", DeprecationWarning)
            duals = {n: forward_ad.make_dual(theta[n].detach(), v.to(theta[n].dtype)) for n, v in direction.items()}
        with torch.no_grad():
            losses = checked_losses(_losses_with(model, loss_fn, batch, {**theta, **duals}), batch)
        primal, tangent = forward_ad.unpack_dual(losses)
    return torch.zeros_like(primal) if tangent is None else tangent


def per_example(
    model: nn.Module, loss_fn: LossFn, batch: Any, direction: Direction, *, theta: Theta, cosine: bool = False
) -> Tensor:
    """r_i to the letter: the gradient of each l_i by a backward pass of its own, then the dot product with v.

    `cosine` divides by ||grad l_i|| ||v||, as the paper does for translation.
    """
    leaves = {name: value.detach().requires_grad_() for name, value in theta.items()}
    with torch.enable_grad():
        losses = checked_losses(_losses_with(model, loss_fn, batch, leaves), batch)
    rewards = []
    for loss in losses:
        found = torch.autograd.grad(loss, list(leaves.values()), retain_graph=True, allow_unused=True)
        gradient = {name: g for name, g in zip(leaves, found, strict=True) if g is not None}
        r = sum((torch.sum(gradient[n] * v) for n, v in direction.items() if n in gradient), loss.new_zeros(()))
        rewards.append(r / (norm(gradient) * norm(direction)).clamp_min(1e-30) if cosine else r)
    return torch.stack(rewards).detach()


ESTIMATORS = ("finite_difference", "jvp", "per_example")


def rewards(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    direction: Direction,
    *,
    estimator: str,
    cosine: bool = False,
    theta: Theta | None = None,
    losses: Tensor | None = None,
    state: RandomState | None = None,
    buffers: Mapping[str, Tensor] | None = None,
    modes: Modes = (),
    epsilon: float = EPSILON,
    world: World = ALONE,
) -> Tensor:
    """`alignment` at the parameters, losses, random state, buffers and modes of an earlier forward pass.

    The rules of the reward pass hold here: parameters, ``.grad``, buffers, modes and the global random state
    are left as they were; dropout masks are those of `state`; everything runs in full precision even under autocast.
    """
    device = device_of(model)
    theta = trainable(model) if theta is None else theta
    direction = {name: v for name, v in direction.items() if name in theta}  # some may have been frozen since
    state = random_state(device) if state is None else state
    with replayed(device, state), untouched(model, buffers=buffers, modes=modes):
        with torch.autocast(device.type, enabled=False, cache_enabled=False):
            if estimator == "finite_difference":
                return finite_difference(
                    model, loss_fn, batch, direction, theta=theta, losses=losses, epsilon=epsilon, world=world
                )
            if estimator == "jvp":
                return jvp(model, loss_fn, batch, direction, theta=theta)
            return per_example(model, loss_fn, batch, direction, theta=theta, cosine=cosine)


def alignment(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    direction: Direction,
    *,
    estimator: str = "jvp",
    cosine: bool = False,
    epsilon: float = EPSILON,
) -> Tensor:
    """`direction . grad l_i` at the model's present parameters, for every example of the batch: ``(B,)``.

    Args:
        model: any module; only its parameters that require gradients count.
        loss_fn: ``loss_fn(model, batch) -> (B,)``.
        direction: parameter name -> tensor, v of Eq. 7. Names that are absent count as zero.
        estimator: ``"jvp"`` (exact), ``"finite_difference"`` (cheapest) or ``"per_example"`` (the slow oracle).
        cosine: divide by both norms; the gradients must be explicit, so only with ``"per_example"``.
        epsilon: length of the finite-difference step in parameter space.

    The model is left exactly as it was, BatchNorm statistics and random state included.
    """
    check_estimator(estimator, cosine)
    parameters = trainable(model)
    for name, v in direction.items():
        if name not in parameters:
            raise GradsieveError(f"direction names {name!r}, which is no trainable parameter of the model.")
        if v.shape != parameters[name].shape:
            raise GradsieveError(
                f"direction[{name!r}] has shape {tuple(v.shape)}, the parameter {tuple(parameters[name].shape)}."
            )
    return rewards(model, loss_fn, batch, direction, estimator=estimator, cosine=cosine, epsilon=epsilon)


def check_estimator(estimator: str, cosine: bool) -> None:
    if estimator not in ESTIMATORS:
        raise GradsieveError(f"unknown reward estimator {estimator!r}; choose one of {', '.join(ESTIMATORS)}.")
    if cosine and estimator != "per_example":
        raise GradsieveError(
            f"cosine needs each example's gradient, which estimator {estimator!r} never forms; use 'per_example'."
        )


class _Losses(nn.Module):
    """`loss_fn` as a module, so that `functional_call` can exchange the model's tensors wherever they are used."""

    def __init__(self, model: nn.Module, loss_fn: LossFn):
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn

    def forward(self, batch: Any) -> Tensor:
        return self.loss_fn(self.model, batch)


def _losses_with(model: nn.Module, loss_fn: LossFn, batch: Any, values: Theta) -> Tensor:
    return functional_call(_Losses(model, loss_fn), {f"model.{n}": v for n, v in values.items()}, (batch,))
