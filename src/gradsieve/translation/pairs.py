"""Parallel text in files: found, read, checked line by line, cleaned. A pass holds a few lines of it."""

import gzip
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path

from ..errors import GradsieveError

ENGLISH = "en"
NAME = re.compile(r"train\.([^.]+)-en\.[^.]+(?:\.gz)?")
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
