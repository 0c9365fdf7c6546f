"""Training batches without end: targets in random order, a source language drawn for each, sorted by length.

With ``batching = "language"`` a batch holds one source language. Which pairs are drawn, and how often, is the same as
in mixed batches; what changes is that a step's gradient is that of one language. Algorithm 2 wants just that gradient,
and so gets it for nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import GradsieveError
from ..parameters import to_device
from ..randomness import seeded
from ..runs.team import Team
from .corpus import MultiWay
from .ragged import BOS, Ragged, cut_by_words, padded
from .translator import TranslationBatch, translation_batch

TARGET, GROUP, ROW = range(3)
"""Columns of the sentence pairs that were drawn, (N, 3): target, language, place among its sources."""


class Draws(Protocol):
    """What the stream asks of a method."""

    observes: bool
    """Whether it wants the gradient of each language."""

    def times(self, available: Tensor) -> Tensor:
        """How often each item of a pass is used in it, (N,)."""

    def draw(self, available: Tensor) -> Tensor:
        """A language for each item, (N,)."""


@dataclass(frozen=True)
class Slice:
    """What one backward pass is for: sentences of one language, or of any where nobody wants to know (-1)."""

    group: int
    batch: TranslationBatch
    share: float
    """Of the batch's pieces to predict."""


class Stream:
    """Batches as lists of slices, on the device; it can be saved and resumed between any two of them.

    A pass takes the targets in an order of its own, `pool` at a time. A pool is sorted by length, up or down, and cut
    into batches of `words` pieces; what does not fill one waits for the next pool.
    """

    def __init__(
        self,
        corpus: MultiWay,
        method: Draws,
        *,
        words: int,
        batching: str,
        pool: int,
        seed: int,
        device: torch.device,
    ):
        self.corpus, self.method, self.words, self.pool = corpus, method, words, pool
        self.by_language, self.seed, self.device = batching == "language", seed, device
        self.items = torch.arange(len(corpus)).repeat_interleave(method.times(corpus.available))
        if not len(self.items):
            raise GradsieveError("there is no training pair in the languages that this method trains on.")
        self.number = 0  # of pools drawn so far
        self._waiting = torch.zeros(0, 3, dtype=torch.long)
        self._ready: list[Tensor] = []
        self._pass: tuple[int, Tensor] = (-1, self.items)

    def __iter__(self) -> Iterator[list[Slice]]:
        team = Team()
        while True:
            batches = [self._next() for _ in range(team.size)]  # all draw alike, and each takes its own
            yield self._slices(batches[team.rank])

    def _next(self) -> Tensor:
        while not self._ready:
            self._fill()
        return self._ready.pop()

    def _fill(self) -> None:
        """Draws a pool and cuts what there is into batches."""
        generator = seeded(self.seed, "pool", self.number)
        targets = self._targets()
        groups = self.method.draw(self.corpus.available[targets])
        rows = self.corpus.draw_sources(targets, groups, generator)
        drawn = torch.cat([self._waiting, torch.stack([targets, groups, rows], 1)])
        drawn = drawn[torch.randperm(len(drawn), generator=generator)]
        keep, ready = [drawn[:0]], []
        down = bool(torch.randint(2, (), generator=generator))  # else the longest would always be those who wait
        for part in self._parts(drawn):
            lengths = self._lengths(part)
            order = lengths.argsort(stable=True, descending=down)
            batches = [part[order[batch]] for batch in cut_by_words(lengths[order], self.words)]
            if 2 * int(self._lengths(batches[-1]).sum()) < self.words:
                keep.append(batches.pop())
            ready += batches
        self._waiting = torch.cat(keep)
        self._ready = [ready[i] for i in torch.randperm(len(ready), generator=generator).tolist()]
        self.number += 1

    def _targets(self) -> Tensor:
        per_pass = -(-len(self.items) // self.pool)
        number, place = divmod(self.number, per_pass)
        if self._pass[0] != number:
            order = torch.randperm(len(self.items), generator=seeded(self.seed, "order", number))
            self._pass = number, self.items[order]
        return self._pass[1][place * self.pool : (place + 1) * self.pool]

    def _parts(self, drawn: Tensor) -> list[Tensor]:
        """The pairs that may share a batch."""
        if not self.by_language:
            return [drawn]
        return [drawn[drawn[:, GROUP] == group] for group in drawn[:, GROUP].unique().tolist()]

    def _lengths(self, pairs: Tensor) -> Tensor:
        """Pieces of source and target, (N,)."""
        lengths = self.corpus.targets.lengths[pairs[:, TARGET]]
        for group in pairs[:, GROUP].unique().tolist():
            its = pairs[:, GROUP] == group
            lengths[its] += self.corpus.sources[group].lengths[pairs[its, ROW]]
        return lengths

    def _slices(self, pairs: Tensor) -> list[Slice]:
        groups = pairs[:, GROUP]
        parts = [(g, pairs[groups == g]) for g in groups.unique().tolist()] if self.method.observes else [(-1, pairs)]
        batches = [
            batch_of(self.corpus.source(its[:, GROUP], its[:, ROW]), self.corpus.targets[its[:, TARGET]])
            for _, its in parts
        ]
        count = sum(len(batch.places) for batch in batches)
        return [
            Slice(group, on_device(batch, self.device), len(batch.places) / count)
            for (group, _), batch in zip(parts, batches, strict=True)
        ]

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number, "waiting": self._waiting, "ready": list(self._ready)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number, self._waiting, self._ready = state["number"], state["waiting"].clone(), list(state["ready"])


def batch_of(sources: Ragged, targets: Ragged) -> TranslationBatch:
    """On the host; `sources` and `targets` end with EOS."""
    source, lengths = padded(sources)
    target, _ = padded(targets)
    return translation_batch(source, lengths, torch.cat([torch.full((len(target), 1), BOS), target], 1))


def on_device(batch: TranslationBatch, device: torch.device) -> TranslationBatch:
    """A GPU is fed from pinned memory without waiting."""
    if device.type == "cuda":
        batch = TranslationBatch(*(tensor.pin_memory() for tensor in batch))
    return to_device(batch, device)
