"""Learning to reweight examples (Ren et al., ICML 2018): every minibatch is weighted anew by a dev batch.

Their lookahead takes one SGD step on the losses weighted by eps and asks how the dev loss changes with each eps_i
at eps = 0:

    u_i = -d/d eps_i J(theta_t - alpha grad sum_j eps_j l_j(theta_t), dev) = alpha grad l_i . grad J(theta_t, dev)

At eps = 0 the lookahead leaves theta where it is, so u is the reward of Eq. 2 with both gradients at the same theta. It
needs no second derivative: one dev gradient and one more forward pass. alpha cancels in the weights.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..dev import DEV_MODES, dev_gradient
from ..errors import GradsieveError
from ..forward import TrainingForward
from ..parameters import LossFn, norm, trainable
from ..record import StepRecord
from ..reward import EPSILON, check_estimator
from .base import DevWeighting


def rectified_weights(r: Tensor) -> Tensor:
    """w_i = max(0, r_i) / sum_j max(0, r_j), (B,); all zero if no r_i is positive."""
    u = r.clamp_min(0)
    total = u.sum()
    return u / torch.where(total > 0, total, 1)


class BatchWeight(DevWeighting):
    """Weighs each example by how far its gradient agrees with the dev gradient; nothing outlives the minibatch.

    Args:
        model: what is trained, theta.
        loss_fn: ``loss_fn(model, batch) -> (B,)``, one loss per example.
        dev_loader: any re-iterable of batches; drawn from without end and moved to the model's device.
        reward: ``"finite_difference"``, ``"jvp"`` or ``"per_example"``; see reward.py.
        dev_mode: how modules run on the dev batch, ``"train"`` or ``"eval"``; see dev.py.
        epsilon: length of the finite-difference step.
        seed: of dev shuffling and of dropout in the dev pass; by default torch's initial seed.

    The dev pass happens inside `loss()`, while the training graph waits for its backward: memory peaks at both graphs.
    """

    sees_again = True

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        dev_loader: Iterable[Any],
        *,
        reward: str = "finite_difference",
        dev_mode: str = "train",
        epsilon: float = EPSILON,
        seed: int | None = None,
    ):
        check_estimator(reward, cosine=False)
        if dev_mode not in DEV_MODES:
            raise GradsieveError(f"dev_mode must be one of {DEV_MODES}, not {dev_mode!r}.")
        if not epsilon > 0:
            raise GradsieveError(f"epsilon must be above 0, not {epsilon}.")
        super().__init__(model, loss_fn, dev_loader, seed)
        self.reward, self.dev_mode, self.epsilon = reward, dev_mode, epsilon

    def _weigh(self, forward: TrainingForward) -> StepRecord:
        dev_batch = self.dev.draw()
        with self.stream:
            dev_loss, d_theta = dev_gradient(
                forward.model,
                self.loss_fn,
                dev_batch,
                trainable(forward.model),
                mode=self.dev_mode,
                autocast=forward.autocast,
                world=self.world,
            )
        r = forward.rewards(d_theta, estimator=self.reward, epsilon=self.epsilon)
        finite = {
            "loss": forward.losses.isfinite().all(),
            "dev gradient": norm(d_theta).isfinite() & dev_loss.isfinite(),
            "reward": r.isfinite().all(),
        }
        return self._record(
            forward, self._jointly(rectified_weights, r, forward.sizes), finite, rewards=r, dev_loss=dev_loss
        )
