"""The paper's other use of the scores (section 2.2): draw examples in proportion to them instead of weighting them."""

import copy
from collections import deque
from collections.abc import Callable, Iterator, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from .errors import GradsieveError
from .parameters import device_of, to_device, untouched
from .randomness import RandomStream
from .scorer import MAX_LOGIT, bounded

AHEAD = 128
"""Batches at most that a loader is taken to hold, drawn and not yet trained on."""


class ScoreSampler(Sampler[int]):
    """Draws indices of `dataset` with probability softmax(scores), with replacement.

    ::

        sampler = ScoreSampler(train_set, scorer, batch_size=64)
        train_loader = DataLoader(train_set, batch_size=64, sampler=sampler)
        dds = DDS(model, scorer, loss_fn, optimizer, dev_loader, sampler=sampler)

    The scores of the whole data set are computed anew every `refresh_every` steps, batch by batch; what stays in
    memory is 8 bytes per example and a copy of the scorer as it then was. In between the scorer learns on while draws
    follow the old scores s', so DDS weighs a drawn batch by softmax(s - s'): uniformly right after a refresh, where
    psi's gradient is the printed REINFORCE form, and by what the scorer has learned since.

    A loader with workers reads ahead: s' of a batch are the scores that it was drawn by, and as many copies of the
    scorer are kept as have batches on their way. They are told apart by counting, so give `DDS.loss` every batch of a
    pass, in order; to go on in the midst of one use the sampler's `state_dict` rather than skip batches.

    Args:
        dataset: the training set, indexable.
        scorer: ``scorer(batch) -> (B,)``; it may not ask for signals, which only a training step knows.
        batch_size: how many examples a training step takes; the loader's.
        num_samples: draws in one pass; by default as many as there are examples.
        refresh_every: training steps between two scorings of the data set.
        max_logit: the bound on scores; the same as DDS's.
        scoring_batch_size, num_workers, collate_fn: how the data set is read for scoring.
        generator: random numbers for the draws; by default torch's initial seed, plus the rank of several processes.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        scorer: nn.Module,
        *,
        batch_size: int = 64,
        num_samples: int | None = None,
        refresh_every: int = 100,
        max_logit: float | None = MAX_LOGIT,
        scoring_batch_size: int = 1024,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        generator: torch.Generator | None = None,
    ):
        signals = tuple(getattr(scorer, "signals", ()))
        if signals:
            raise GradsieveError(
                f"ScoreSampler scores the data set ahead of training, so {type(scorer).__name__} cannot have the "
                f"signals {signals} it asks for. Use a scorer of the example alone, such as MLPScorer or ConvScorer."
            )
        if not isinstance(dataset, Sized) or len(dataset) == 0:
            raise GradsieveError("ScoreSampler needs a data set with a length above 0.")
        if batch_size < 1 or refresh_every < 1:
            raise GradsieveError("batch_size and refresh_every must be at least 1.")
        self.scorer, self.max_logit = scorer, max_logit
        self.batch_size, self.refresh_every = batch_size, refresh_every
        self.num_samples = len(dataset) if num_samples is None else num_samples
        self.generator = generator or torch.Generator().manual_seed((torch.initial_seed() + _rank()) % 2**64)
        self._scoring = DataLoader(
            dataset,
            scoring_batch_size,
            num_workers=num_workers,
            collate_fn=collate_fn,
        )
        self._cumulative: Tensor | None = None
        self._then = copy.deepcopy(scorer).eval()
        self._newer: deque[tuple[int, dict[str, Any]]] = deque()  # from which draw on, and the scorer's state
        self._steps = self._drawn = self._used = self._resume_at = 0
        self._stream = RandomStream(device_of(scorer), torch.initial_seed())

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        self._use_up_to(self._drawn)  # of the pass before nothing comes any more
        drawn, self._resume_at = self._resume_at, 0
        self._drawn = self._used = drawn
        while drawn < self.num_samples:
            if self._cumulative is None or self._steps % self.refresh_every == 0:
                self.refresh()
            indices = self._draw(min(self.batch_size, self.num_samples - drawn))
            self._steps += 1
            self._drawn = drawn = drawn + len(indices)
            self._use_up_to(max(self._used, drawn - AHEAD * self.batch_size))
            yield from indices.tolist()

    def refresh(self) -> None:
        """Scores the data set with the scorer as it is now."""
        self._newer.append((self._drawn, copy.deepcopy(self.scorer.state_dict())))
        device = device_of(self.scorer)
        scores = []
        with torch.no_grad(), self._stream, untouched(self.scorer, training=False):
            for batch in self._scoring:
                scores.append(self._neutral(self.scorer(to_device(batch, device))).double())
        logits = torch.cat(scores)  # (N,)
        # multinomial stops at 2^24 categories; a binary search in the cumulative sum does not.
        self._cumulative = torch.softmax(logits, dim=0).cumsum(0).cpu()

    @torch.no_grad()
    def logits(self, batch: Any) -> Tensor:
        """The bounded scores by which the next batch of the pass was drawn, (B,). Ask for each batch once."""
        self._use_up_to(self._used)
        scores = self._neutral(self._then(batch))
        self._used = min(self._used + len(scores), self._drawn)
        return scores

    def _use_up_to(self, draw: int) -> None:
        """`_then` becomes the scorer of that draw."""
        self._used = draw
        while self._newer and self._newer[0][0] <= draw:
            self._then.load_state_dict(self._newer.popleft()[1])

    def _neutral(self, scores: Tensor) -> Tensor:
        """Bounded, and 0 where a score is not finite."""
        scores = bounded(scores, self.max_logit)
        return torch.where(scores.isfinite(), scores, 0.0)

    def probabilities(self) -> Tensor:
        """p over the data set as last scored, (N,)."""
        if self._cumulative is None:
            self.refresh()
        assert self._cumulative is not None
        return torch.diff(self._cumulative, prepend=self._cumulative.new_zeros(1))

    def state_dict(self) -> dict[str, Any]:
        """Position, scores and random state; exact when the loader reads no batches ahead (num_workers=0)."""
        return {
            "steps": self._steps,
            "drawn": self._drawn % self.num_samples,
            "cumulative": self._cumulative,
            "scorer": self._newer[-1][1] if self._newer else self._then.state_dict(),
            "random": self.generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps, self._cumulative = state["steps"], state["cumulative"]
        self._drawn = self._used = self._resume_at = state["drawn"]
        self._newer.clear()
        self._then.load_state_dict(state["scorer"])
        self.generator.set_state(state["random"].cpu())

    def _draw(self, count: int) -> Tensor:
        assert self._cumulative is not None
        u = torch.rand(count, dtype=torch.float64, generator=self.generator) * self._cumulative[-1]
        return torch.searchsorted(self._cumulative, u, right=True).clamp_max(len(self._cumulative) - 1)


def _rank() -> int:
    """Of this process among several."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
