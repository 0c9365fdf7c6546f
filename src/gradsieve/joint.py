"""The softmax of Eq. 3 over a whole batch that comes in parts: one micro-batch after another, processes side by side.

A part is weighed by the softmax over all that has come so far. When the next one joins, everything before it weighs
less by one common factor, Z_before / Z_now, and so do the gradients that it has left behind. With the last part the sum
of gradients is that of the whole batch at once.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .errors import check
from .parallel import Sizes, World
from .scorer import example_weights


class Joint:
    """The scores of a whole batch, of which this process computed its own."""

    def __init__(self, world: World, uniform_mix: float = 0.0, trust: Tensor | float = 1.0):
        self.world, self.uniform_mix, self.trust = world, uniform_mix, trust
        self._own: list[Tensor] = []  # logits of each part, with psi's graph
        self._all: list[Tensor] = []  # those of all processes, without
        self._sizes: list[Sizes] = []

    def join(self, logits: Tensor, sizes: Sizes) -> Tensor | None:
        """A further part, (b,). Returns Z_before / Z_now, a 0-dimensional tensor; None for the first part."""
        check(
            not self._own or not self.uniform_mix,
            "uniform_mix cannot be had with gradient accumulation: its share of each weight is not known before the "
            "last micro-batch. Leave it at 0.",
        )
        before = self._trusted().logsumexp(0) if self._all else None
        self._own.append(logits)
        self._all.append(self.world.gathered(logits, sizes))
        self._sizes.append(sizes)
        return None if before is None else (before - self._trusted().logsumexp(0)).exp()

    @property
    def totals(self) -> list[int]:
        """How many examples each part has in all processes."""
        return [sizes.total for sizes in self._sizes]

    def own_weights(self) -> list[Tensor]:
        """Of this process's examples by part, (b,) each, free of any graph."""
        parts = example_weights(self._trusted(), self.uniform_mix).split(self.totals)
        return [weights[sizes.place] for weights, sizes in zip(parts, self._sizes, strict=True)]

    def _trusted(self) -> Tensor:
        """What becomes weights: the logits of all examples, as far as psi is trusted, (N,)."""
        return self.trust * torch.cat(self._all)

    def logits(self) -> Tensor:
        """psi's own, of all examples, (N,). This process's carry its graph; the others' gradients are theirs to add."""
        pieces = []
        for own, everyone, sizes in zip(self._own, self._all, self._sizes, strict=True):
            pieces += [everyone[: sizes.place.start], own, everyone[sizes.place.stop :]]
        return torch.cat(pieces)

    def gathered(self, own: Sequence[Tensor]) -> Tensor:
        """Numbers of this process's examples, by part, together with the other processes', in the order of `logits`."""
        return torch.cat([self.world.gathered(v, s) for v, s in zip(own, self._sizes, strict=True)])
