"""Lessons that psi hears again: rewards are measured now and then, and learned from at every step.

A lesson is what the scorer was told and the rewards that followed, in units of their deviation. Old rewards are those
of an old model, and what is heard again and again may be learned by heart. So many lessons are kept, and late ones
come more often. Whenever rewards are measured, they are compared with the weights that psi, taught by the ring, gave
before it knew them:

- the ring is as long as its lessons keep their promise: weights that foretell the rewards let it grow by one lesson,
  weights that foretell the contrary halve it;
- psi is trusted as far as its weights have proved worth their price: see `hindsight`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

AGE = 0.97
"""How likely a lesson is drawn, beside the next younger one."""
FORESIGHT_RATE = 0.2
SHORTEST = 32
"""Lessons that are in use at least, if they are kept: a few would be learned by heart."""
TRUST_RATE = 0.005
"""How fast a training step fades from the evidence."""


@dataclass(frozen=True)
class Lesson:
    batch: Any
    """None if the scorer reads signals only."""
    signals: Mapping[str, Tensor]
    rewards: Tensor
    """(B,), in units of their deviation."""

    @property
    def bytes(self) -> int:
        leaves = pytree.tree_leaves((self.batch, dict(self.signals), self.rewards))
        return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))


def apart(weights: Tensor) -> Tensor:
    """w_i - 1/B: exactly 0 where all weigh the same, or rounding would pass for evidence."""
    return weights - 1 / len(weights)


def foresight(weights: Tensor, rewards: Tensor) -> Tensor:
    """Correlation of the weights that were given with the rewards that followed; 0 where all are equal."""
    w, r = apart(weights), rewards - rewards.mean()
    return (w * r).sum() / (w.norm() * r.norm()).clamp_min(1e-30)


def hindsight(weights: Tensor, rewards: Tensor, price: Tensor) -> Tensor:
    """What weights have brought and what they have cost: ``G = sum_i (w_i - 1/B) r_i`` and ``P U``, (2,).

    U = B sum_i (w_i - 1/B)^2 = B sum_i w_i^2 - 1 is how uneven they are and P the price of that. Had a share tau of
    what sets them apart from 1/B been given, it would have brought about tau G and cost tau^2 P U. So G / P U is the
    largest share that would have been worth its price, the trust that these weights deserved. Of several batches it is
    the ratio of the sums.
    """
    w = apart(weights)
    gain = (w * (rewards - rewards.mean())).sum()
    return torch.stack([gain, price * len(w) * w.square().sum()])


def deserved(evidence: Tensor) -> Tensor:
    """The trust that sums of `hindsight` speak for, from 0 to 1."""
    gain, cost = evidence
    return (gain / cost.clamp_min(1e-30)).clamp(0, 1)


class Ring:
    """The latest lessons, `size` of them at most, and how far a psi that learns from them is to be trusted."""

    def __init__(self, size: int, generator: torch.Generator, device: torch.device):
        self.size, self.generator = size, generator
        self._evidence, self.trust = torch.zeros(2, device=device), torch.zeros((), device=device)
        """tau, from 0 to 1, by which psi's scores are multiplied before they become weights: 0 until it is deserved."""
        self.length = size
        """How many are in use: what the check of their promise has made of `size`."""
        self._lessons: list[Lesson] = []  # youngest last
        self._foresight: Tensor | None = None
        self._arrived: Tensor | None = None  # on the host

    def add(self, lessons: Sequence[Lesson], foresight: Tensor) -> None:
        """Fresh lessons, and how well the weights that psi gave before it heard them foretold their rewards."""
        self._check(foresight)
        self._lessons = [*self._lessons, *lessons][-self.size :]

    def draw(self) -> Lesson | None:
        """One of those in use, the younger the likelier."""
        lessons = self._lessons[-self.length :]
        if not lessons:
            return None
        chances = AGE ** torch.arange(len(lessons) - 1, -1, -1, dtype=torch.float64)
        return lessons[int(torch.multinomial(chances, 1, generator=self.generator))]

    def judge(self, hindsight: Tensor, steps: int) -> None:
        """psi by the weights that it gave before it knew the rewards, `steps` after the judgement before."""
        self._evidence = self._evidence.lerp(hindsight.to(self._evidence), 1 - (1 - TRUST_RATE) ** steps)
        self.trust = deserved(self._evidence)

    @property
    def bytes(self) -> int:
        return sum(lesson.bytes for lesson in self._lessons)

    def _check(self, now: Tensor) -> None:
        """Reads the foresight of the time before, which has had a while to arrive, and sends for the present one."""
        if self._foresight is None:
            self._foresight = torch.zeros((), device=now.device)
        elif self._arrived is not None:
            kept = float(self._arrived)
            shorter, longer = max(self.length // 2, SHORTEST), self.length + 1
            self.length = min(shorter if kept < 0 else longer, self.size)
        self._foresight = self._foresight.lerp(now.nan_to_num().float(), FORESIGHT_RATE)
        self._arrived = self._foresight.to("cpu", non_blocking=True)

    def state_dict(self) -> dict[str, Any]:
        return {
            "length": self.length,
            "evidence": self._evidence,
            "foresight": self._foresight,
            "arrived": self._arrived,
            "random": self.generator.get_state(),
            "lessons": [(lesson.batch, dict(lesson.signals), lesson.rewards) for lesson in self._lessons],
        }

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        def move(tree: Any) -> Any:
            return pytree.tree_map_only(Tensor, lambda t: t.to(device), tree)

        self.length, self._foresight = state["length"], move(state["foresight"])
        self._evidence = move(state["evidence"])
        self.trust = deserved(self._evidence)
        self._arrived = state["arrived"]
        self.generator.set_state(state["random"].cpu())
        self._lessons = [Lesson(*move(parts)) for parts in map(tuple, state["lessons"])]
