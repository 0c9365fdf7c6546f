"""Text to ids of pieces and back: SentencePiece models, one for each source language and one for English."""

import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import sentencepiece
import torch

from ..errors import GradsieveError
from ..runs.checkpoint import written_whole
from .pairs import ENGLISH
from .ragged import BOS, EOS, PAD, UNK, Ragged

SPECIAL = 4
MAX_SENTENCES = 500_000
"""More text than this teaches a vocabulary little, and SentencePiece keeps it all in memory."""


class Vocabulary:
    """The models of all languages, from their serialized form, which is what a checkpoint keeps of them.

    A source language has pieces of its own, so that a large one does not crowd out a small one. All share one table
    of embeddings, in which a piece that several languages have has one row: related languages spell many words alike,
    and what the model learns of such a word in the large language then holds in the small one.
    """

    def __init__(self, sources: Mapping[str, bytes], target: bytes):
        self.sources, self.target = dict(sources), target
        self._models = {language: _load(model) for language, model in [*sources.items(), (ENGLISH, target)]}
        ids: dict[str, int] = {}
        self._tables = {}
        for language in sources:
            model = self._models[language]
            pieces = (model.IdToPiece(i) for i in range(SPECIAL, model.GetPieceSize()))
            shared = [ids.setdefault(piece, SPECIAL + len(ids)) for piece in pieces]
            self._tables[language] = torch.tensor([*range(SPECIAL), *shared], dtype=torch.int32)
        self.source_size = SPECIAL + len(ids)
        self.target_size: int = self._models[ENGLISH].GetPieceSize()
        self._tables[ENGLISH] = torch.arange(self.target_size, dtype=torch.int32)

    def save(self, folder: Path) -> None:
        """A SentencePiece model for each language, ``xx.model``."""
        for number, (language, model) in enumerate([*self.sources.items(), (ENGLISH, self.target)]):
            with written_whole(folder / f"{number:03}.{language}.model") as place:
                place.write_bytes(model)

    @classmethod
    def load(cls, folder: Path) -> "Vocabulary":
        """What `save` wrote; the order of the languages is part of it."""
        files = sorted(folder.glob("*.model"))
        models = {file.name.split(".")[1]: file.read_bytes() for file in files}
        if ENGLISH not in models:
            raise GradsieveError(f"{folder} holds no vocabulary.")
        target = models.pop(ENGLISH)
        return cls(models, target)

    @property
    def checksum(self) -> str:
        digest = hashlib.sha256(self.target)
        for language, model in self.sources.items():
            digest.update(language.encode() + model)
        return digest.hexdigest()[:16]

    def encode(self, language: str, texts: Sequence[str]) -> Ragged:
        """Ids of the pieces of each text, and EOS: no sentence is without length, which packed sequences demand."""
        if language not in self._models:
            raise GradsieveError(f"the vocabulary has no language {language}; it has {', '.join(self._models)}.")
        model = self._models[language]
        ids = Ragged.of(model.Encode(list(texts), add_eos=True, num_threads=torch.get_num_threads()))
        return Ragged(self._tables[language][ids.values], ids.offsets)

    def decode(self, sentences: Iterable[Sequence[int]]) -> list[str]:
        """English text as people write it, each sentence up to its EOS; unknown pieces show as U+2047."""
        cut = [list(ids[: ids.index(EOS)] if EOS in ids else ids) for ids in map(list, sentences)]
        return [text.strip() for text in self._models[ENGLISH].Decode(cut)]


def learn_vocabulary(
    pairs: Mapping[str, Iterable[tuple[str, str]]],
    size: int = 8000,
    *,
    target_size: int | None = None,
    cache: Path | None = None,
    on_note: Callable[[str], None] = lambda note: None,
) -> Vocabulary:
    """From the training pairs (source, English) of each language, which are read several times and never held.

    `size` pieces for each source language, `target_size` (or as many) for English; fewer where the text has no more,
    which `on_note` hears of. `cache`: a folder that keeps the models for the next time.
    """
    models = {}
    texts = {language: Texts([its], 0) for language, its in pairs.items()} | {ENGLISH: Texts([*pairs.values()], 1)}
    for language, its in texts.items():
        wanted = target_size or size if language == ENGLISH else size
        models[language] = learn_pieces(its, wanted, name=language, cache=cache)
        if (found := _load(models[language]).GetPieceSize()) < wanted:
            on_note(f"the vocabulary of {language} has {found:,} pieces, not {wanted:,}: its text has no more.")
    target = models.pop(ENGLISH)
    return Vocabulary(models, target)


@dataclass(frozen=True)
class Texts:
    """One side of some pairs: 0 for the source, 1 for English. May be read as often as the pairs."""

    pairs: Sequence[Iterable[tuple[str, str]]]
    side: int

    def __iter__(self) -> Iterator[str]:
        return (pair[self.side] for part in self.pairs for pair in part)


def learn_pieces(texts: Iterable[str], size: int, *, name: str, cache: Path | None = None) -> bytes:
    """A unigram model of about `size` pieces, serialized; the same text and size give the same model.

    English, which is the output, keeps its characters as they are; sources are normalized (NFKC).
    """
    settings: dict[str, Any] = {
        "model_type": "unigram",
        "vocab_size": size,
        "hard_vocab_limit": False,
        "normalization_rule_name": "identity" if name == ENGLISH else "nmt_nfkc",
        "max_sentence_length": 1 << 14,
        "pad_id": PAD,
        "unk_id": UNK,
        "bos_id": BOS,
        "eos_id": EOS,
        "num_threads": 1,
    }
    digest = hashlib.sha256(f"{sentencepiece.__version__} {settings}".encode())
    count = 0
    for text in texts:
        digest.update(text.encode() + b"\n")
        count += 1
    if not count:
        raise GradsieveError(f"there is no text to learn a vocabulary of {name} from: cleaning dropped all of it.")
    path = cache / f"{name}-{digest.hexdigest()[:16]}.model" if cache else None
    if path and path.is_file():
        return path.read_bytes()
    writer = BytesIO()
    sample = distinct(texts, every=-(-count // MAX_SENTENCES))
    try:
        sentencepiece.SentencePieceTrainer.Train(
            sentence_iterator=sample, model_writer=writer, minloglevel=2, **settings
        )
    except (RuntimeError, OSError) as error:
        reason = str(error).split("]")[-1].strip()
        raise GradsieveError(f"SentencePiece can make no vocabulary of {size:,} pieces for {name}: {reason}") from error
    if path:
        with written_whole(path) as place:
            place.write_bytes(writer.getvalue())
    return writer.getvalue()


def distinct(texts: Iterable[str], every: int) -> Iterator[str]:
    """Each text once, of one in `every`; chosen by checksum, so that one which stands in many languages counts once."""
    seen = set()
    for text in texts:
        if zlib.crc32(text.encode()) % every == 0 and text not in seen:
            seen.add(text)
            yield text


def _load(model: bytes) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_proto=model)
