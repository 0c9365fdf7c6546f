"""The index from an English sentence to its sources in all languages.

Text streams: a pass over a file holds a few thousand lines of it. What stays in memory are flat tensors of ids.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from ..errors import GradsieveError
from .pairs import ENGLISH, LIMITS, Dropped, Limits, Pairs, read_pairs
from .ragged import Ragged
from .vocabulary import Vocabulary

CHUNK = 10_000
"""Sentences that are encoded at once."""
DIGEST = 16
"""Bytes of the checksum that stands for an English sentence. That two of a thousand million sentences have the same
128 bits has a probability of 1e-21, so sentences are told apart by it alone."""


@dataclass(frozen=True)
class MultiWay:
    """Distinct English sentences, and the sources that each has in each language."""

    languages: tuple[str, ...]
    targets: Ragged
    """(T), ids of English pieces."""
    available: Tensor
    """(T, n), bool: which languages have a source for a target."""
    sources: tuple[Ragged, ...]
    """For each language its sources, in the order of their targets."""
    source_targets: tuple[Tensor, ...]
    """For each language the target of each source: ascending."""
    dropped: dict[str, Dropped]
    checksum: str
    """Of languages and text."""

    def __len__(self) -> int:
        return len(self.targets)

    def pairs_of(self, language: str) -> tuple[Ragged, Tensor]:
        """All sources of a language, and the target of each."""
        group = self.languages.index(language)
        return self.sources[group], self.source_targets[group]

    def draw_sources(self, targets: Tensor, groups: Tensor, generator: torch.Generator) -> Tensor:
        """For each target, (N,), which source of the language drawn for it: at random where that has several."""
        chance = torch.rand(len(targets), dtype=torch.float64, generator=generator)
        rows = torch.zeros(len(targets), dtype=torch.long)
        for group in groups.unique().tolist():
            (place,) = torch.where(groups == group)
            first = torch.searchsorted(self.source_targets[group], targets[place])
            count = torch.searchsorted(self.source_targets[group], targets[place], right=True) - first
            if not bool(count.all()):
                raise GradsieveError(f"{self.languages[group]} was drawn for a target that has no source in it.")
            rows[place] = first + (chance[place] * count).long()
        return rows

    def source(self, groups: Tensor, rows: Tensor) -> Ragged:
        """The sources in these languages at these places, in that order."""
        parts, places = [Ragged.of([])], [torch.zeros(0, dtype=torch.long)]
        for group in groups.unique().tolist():
            (place,) = torch.where(groups == group)
            parts.append(self.sources[group][rows[place]])
            places.append(place)
        return Ragged.cat(parts)[torch.cat(places).argsort()]


def load_corpus(
    directory: Path,
    languages: Sequence[str],
    target_language: str,
    vocabulary: Vocabulary,
    limits: Limits | None = LIMITS,
) -> MultiWay:
    """The training text of all languages, encoded as it is read.

    `target_language`, the low-resource one, must have dev and test data too: read once now, lest a bad line in them
    comes up only after hours of training.
    """
    if target_language not in languages:
        raise GradsieveError(f"the low-resource language {target_language} is not among {', '.join(languages)}.")
    for split in ("dev", "test"):
        pairs = read_pairs(directory, split, target_language)
        if not sum(1 for _ in pairs):
            raise GradsieveError(f"{pairs.paths[0]} has no pair with text on both sides: {pairs.dropped}.")
    keys, targets = torch.zeros(0, 2, dtype=torch.long), Ragged.of([])
    sources, source_targets, dropped = [], [], {}
    checksum = hashlib.sha256()
    for language in languages:
        pairs = read_pairs(directory, "train", language, limits)
        its_sources, its_targets, its_keys, its_checksum = _encoded(pairs, language, vocabulary)
        checksum.update(its_checksum)
        count, keys = len(keys), torch.cat([keys, its_keys])
        numbers, first = numbered(keys)  # the targets known so far keep their numbers
        keys, targets = keys[first], Ragged.cat([targets, its_targets[first[count:] - count]])
        ordered, order = numbers[count:].sort(stable=True)
        sources.append(its_sources[order])
        source_targets.append(ordered)
        dropped[language] = pairs.dropped
    available = torch.zeros(len(targets), len(languages), dtype=torch.bool)
    for group, its in enumerate(source_targets):
        available[its, group] = True
    return MultiWay(
        tuple(languages),
        targets,
        available,
        tuple(sources),
        tuple(source_targets),
        dropped,
        checksum.hexdigest()[:16],
    )


def _encoded(pairs: Pairs, language: str, vocabulary: Vocabulary) -> tuple[Ragged, Ragged, Tensor, bytes]:
    """Sources, targets, the key of each target's text, and a checksum of it all."""
    stream, sources, targets, keys = iter(pairs), [], [], []
    checksum = hashlib.sha256(language.encode())
    while chunk := list(islice(stream, CHUNK)):
        checksum.update("".join(f"{source}\t{english}\n" for source, english in chunk).encode())
        texts, english = zip(*chunk, strict=True)
        sources.append(vocabulary.encode(language, texts))
        targets.append(vocabulary.encode(ENGLISH, english))
        keys.append(_keys(english))
    if not keys:
        raise GradsieveError(f"cleaning left nothing of {pairs.paths[0]}: {pairs.dropped}.")
    return Ragged.cat(sources), Ragged.cat(targets), torch.cat(keys), checksum.digest()


def _keys(texts: Sequence[str]) -> Tensor:
    """(N, 2), int64: a checksum of each text."""
    digests = b"".join(hashlib.blake2b(text.encode(), digest_size=DIGEST).digest() for text in texts)
    return torch.frombuffer(bytearray(digests), dtype=torch.long).view(-1, 2)


def numbered(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers the distinct rows of (N, 2) as they first appear: each row's number (N,); where each number appears."""
    order = keys[:, 1].argsort(stable=True)
    order = order[keys[order, 0].argsort(stable=True)]  # equal rows together, in the order in which they came
    ordered = keys[order]
    starts = torch.ones(len(keys), dtype=torch.bool)
    starts[1:] = (ordered[1:] != ordered[:-1]).any(1)
    first, rank = order[starts].sort()  # where each distinct row appears first
    place = torch.empty_like(rank)
    place[rank] = torch.arange(len(rank))
    numbers = torch.empty_like(order)
    numbers[order] = place[starts.cumsum(0) - 1]
    return numbers, first
