"""Self-paced curriculum learning (Jiang et al., AAAI 2015): easy examples first, then all of them.

    min over v of  sum_i v_i l_i - lambda_t sum_i v_i,  v_i in {0, 1}      the binary self-paced regularizer
    v_i = 1[l_i <= lambda_t]                                               its solution

The curriculum region of the paper is empty here: no prior knowledge orders the examples.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..errors import GradsieveError
from ..forward import TrainingForward
from ..parameters import LossFn
from ..record import StepRecord
from .base import Weighting, quantile


def pace(step: int, full_at: int, start: float) -> float:
    """q_t, the share of the batch that takes part: `start` at step 0, then linearly up to 1 at step `full_at`."""
    return 1 - (1 - start) * max(0.0, 1 - step / full_at)


def self_paced_weights(losses: Tensor, share: float) -> Tensor:
    """v_i / sum_j v_j, where the age lambda_t is the `share`-quantile (q_t) of the minibatch's own losses, (B,)."""
    v = (losses <= quantile(losses, share)).to(losses.dtype)
    return v / v.sum()


class SPCL(Weighting):
    """Trains on the examples of each minibatch that the model finds easiest, on ever more of them.

    Args:
        model: what is trained, theta.
        loss_fn: ``loss_fn(model, batch) -> (B,)``, one loss per example.
        full_at: the step from which on every example takes part.
        start: the share that does at first.
        difficulty: ``difficulty(batch, losses) -> (B,)``, what is easy; by default the losses themselves.

    Needs no dev set and costs nothing beyond plain training.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        *,
        full_at: int,
        start: float = 0.5,
        difficulty: Callable[[Any, Tensor], Tensor] = lambda batch, losses: losses,
    ):
        if full_at < 1:
            raise GradsieveError(f"full_at, the step that first uses every example, must be 1 or more, not {full_at}.")
        if not 0 < start <= 1:
            raise GradsieveError(f"start, the share of each batch used at first, must lie in (0, 1], not {start}.")
        super().__init__(model, loss_fn)
        self.full_at, self.start, self.difficulty = full_at, start, difficulty

    def _weigh(self, forward: TrainingForward) -> StepRecord:
        share = pace(self.steps, self.full_at, self.start)
        difficulty = self.difficulty(forward.batch, forward.losses)
        weights = self._jointly(lambda joint: self_paced_weights(joint, share), difficulty, forward.sizes)
        return self._record(forward, weights, {"loss": forward.losses.isfinite().all()})
