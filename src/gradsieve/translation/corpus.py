"""Parallel text: files, cleaning, and the index from an English sentence to its sources in all languages.

Text streams: a pass over a file holds a few thousand lines of it. What stays in memory are flat tensors of ids.
"""

import gzip
import hashlib
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice, zip_longest
from pathlib import Path

import torch
from torch import Tensor

from ..errors import GradsieveError
from .vocabulary import ENGLISH, Ragged, Vocabulary

NAME = re.compile(r"train\.([^.]+)-en\.[^.]+(?:\.gz)?")
CHUNK = 10_000
"""Sentences that are encoded at once."""
DIGEST = 16
"""Bytes of the checksum that stands for an English sentence. That two of a thousand million sentences have the same
128 bits has a probability of 1e-21, so sentences are told apart by it alone."""
WORD = 12
"""Characters that count as a word where there are no spaces."""


@dataclass(frozen=True)
class Limits:
    """Which training pairs are kept."""

    max_words: int = 200
    """On either side. A word counts for every twelve characters at least: some scripts have no spaces."""
    max_ratio: float = 9.0
    """The longer side's length over the shorter's, in characters."""


LIMITS = Limits()


@dataclass
class Dropped:
    """What the last pass over some pairs kept, and what it left out and why."""

    kept: int = 0
    empty: int = 0
    overlong: int = 0
    ratio: int = 0

    def __str__(self) -> str:
        return ", ".join(f"{count:,} {why}" for why, count in asdict(self).items())


class Pairs:
    """The pairs (source, English) of one file, or of two. Each pass reads them afresh, counting into `dropped`."""

    def __init__(self, paths: Sequence[Path], limits: Limits | None):
        self.paths, self.limits = list(paths), limits
        self.dropped = Dropped()

    def __iter__(self) -> Iterator[tuple[str, str]]:
        self.dropped = dropped = Dropped()
        for source, english in _tsv(*self.paths) if len(self.paths) == 1 else _moses(*self.paths):
            reason = fault(source, english, self.limits) or "kept"
            setattr(dropped, reason, getattr(dropped, reason) + 1)
            if reason == "kept":
                yield source, english


def fault(source: str, english: str, limits: Limits | None) -> str | None:
    """Why a pair is left out. Without limits only an empty side counts: dev and test sets stay whole."""
    if not source or not english:
        return "empty"
    if limits is None:
        return None
    if max(max(len(side.split()), len(side) // WORD) for side in (source, english)) > limits.max_words:
        return "overlong"
    short, long = sorted((len(source), len(english)))
    return "ratio" if long > limits.max_ratio * short else None


def languages(directory: Path) -> list[str]:
    """Those that have training data, by name."""
    if not directory.is_dir():
        raise GradsieveError(f"{directory} is no folder. Give the one that holds train.xx-en.tsv and the like.")
    matches = (NAME.fullmatch(path.name) for path in directory.iterdir())
    return sorted(name for name in {m[1] for m in matches if m} - {ENGLISH} if _forms(directory, "train", name))


def read_pairs(directory: Path, split: str, language: str, limits: Limits | None = None) -> Pairs:
    """The pairs of a language: `SPLIT.xx-en.tsv`, or `SPLIT.xx-en.xx` beside `SPLIT.xx-en.en`; plain or gzip.

    The files are looked for now and read on each pass: ``list(pairs)`` for a dev or test set.
    """
    stem, found = f"{split}.{language}-en", _forms(directory, split, language)
    if len(found) > 1:
        names = ", ".join(" + ".join(path.name for path in form) for form in found)
        raise GradsieveError(f"{directory} has {stem} more than once: {names}. Keep one of them.")
    if found:
        return Pairs(found[0], limits)
    known = languages(directory)
    if language in known:
        raise GradsieveError(f"{directory} has no {split} data for {language}: add {stem}.tsv (source TAB English).")
    raise GradsieveError(
        f"{directory} has no {split} data for the language {language!r}: no {stem}.tsv, nor {stem}.{language} with "
        f"{stem}.en (.gz or not). It has training data for {', '.join(known) or 'no language'}."
    )


def _forms(directory: Path, split: str, language: str) -> list[list[Path]]:
    """The files of a split, in each form in which it is there: one at best."""
    endings = [("tsv",), ("tsv.gz",), *((f"{language}{a}", f"en{b}") for a in ("", ".gz") for b in ("", ".gz"))]
    forms = [[directory / f"{split}.{language}-en.{ending}" for ending in form] for form in endings]
    return [form for form in forms if all(path.is_file() for path in form)]


def _lines(path: Path) -> Iterator[str]:
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                yield line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise GradsieveError(
            f"{path}, line {number}: byte {error.start + 1} is not UTF-8. Convert the file: iconv -t UTF-8"
        ) from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise GradsieveError(f"{path} is damaged after line {number}: {error}. Make or fetch it again.") from error
    except OSError as error:
        raise GradsieveError(f"cannot read {path}: {error.strerror or error}.") from error
    if not number:
        raise GradsieveError(f"{path} is empty. Give it a pair on each line, or remove it.")


def _tsv(path: Path) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(_lines(path), 1):
        columns = line.split("\t")
        if len(columns) != 2:
            raise GradsieveError(
                f"{path}, line {number}: {len(columns) - 1} TABs where one must stand, between source and English."
            )
        yield columns[0].strip(), columns[1].strip()


def _moses(first: Path, second: Path) -> Iterator[tuple[str, str]]:
    for number, (source, english) in enumerate(zip_longest(_lines(first), _lines(second)), 1):
        if source is None or english is None:
            short, long = (first, second) if source is None else (second, first)
            raise GradsieveError(
                f"{short} ends after line {number - 1}, where {long} goes on. Both need a line for each pair."
            )
        yield source.strip(), english.strip()


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

    def source(self, targets: Tensor, groups: Tensor, generator: torch.Generator) -> Ragged:
        """A source for each target, in the language drawn for it; at random where that language has several."""
        chance = torch.rand(len(targets), dtype=torch.float64, generator=generator)
        parts, places = [Ragged.of([])], [torch.zeros(0, dtype=torch.long)]
        for group in groups.unique().tolist():
            (place,) = torch.where(groups == group)
            first = torch.searchsorted(self.source_targets[group], targets[place])
            count = torch.searchsorted(self.source_targets[group], targets[place], right=True) - first
            if not bool(count.all()):
                raise GradsieveError(f"{self.languages[group]} was drawn for a target that has no source in it.")
            parts.append(self.sources[group][first + (chance[place] * count).long()])
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


def word_budget_batches(
    lengths: Tensor, budget: int = 1500, *, generator: torch.Generator, window: int = 4096
) -> list[Tensor]:
    """Indices of all items in random batches of at most `budget` words; an item longer than that is a batch alone.

    `lengths` (N,) count source and target. Items are shuffled, then sorted by length among `window` neighbours, so
    that a batch has little padding and is still a random one.
    """
    batches = []
    for part in torch.randperm(len(lengths), generator=generator).split(window):
        part = part[lengths[part].argsort(stable=True)]
        ends = lengths[part].cumsum(0)
        begin = 0
        while begin < len(part):
            before = int(ends[begin - 1]) if begin else 0
            end = max(begin + 1, int(torch.searchsorted(ends, before + budget, right=True)))
            batches.append(part[begin:end])
            begin = end
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]
