"""Text as a recipe describes it: found, cleaned, cut into pieces, its languages compared. Loaded once per process."""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from ..baselines.tcs import frequent_ngrams, ngram_overlap
from ..errors import GradsieveError
from ..runs.checkpoint import save_json
from .corpus import MultiWay, load_corpus
from .demo_corpus import write_demo_corpus
from .pairs import Limits, languages, read_pairs
from .recipe import DataSettings, TranslationRecipe
from .vocabulary import Texts, Vocabulary, learn_vocabulary

Note = Callable[[str], None]
Sentences = list[tuple[str, str]]


@dataclass(frozen=True)
class Text:
    """All that a run reads."""

    corpus: MultiWay
    vocabulary: Vocabulary
    dev: Sentences
    """(source, English) of the low-resource language."""
    test: Sentences
    target: int
    """The low-resource language's place among the corpus's languages."""
    related: int
    similarities: Tensor
    """Of each language to it, (n,)."""
    notes: tuple[str, ...]
    """What a person should know of the text."""

    @property
    def checksum(self) -> str:
        content = repr((self.corpus.checksum, self.vocabulary.checksum, self.dev, self.test))
        return hashlib.sha256(content.encode()).hexdigest()[:16]


def load_text(recipe: TranslationRecipe, data: Path | None) -> Text:
    """The recipe's text, from the folder `data` unless the recipe brings its own."""
    if recipe.data.name == "files" and data is None:
        raise GradsieveError(
            f"recipe {recipe.name} needs {recipe.needs}: give the folder with --data. "
            "`gradsieve download ted --out DIR` fetches the paper's."
        )
    return _loaded(recipe.data, recipe.tcs.most_frequent, data)


@lru_cache(maxsize=1)
def _loaded(settings: DataSettings, most_frequent: int, data: Path | None) -> Text:
    if settings.name == "files":
        assert data is not None
        return _read(settings, most_frequent, data)
    with TemporaryDirectory() as folder:
        write_demo_corpus(Path(folder))
        return _read(settings, most_frequent, Path(folder))


def _read(settings: DataSettings, most_frequent: int, data: Path) -> Text:
    names = list(settings.languages) or languages(data)
    if settings.target not in names:
        raise GradsieveError(
            f"data.target={settings.target} is not among the languages {', '.join(names) or '(none)'}. "
            "Name the low-resource language with --set data.target=xx."
        )
    limits = Limits(settings.max_words, settings.max_ratio)
    cache = settings.cache or cache_folder()
    notes: list[str] = []
    pairs = {name: read_pairs(data, "train", name, limits) for name in names}
    vocabulary = learn_vocabulary(pairs, settings.pieces, cache=cache, on_note=notes.append)
    corpus = load_corpus(data, names, settings.target, vocabulary, limits)
    for name, dropped in corpus.dropped.items():
        if dropped.kept < dropped.kept + dropped.empty + dropped.overlong + dropped.ratio:
            notes.append(f"{name}: {dropped}.")
    target = names.index(settings.target)
    file = cache / f"similarity-{corpus.checksum}-{settings.target}-{most_frequent}.json"
    similarities = _similarities({name: Texts([its], 0) for name, its in pairs.items()}, target, most_frequent, file)
    related = _related(settings, names, target, similarities)
    listed = ", ".join(f"{name} {value:.2f}" for name, value in zip(names, similarities.tolist(), strict=True))
    notes.append(f"share of character n-grams in common with {settings.target}: {listed}.")
    dev, test = (list(read_pairs(data, split, settings.target)) for split in ("dev", "test"))
    return Text(corpus, vocabulary, dev, test, target, related, similarities, tuple(notes))


def _similarities(texts: dict[str, Texts], target: int, most_frequent: int, file: Path) -> Tensor:
    """similarity(S_i, S) of TCS for all languages, (n,); from `file` if it is there."""
    if file.is_file():
        return torch.tensor(json.loads(file.read_text()))
    ngrams = [frequent_ngrams(its, most_frequent=most_frequent) for its in texts.values()]
    found = [ngram_overlap(its, ngrams[target]) for its in ngrams]
    save_json(file, found)
    return torch.tensor(found)


def _related(settings: DataSettings, names: list[str], target: int, similarities: Tensor) -> int:
    if settings.related is None:
        others = similarities.clone()
        others[target] = -1
        return int(others.argmax())
    if settings.related not in names or settings.related == settings.target:
        raise GradsieveError(
            f"data.related={settings.related} must be one of {', '.join(n for n in names if n != settings.target)}."
        )
    return names.index(settings.related)


def cache_folder() -> Path:
    """Where programs of the user's keep what they can make again."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "gradsieve"
