"""A small real corpus, made on the fly: names of countries, regions, languages and currencies from pycountry.

Belarusian is the low-resource language: a sixth of its names is for training, and Ukrainian, its relative, has nearly
all names. Hungarian and French are the others. To translate such names is mostly to spell them in another alphabet,
which a small model learns in minutes.
"""

import hashlib
import struct
from importlib.resources import files
from itertools import pairwise
from pathlib import Path

from ..errors import GradsieveError

TARGET, RELATED, OTHERS = "be", "uk", ("hu", "fr")
NUM_DEV, NUM_TEST, NUM_TRAIN = 400, 600, 800
"""For Belarusian; it has about 5,000 names."""
MAGIC = 0x950412DE


def write_demo_corpus(directory: Path) -> None:
    """Writes train.xx-en.tsv for all four languages, dev and test for Belarusian; the splits share no English name.

    Which names go where follows from a checksum of them: the same on every machine and, but for names that come and
    go, in every version of pycountry.
    """
    names = {language: _names(language) for language in (TARGET, RELATED, *OTHERS)}
    shuffled = sorted(names[TARGET], key=_checksum)
    bounds = (0, NUM_DEV, NUM_DEV + NUM_TEST, NUM_DEV + NUM_TEST + NUM_TRAIN)
    dev, test, train = (shuffled[a:b] for a, b in pairwise(bounds))
    held_out = {*dev, *test}
    parts = {f"dev.{TARGET}": dev, f"test.{TARGET}": test, f"train.{TARGET}": train}
    for language in (RELATED, *OTHERS):
        parts[f"train.{language}"] = [name for name in sorted(names[language], key=_checksum) if name not in held_out]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for stem, chosen in parts.items():
            its = names[stem.partition(".")[2]]
            text = "".join(f"{its[name]}\t{name}\n" for name in chosen)
            (directory / f"{stem}-en.tsv").write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise GradsieveError(f"cannot write to {directory}: {error.strerror or error}.") from error


def _names(language: str) -> dict[str, str]:
    """English to `language`. What is spelled as in English is left out: much of it was never translated."""
    names: dict[str, str] = {}
    folder = files("pycountry") / "locales" / language / "LC_MESSAGES"
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        for english, name in read_catalogue(file.read_bytes()):
            english, name = " ".join(english.split()), " ".join(name.split())
            if english and name and english != name and "\x04" not in english and "\0" not in english:
                names.setdefault(english, name)
    return names


def read_catalogue(raw: bytes) -> list[tuple[str, str]]:
    """The entries of a compiled gettext catalogue, original and translation.

    A magic number, a version, the number of strings, and where two tables begin: of originals and of translations,
    with a length and a place for each.
    """
    order = "<" if struct.unpack_from("<I", raw)[0] == MAGIC else ">"
    count, originals, translations = struct.unpack_from(f"{order}3I", raw, 8)

    def text(table: int, row: int) -> str:
        length, place = struct.unpack_from(f"{order}2I", raw, table + 8 * row)
        return raw[place : place + length].decode()

    return [(text(originals, row), text(translations, row)) for row in range(count)]


def _checksum(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()
