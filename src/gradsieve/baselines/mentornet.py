"""MentorNet, data-driven (Jiang et al., ICML 2018): a second network, psi, learns which examples to trust.

    z_i = (l_i, l_i - level_t, y_i, percentage of training done)      level_t: moving percentile of the losses
    v_i = sigmoid(g(z_i; psi)),    w_i = v_i / sum_j v_j

psi is trained, alongside the model, to tell dev examples with their own labels from dev examples with wrong ones.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from ..errors import GradsieveError
from ..forward import TrainingForward
from ..optimizers import load_optimizer
from ..parallel import unwrapped
from ..parameters import LossFn, checked_losses, untouched
from ..record import StepRecord
from ..scorer import climb, default_optimizer
from .base import DevWeighting, quantile

DECAY = 0.95


def mentor_weights(scores: Tensor) -> Tensor:
    """v_i / sum_j v_j with v = sigmoid(scores), (B,). In logarithms, where no v_i underflows to zero."""
    return torch.softmax(F.logsigmoid(scores), dim=0)


def next_level(level: Tensor | None, losses: Tensor, percentile: float) -> Tensor:
    """level_t = DECAY level_{t-1} + (1 - DECAY) q, q the batch's percentile, if that is finite. Starts as q."""
    q = quantile(losses, percentile)
    moved = q if level is None else DECAY * level + (1 - DECAY) * q
    return torch.where(moved.isfinite(), moved, 0.0 if level is None else level)


