"""Fetches the paper's corpus: TED talks in 60 languages, made multi-way by Qi and others (2018)."""

import os
import tarfile
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory

from ..errors import GradsieveError
from ..runs.fetch import OnBytes, fetch
from .pairs import ENGLISH
from .pairs import languages as known_languages

TED_URL = "http://phontron.com/data/ted_talks.tar.gz"
TED_LANGUAGES = ("az", "be", "gl", "sk", "tr", "ru", "pt", "cs")
"""The paper's: four that are low-resource and the relative of each."""
SPLITS = ("test", "dev", "train")
MISSING = ("__NULL__", "_ _ NULL _ _")
"""The second is what a tokenizer made of the first."""


def download_ted(
    out: Path,
    languages: Sequence[str] = TED_LANGUAGES,
    url: str = TED_URL,
    on_bytes: OnBytes = lambda done, total: None,
) -> bool:
    """Writes `SPLIT.xx-en.tsv` into `out` for each language; False if they were there already.

    The text stays as it is published: tokenized. Files are moved into place whole, those for training last: where they
    lie, all do. `on_bytes(done, total)` hears of the progress; `total` is 0 where the server does not say.
    """
    if out.is_dir() and {*languages} <= {*known_languages(out)}:
        return False
    try:
        out.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=out, prefix=".ted-") as temporary:
            archive, texts = Path(temporary, "archive"), Path(temporary, "texts")
            texts.mkdir()
            fetch(url, archive, on_bytes)
            with tarfile.open(archive) as tar:
                members = {Path(member.name).name: member for member in tar if member.isfile()}
                for split in SPLITS:
                    if (member := members.get(f"all_talks_{split}.tsv")) is None:
                        raise GradsieveError(f"{url} is not the TED corpus: it has no all_talks_{split}.tsv.")
                    file = tar.extractfile(member)
                    assert file is not None  # it is a file
                    with file:
                        convert(file, texts, split, languages, f"{url}, {member.name}")
            for split in SPLITS:
                for path in sorted(texts.glob(f"{split}.*")):
                    os.replace(path, out / path.name)
    except (OSError, EOFError, HTTPException, tarfile.TarError) as error:
        raise GradsieveError(
            f"could not fetch {url} into {out} ({error}). Try again, or write {out}/train.xx-en.tsv by other means."
        ) from error
    return True


def convert(lines: Iterable[bytes], out: Path, split: str, languages: Sequence[str], where: str) -> None:
    """Rows `talk_name, en, ar, az, ...` to a file for each language, of the sentences that it has; none if none."""
    rows = (line.decode().rstrip("\r\n").split("\t") for line in lines)
    try:
        header = next(rows, [])
        if absent := [language for language in (ENGLISH, *languages) if language not in header]:
            raise GradsieveError(
                f"{where}: no column {', '.join(absent)}; there are {', '.join(header[1:]) or 'none'}."
            )
        english = header.index(ENGLISH)
        columns = {language: header.index(language) for language in languages}
        counts = dict.fromkeys(languages, 0)
        with ExitStack() as stack:
            files = {
                language: stack.enter_context((out / f"{split}.{language}-en.tsv").open("w", encoding="utf-8"))
                for language in languages
            }
            for number, row in enumerate(rows, 2):
                if len(row) != len(header):
                    raise GradsieveError(f"{where}, line {number}: {len(row)} columns, where there are {len(header)}.")
                if row[english] in MISSING:
                    continue
                for language, column in columns.items():
                    if row[column] not in MISSING:
                        files[language].write(f"{row[column]}\t{row[english]}\n")
                        counts[language] += 1
    except UnicodeDecodeError as error:
        raise GradsieveError(f"{where} is not UTF-8: {error.reason}. Fetch it again.") from error
    for language in [language for language, count in counts.items() if not count]:
        if split == "train":
            raise GradsieveError(f"{where} has no sentence in the language {language}.")
        (out / f"{split}.{language}-en.tsv").unlink()
