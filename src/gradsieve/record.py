"""What a step leaves behind."""

import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class StepRecord:
    """One step of a method. Tensors stay on their device: reading a number from them is what waits, not training."""

    step: int
    """How many training steps there were, this one included."""
    rewards: Tensor | None
    """r_i of Eq. 2, (B,); None from a method that measures none."""
    weights: Tensor
    """The weights that scaled the losses of this step, (B,)."""
    effective_sample_size: Tensor
    """1 / sum w_i^2, between 1 and B; 0 if no example has any weight."""
    dev_loss: Tensor | None
    """Mean loss of the dev batch where its gradient was taken, for DDS at theta_t; None if none was."""
    finite: dict[str, Tensor]
    """Part of the step -> whether all its numbers were finite."""
    stepped: bool = True
    """Whether the optimizer moved the model since `loss()`."""
    update_every: int = 1
    """Rewards are measured at every k-th step: what a budget chose, where there is one."""
    trust: Tensor | float = 1.0
    """By which scores were multiplied before they became weights; below 1 only where lessons are replayed."""
    overhead: float | None = None
    """What DDS adds to a plain step, 1 being that step, by the clocks of a budget; None without one, and at first."""

    @property
    def skipped(self) -> str | None:
        """Why the scorer was not updated or the batch not weighed, or None if all went well."""
        if not self.stepped:
            return "the optimizer did not step"
        bad = [part for part, ok in self.finite.items() if not bool(ok)]
        return f"non-finite {', '.join(bad)}" if bad else None

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, ready for JSON."""
        return {
            "step": self.step,
            "reward_mean": _number(None if self.rewards is None else self.rewards.mean()),
            "reward_std": _number(None if self.rewards is None else self.rewards.std(correction=0)),
            "weight_min": _number(self.weights.min()),
            "weight_max": _number(self.weights.max()),
            "effective_sample_size": _number(self.effective_sample_size),
            "dev_loss": _number(self.dev_loss),
            "update_every": self.update_every,
            "trust": float(self.trust),
            "overhead": self.overhead,
            "skipped": self.skipped,
        }

    def to_json(self) -> str:
        """One line of JSON; numbers that are absent or not finite become null."""
        return json.dumps(self.to_dict(), allow_nan=False)


@dataclass(frozen=True)
class GroupRecord:
    """One update of a scorer of groups."""

    step: int
    """How many training steps there were, this one included."""
    rewards: Tensor
    """Agreement of each group's gradient with the target group's, (n,)."""
    probabilities: Tensor
    """Of each group after the update, mean over the items drawn last, (n,)."""
    drawn: Tensor
    """How many items of each group were drawn since the update before, (n,)."""
    finite: bool
    """Whether the update was made; it is held back if a reward or psi's gradient is not finite."""

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, ready for JSON."""
        return {
            "step": self.step,
            "rewards": [_number(r) for r in self.rewards],
            "probabilities": self.probabilities.tolist(),
            "drawn": self.drawn.tolist(),
            "skipped": None if self.finite else "non-finite reward or psi gradient",
        }

    def to_json(self) -> str:
        """One line of JSON; numbers that are not finite become null."""
        return json.dumps(self.to_dict(), allow_nan=False)


def _number(value: Tensor | None) -> float | None:
    return float(value) if value is not None and bool(torch.isfinite(value)) else None
