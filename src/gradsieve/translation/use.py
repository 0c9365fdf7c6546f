"""A trained model at work: `gradsieve translate RUN < text`."""

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file

from ..errors import GradsieveError
from .evaluate import translate
from .recipe import DecodeSettings, TranslationRecipe
from .train import build_model
from .vocabulary import Vocabulary

LINES = 512
"""Translated at once."""


class Trained:
    """The model of a run that has ended, or that is still going.

    Args:
        run: its folder.
        which: ``best``, the parameters that dev chose, or ``last``.
    """

    def __init__(self, run: Path, which: str, device: torch.device):
        try:
            found = json.loads((run / "recipe.json").read_text())
            self.recipe = TranslationRecipe.model_validate(found["recipe"])
            self.vocabulary = Vocabulary.load(run / "vocabulary")
        except (OSError, ValueError, KeyError, ValidationError) as error:
            raise GradsieveError(f"{run} is no run of a translation recipe; make one with gradsieve train.") from error
        files = sorted((run / "best").glob("*.safetensors")) if which == "best" else [run / "final/model.safetensors"]
        if not files or not files[-1].is_file():
            raise GradsieveError(f"{run} has no {which} parameters yet: the run has not come that far.")
        self.device = device
        self.model = build_model(self.recipe.model, self.vocabulary).to(device)
        try:
            self.model.load_state_dict(load_file(files[-1], device=str(device)))
        except (OSError, SafetensorError, RuntimeError) as error:
            raise GradsieveError(f"{files[-1]} cannot be read: {str(error).splitlines()[0]}") from error

    def translate(self, lines: Iterable[str], language: str | None = None, beam: int | None = None) -> Iterator[str]:
        """The English of each line, in order; an empty line stays one."""
        language = language or self.recipe.data.target
        if language not in self.vocabulary.sources:
            raise GradsieveError(
                f"the model does not know the language {language}; it knows {', '.join(self.vocabulary.sources)}."
            )
        settings = self.recipe.decode if beam is None else self.recipe.decode.model_copy(update={"beam": beam})
        stream = iter(lines)
        while chunk := [line.strip() for line in islice(stream, LINES)]:
            yield from self._chunk(chunk, language, settings)

    def _chunk(self, lines: list[str], language: str, settings: DecodeSettings) -> list[str]:
        full = [line for line in lines if line]
        found = iter(translate(self.model, self.vocabulary, language, full, settings, self.device))
        return [next(found) if line else "" for line in lines]
