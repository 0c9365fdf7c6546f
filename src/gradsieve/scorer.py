"""Equations 3 and 6: from scores to weights, and from rewards to the gradient of psi.

p_i = softmax(s)_i over the minibatch            the weight of example i
psi climbs  E_{i ~ p} [ r_i grad log p_i ]       (6)
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam, Optimizer

from .errors import GradsieveError
from .parallel import ALONE, World
from .parameters import norm

MAX_LOGIT = 2.0
"""The default bound on scores, settled on digits without caution; not measured anew since."""

SCORER_LR = 3e-3

CAUTION, LESS_COMMON_CAUTION = 8.0, 2.0
"""The default price of uneven weights: of rewards as they are, and less what a batch has in common, which need
less of it; RESULTS.md, section "Caution", says how they were chosen."""

OUTLOOK_START, OUTLOOK_RATE, OUTLOOK_MEAN = 0.1, 0.01, 16
"""Where it begins, how fast a training step fades from it, and how many measurements it is a mean of at least."""
OUTLOOK_BEND = 0.03
"""How gently the price fades where the outlook is near 0."""

PSI_GRADIENTS = ("expectation", "algorithm1")


def bounded(scores: Tensor, max_logit: float | None) -> Tensor:
    """c tanh(s / c): no example is ever exp(2c) times as likely as another. The guard of clean data."""
    return scores if max_logit is None else max_logit * torch.tanh(scores / max_logit)


def example_weights(scores: Tensor, uniform_mix: float = 0.0) -> Tensor:
    """w = (1 - u) softmax(s) + u / B. Equal scores give exactly 1/B."""
    p = torch.softmax(scores, dim=0)  # (B,)
    return p + uniform_mix * (1 / len(scores) - p) if uniform_mix else p


def effective_sample_size(weights: Tensor) -> Tensor:
    """1 / sum w_i^2: B when all weigh the same, 1 when one example takes all."""
    return 1 / weights.square().sum()


def outlook(before: Tensor, rewards: Tensor, steps: int = 1) -> Tensor:
    """A running mean of ``mean_i r_i / sigma_r``: what a plain step still does for dev, beside how examples differ.

    `steps` is how many training steps went by since the rewards before these. Rare ones count no more for it than the
    16th part: one dev batch tells little, and the price follows what is told here.
    """
    now = rewards.mean() / rewards.std(correction=0).clamp_min(1e-30)
    rate = min(1 - (1 - OUTLOOK_RATE) ** steps, 1 / OUTLOOK_MEAN)
    return before.lerp(now.clamp(-1, 1).to(before), rate)


def price_of_uneven_weights(caution: float, outlook: Tensor, rewards: Tensor) -> Tensor:
    """c sigma_r softplus(outlook): c times the mean reward while plain training goes well, next to nothing when not.

    The reward is a first derivative: it does not see that the noise of a step grows with sum w^2, nor that a few dev
    examples are not all. While every example helps, that is a bad exchange. Once the mean reward is gone, because
    the model has learned what the data agree on and goes on to learn what they do not, it is a good one.
    """
    return caution * F.softplus(outlook, beta=1 / OUTLOOK_BEND) * rewards.std(correction=0)


def psi_objective(scores: Tensor, weights: Tensor, rewards: Tensor, form: str, price: Tensor | float = 0.0) -> Tensor:
    """What psi climbs; its gradient is d_psi. `rewards` are constants.

    - ``"expectation"``, Eq. 6 over the batch: ``sum_i r_i grad w_i``, which is ``sum_i p_i r_i grad log p_i`` as
      long as nothing is mixed in; the exact derivative of the dev loss through the weighted step.
    - ``"algorithm1"``, as printed there: ``1/B sum_i r_i grad log p_i``. The two agree while p is uniform.

    A `price` P subtracts ``P (B sum_i w_i^2 - 1)``. Without one psi goes to extremes for the least gain. With it the
    best weights are ``B w_i = 1 + (r_i - mean r) / 2P``, r_i as far as psi can foresee it: where scores tell little,
    weights stay close to 1/B.
    """
    r = rewards.detach()
    gain = (r * weights).sum() if form == "expectation" else (r * torch.log_softmax(scores, dim=0)).mean()
    return gain - price * (len(r) * weights.square().sum() - 1)


def climb(optimizer: Optimizer, objective: Tensor, good: Tensor, world: World = ALONE) -> Tensor:
    """Line 10 of Algorithm 1: psi takes a step up the objective if `good` and if its gradient is finite.

    Returns whether it was, without waiting for the device. A fused optimizer holds the step back on the device, by
    the protocol that torch's GradScaler uses; any other has to be asked from the host. Of several processes each
    brings the gradient of its own part of the objective.
    """
    psi = learned(optimizer)
    d_psi = torch.autograd.grad(-objective, psi, allow_unused=True)
    world.add_up([g for g in d_psi if g is not None])
    finite = norm({str(i): g for i, g in enumerate(d_psi) if g is not None}).isfinite()
    for parameter, gradient in zip(psi, d_psi, strict=True):
        if gradient is not None and gradient.stride() != parameter.stride():  # fused optimizers read raw memory
            gradient = torch.empty_like(parameter).copy_(gradient)
        parameter.grad = gradient
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.grad_scale, optimizer.found_inf = None, 1 - (good & finite).float()  # type: ignore[attr-defined]
        optimizer.step()
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
    elif bool(good & finite):
        optimizer.step()
    for parameter in psi:
        parameter.grad = None
    return finite


def learned(optimizer: Optimizer | None) -> list[Tensor]:
    """psi: what the scorer's optimizer holds and may change."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad] if optimizer else []


def default_optimizer(scorer: nn.Module) -> Optimizer | None:
    """Adam at SCORER_LR, or None for a scorer without parameters to learn."""
    psi = [p for p in scorer.parameters() if p.requires_grad]
    return Adam(psi, lr=SCORER_LR, fused=True) if psi else None


def checked_scores(scores: object, losses: Tensor) -> Tensor:
    """The scores in the losses' precision, if there is one per example."""
    if not isinstance(scores, Tensor) or scores.shape != losses.shape:
        found = f"shape {tuple(scores.shape)}" if isinstance(scores, Tensor) else type(scores).__name__
        hint = " Drop the last dimension with .squeeze(-1)." if found == f"shape {(len(losses), 1)}" else ""
        raise GradsieveError(
            f"the scorer must return one score per example, shape ({len(losses)},), but returned {found}.{hint}"
        )
    return scores.to(losses.dtype)
