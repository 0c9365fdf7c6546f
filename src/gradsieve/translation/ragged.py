"""Sentences of ids: end to end in two flat tensors, whatever their number; as padded rows; in batches by words."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

PAD, UNK, BOS, EOS = range(4)
BLOCK = 1 << 15


@dataclass(frozen=True)
class Ragged:
    """Sequences of different lengths, end to end: the i-th is ``values[offsets[i]:offsets[i + 1]]``."""

    values: Tensor  # (total,), int32
    offsets: Tensor  # (N + 1,), int64

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int]]) -> "Ragged":
        flat = array("i", chain.from_iterable(sequences))
        values = torch.frombuffer(flat, dtype=torch.int32) if flat else torch.zeros(0, dtype=torch.int32)
        return cls(values, _offsets(torch.tensor([len(s) for s in sequences], dtype=torch.long)))

    @classmethod
    def cat(cls, parts: Sequence["Ragged"]) -> "Ragged":
        if not parts:
            return cls.of([])
        return cls(torch.cat([p.values for p in parts]), _offsets(torch.cat([p.lengths for p in parts])))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: Tensor) -> "Ragged":
        """The sequences at these places, in that order; copied, some at a time: their places take much memory."""
        offsets = _offsets(self.offsets[index + 1] - self.offsets[index])
        values = self.values.new_empty(int(offsets[-1]))
        for begin in range(0, len(index), BLOCK):
            part = offsets[begin : begin + BLOCK + 1]
            shift = self.offsets[index[begin : begin + BLOCK]] - part[:-1]
            places = torch.arange(int(part[0]), int(part[-1])) + torch.repeat_interleave(shift, part.diff())
            values[int(part[0]) : int(part[-1])] = self.values[places]
        return Ragged(values, offsets)

    @property
    def lengths(self) -> Tensor:
        return self.offsets.diff()

    def tolist(self) -> list[list[int]]:
        return [part.tolist() for part in self.values.split(self.lengths.tolist())] if len(self) else []


def _offsets(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def padded(ragged: Ragged, pad: int = PAD) -> tuple[Tensor, Tensor]:
    """The sequences as rows, filled up with `pad` at the end: (B, T) int64; and their lengths, (B,)."""
    lengths = ragged.lengths
    longest = int(lengths.max()) if len(ragged) else 0
    rows = torch.full((len(ragged), longest), pad)  # (B, T)
    rows[torch.arange(longest) < lengths.unsqueeze(1)] = ragged.values.long()  # row by row, as they lie
    return rows, lengths


def cut_by_words(lengths: Tensor, budget: int) -> list[Tensor]:
    """The items 0 to N - 1 in this order, in batches of at most `budget` words; one longer than that is alone.

    `lengths` (N,) count source and target.
    """
    ends, begin, batches = lengths.cumsum(0), 0, []
    while begin < len(lengths):
        before = int(ends[begin - 1]) if begin else 0
        end = max(begin + 1, int(torch.searchsorted(ends, before + budget, right=True)))
        batches.append(torch.arange(begin, end))
        begin = end
    return batches
