"""What every translator is, and its loss per sentence pair.

A translator has two halves. `encode` reads the source once and gives the memory; `decode` reads target pieces, any
number of them, from a state, and gives features and the state after them. Training decodes the whole target in one
call, teacher-forced; beam search calls the same code piece by piece. So what is searched is what was trained, and
nothing loops over time in Python.

Memory and state are dictionaries of tensors with the sentence (or the beam) first, so `reordered` serves both.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import GradsieveError
from .ragged import PAD

State = dict[str, Tensor]


class TranslationBatch(NamedTuple):
    """B sentence pairs, padded with `PAD`. A source has one piece at least; a target begins with BOS, ends with EOS."""

    source: Tensor  # (B, S)
    source_lengths: Tensor  # (B,)
    target: Tensor  # (B, T + 1)
    places: Tensor
    """(N,): which of the B T places hold a piece to predict. Found on the host, so that no device is waited for."""


def translation_batch(source: Tensor, source_lengths: Tensor, target: Tensor) -> TranslationBatch:
    """Of tensors on the host."""
    places = (target[:, 1:] != PAD).flatten().nonzero()[:, 0]
    return TranslationBatch(source, source_lengths, target, places)


def reordered(state: State, index: Tensor) -> State:
    """The state (or memory) whose row i is row index[i] of this one."""
    return {name: value[index] for name, value in state.items()}


def real_pieces(source: Tensor, source_lengths: Tensor) -> Tensor:
    """True where the source is no padding."""
    places = torch.arange(source.shape[1], device=source.device)
    return places < source_lengths.to(source.device)[:, None]  # (B, S)


def reversed_within(x: Tensor, real: Tensor) -> Tensor:
    """X (B, S, D) with each row's real places in reverse order, its padding where it was."""
    places = torch.arange(x.shape[1], device=x.device)
    mirrored = torch.where(real, real.sum(1, keepdim=True) - 1 - places, places)  # (B, S)
    return x.gather(1, mirrored[:, :, None].expand_as(x))


class Translator(nn.Module):
    """What the loss and the beam search need of a model."""

    output: nn.Linear

    def encode(self, source: Tensor, source_lengths: Tensor) -> State:
        """Source (B, S) -> memory, which later steps only read."""
        raise NotImplementedError

    def start(self, memory: State) -> State:
        """The state before the first target piece."""
        raise NotImplementedError

    def decode(self, memory: State, state: State, tokens: Tensor) -> tuple[Tensor, State]:
        """Tokens (B, T) that follow the state -> features (B, T, H) that predict what follows each, new state."""
        raise NotImplementedError

    def step(self, memory: State, state: State, tokens: Tensor) -> tuple[Tensor, State]:
        """One token (B,) per row -> log-probabilities (B, V) of the next, new state."""
        features, state = self.decode(memory, state, tokens[:, None])
        return self.output(features[:, 0]).log_softmax(-1), state

    def forward(
        self, source: Tensor, source_lengths: Tensor, target_in: Tensor, places: Tensor | None = None
    ) -> Tensor:
        """Logits (B, T, V); only those of the N `places` among the B T, (N, V), if they are given.

        The output layer is the dearest part on a CPU, and a padded batch would spend it on places that nobody reads.
        """
        memory = self.encode(source, source_lengths)
        features, _ = self.decode(memory, self.start(memory), target_in)  # (B, T, H)
        return self.output(features if places is None else features.flatten(0, 1).index_select(0, places))


def translation_loss(
    model: nn.Module, batch: TranslationBatch, *, reduction: str = "sum", label_smoothing: float = 0.0
) -> Tensor:
    """One loss per sentence pair, (B,): the cross entropy of its target pieces, EOS included, ``sum`` or ``mean``.

    A sum divided by the batch's count of pieces trains on pieces, as the authors do; a mean trains on sentences.
    """
    if reduction not in ("sum", "mean"):
        raise GradsieveError(f"a sentence's loss is the 'sum' or the 'mean' of its pieces' losses, not {reduction!r}.")
    given, wanted = batch.target[:, :-1], batch.target[:, 1:]  # (B, T)
    logits = model(batch.source, batch.source_lengths, given, batch.places)  # (N, V)
    pieces = wanted.flatten()[batch.places]
    losses = F.cross_entropy(logits, pieces, reduction="none", label_smoothing=label_smoothing)  # (N,)
    rows = batch.places // wanted.shape[1]
    summed = losses.new_zeros(len(wanted)).index_add(0, rows, losses)  # (B,)
    return summed if reduction == "sum" else summed / piece_counts(batch)


def piece_counts(batch: TranslationBatch) -> Tensor:
    """Of each target, EOS included, (B,)."""
    return (batch.target[:, 1:] != PAD).sum(1)