def half_wrong(labels: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """The labels, each with probability 1/2 replaced by another class, and which of them are still right."""
    right = torch.rand(labels.shape, device=labels.device) < 0.5
    wrong = (labels.long() + torch.randint_like(labels, 1, num_classes, dtype=torch.long)) % num_classes
    return torch.where(right, labels, wrong.to(labels.dtype)), right


class Mentor(nn.Module):
    """The network g, sized as the original, which reads the two losses with a one-unit LSTM before its MLP."""

    def __init__(self, num_classes: int, hidden: int = 20):
        super().__init__()
        self.label = nn.Embedding(num_classes, 2)
        self.progress = nn.Embedding(100, 5)
        nn.init.zeros_(self.progress.weight)  # a percentage that training has yet to reach must not disturb it
        self.body = nn.Sequential(nn.Linear(2 + 2 + 5, hidden), nn.Tanh(), nn.Linear(hidden, 1))

    def forward(self, loss: Tensor, level: Tensor, label: Tensor, percent: int) -> Tensor:
        signals = torch.stack([loss, loss - level], 1).to(self.progress.weight.dtype)  # (B, 2)
        progress = self.progress.weight[percent].expand(len(loss), -1)  # (B, 5)
        return self.body(torch.cat([signals, self.label(label.long()), progress], 1)).squeeze(1)


class MentorNet(DevWeighting):
    """Weighs ``(input, label, ...)`` batches by a mentor that sees loss, label and the progress of training.

    Args:
        model: what is trained, theta.
        loss_fn: ``loss_fn(model, batch) -> (B,)``, one loss per example.
        dev_loader: any re-iterable of batches whose labels are right; moved to the model's device.
        num_classes: labels are 0 to num_classes - 1.
        total_steps: the length of training, for its percentage and for the burn-in.
        mentor_optimizer: ``mentor -> optimizer``, psi's; by default Adam at 0.003. One that is not ``fused`` costs a
            wait for the device in each step.
        percentile: which percentile of the losses level_t follows.
        burn_in: the share of the steps in which the mentor learns already while all weights are uniform.
        seed: of the mentor, dev shuffling, wrong labels and dropout in the dev pass; by default torch's initial seed.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        dev_loader: Iterable[Any],
        num_classes: int,
        *,
        total_steps: int,
        mentor_optimizer: Callable[[nn.Module], Optimizer] | None = None,
        percentile: float = 0.7,
        burn_in: float = 0.2,
        seed: int | None = None,
    ):
        if num_classes < 2:
            raise GradsieveError(f"num_classes must be 2 or more, or no label could be wrong; it is {num_classes}.")
        if total_steps < 1:
            raise GradsieveError(f"total_steps, the length of training, must be 1 or more, not {total_steps}.")
        if not 0 < percentile <= 1:
            raise GradsieveError(f"percentile must lie in (0, 1], not {percentile}.")
        if not 0 <= burn_in <= 1:
            raise GradsieveError(f"burn_in, a share of the steps, must lie between 0 and 1, not {burn_in}.")
        super().__init__(model, loss_fn, dev_loader, seed)
        self.num_classes, self.total_steps = num_classes, total_steps
        self.percentile, self.burn_in = percentile, burn_in
        with self.stream:
            self.scorer = Mentor(num_classes).to(self.stream.device)
        self.world.alike(self.scorer)
        psi_optimizer = (mentor_optimizer or default_optimizer)(self.scorer)
        assert psi_optimizer is not None  # a mentor has parameters
        self.mentor_optimizer = psi_optimizer
        self._level: Tensor | None = None

    def _weigh(self, forward: TrainingForward) -> StepRecord:
        labels, losses, sizes = _labels(forward.batch), forward.losses, forward.sizes
        self._level = level = next_level(self._level, self.world.gathered(losses, sizes), self.percentile)
        percent = min(99, 100 * self.steps // self.total_steps)
        finite = {"loss": losses.isfinite().all(), **self._learn(level, percent)}
        if self.steps < self.burn_in * self.total_steps:
            return self._record(forward, torch.full_like(losses, 1 / sizes.total), finite)
        with torch.no_grad(), self._precision(autocast=False):
            scores = self.scorer(losses, level, labels, percent).to(losses.dtype)
        return self._record(forward, self._jointly(mentor_weights, scores, sizes), finite)

    def _learn(self, level: Tensor, percent: int) -> dict[str, Tensor]:
        """One step of psi down the binary cross-entropy of "this label is right" on a dev batch."""
        batch = self.dev.draw()
        with self.stream:
            labels, right = half_wrong(_labels(batch), self.num_classes)
            batch = (batch[0], labels, *batch[2:])
            own = unwrapped(self.model)
            with torch.no_grad(), untouched(own), self._precision(autocast=True):
                losses = checked_losses(self.loss_fn(own, batch), batch, "loss_fn on a dev batch")
        with self._precision(autocast=False):
            scores = self.scorer(losses, level, labels, percent)
            error = F.binary_cross_entropy_with_logits(scores, right.to(scores.dtype))
        error = error * (len(losses) / self.world.sizes(len(losses)).total)
        good = self.world.agreed(losses.isfinite().all())
        learned = climb(self.mentor_optimizer, -error, good, self.world)
        return {"dev loss": good, "mentor gradient": learned | ~good}

    def _precision(self, *, autocast: bool) -> torch.autocast:
        """The user's autocast, or none; never its cache, where weights cast under no_grad would lack their graph."""
        kind = self.stream.device.type
        enabled = autocast and torch.is_autocast_enabled(kind)
        return torch.autocast(kind, torch.get_autocast_dtype(kind), enabled, cache_enabled=False)

    def state_dict(self) -> dict[str, Any]:
        mentor = {"scorer": self.scorer.state_dict(), "mentor_optimizer": self.mentor_optimizer.state_dict()}
        return {**super().state_dict(), **mentor, "level": self._level}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.scorer.load_state_dict(state["scorer"])
        load_optimizer(self.mentor_optimizer, state["mentor_optimizer"])
        self._level = None if state["level"] is None else state["level"].to(self.stream.device)


def _labels(batch: Any) -> Tensor:
    labels = batch[1] if isinstance(batch, Sequence) and len(batch) > 1 else None
    if not isinstance(labels, Tensor) or labels.ndim != 1 or labels.is_floating_point():
        found = f"{labels.dtype} of shape {tuple(labels.shape)}" if isinstance(labels, Tensor) else type(batch).__name__
        raise GradsieveError(
            f"MentorNet reads (input, label, ...) batches with one class number per example, but found {found}."
        )
    return labels
