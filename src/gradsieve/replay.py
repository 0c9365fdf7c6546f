"""Lessons that psi hears again: rewards are measured now and then, and learned from at every step.

A lesson is what the scorer was told and the rewards that followed, in units of their deviation. Old rewards are those
of an old model. So late lessons come more often, and the ring is as long as its lessons keep their promise: whenever
rewards are measured, they are compared with the weights that psi, taught by the ring, has just given. Weights that
foretell them let the ring grow by one lesson; weights that foretell the contrary halve it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

AGE = 0.9
"""How likely a lesson is drawn, beside the next younger one."""
FORESIGHT_RATE = 0.2


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


def foresight(weights: Tensor, rewards: Tensor) -> Tensor:
    """Correlation of the weights that were given with the rewards that followed; 0 where all are equal."""
    w, r = weights - weights.mean(), rewards - rewards.mean()
    return (w * r).sum() / (w.norm() * r.norm()).clamp_min(1e-30)


class Ring:
    """The latest lessons, `size` of them at most."""

    def __init__(self, size: int, generator: torch.Generator):
        self.size, self.generator = size, generator
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

    @property
    def bytes(self) -> int:
        return sum(lesson.bytes for lesson in self._lessons)

    def _check(self, now: Tensor) -> None:
        """Reads the foresight of the time before, which has had a while to arrive, and sends for the present one."""
        if self._foresight is None:
            self._foresight = torch.zeros((), device=now.device)
        elif self._arrived is not None:
            kept = float(self._arrived)
            self.length = max(1, self.length // 2) if kept < 0 else min(self.size, self.length + 1)
        self._foresight = self._foresight.lerp(now.nan_to_num().float(), FORESIGHT_RATE)
        self._arrived = self._foresight.to("cpu", non_blocking=True)

    def state_dict(self) -> dict[str, Any]:
        return {
            "length": self.length,
            "foresight": self._foresight,
            "arrived": self._arrived,
            "random": self.generator.get_state(),
            "lessons": [(lesson.batch, dict(lesson.signals), lesson.rewards) for lesson in self._lessons],
        }

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        def move(tree: Any) -> Any:
            return pytree.tree_map_only(Tensor, lambda t: t.to(device), tree)

        self.length, self._foresight = state["length"], move(state["foresight"])
        self._arrived = state["arrived"]
        self.generator.set_state(state["random"].cpu())
        self._lessons = [Lesson(*move(parts)) for parts in map(tuple, state["lessons"])]
