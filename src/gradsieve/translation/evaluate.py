"""From a model to translations, and what they are worth: perplexity on dev, BLEU and chrF."""

import math
from collections.abc import Sequence

import torch

from ..parameters import untouched
from .decode import beam_search
from .ragged import Ragged, padded
from .recipe import DecodeSettings
from .stream import batch_of, on_device
from .translator import Translator, translation_loss
from .vocabulary import Vocabulary

SENTENCES = 64
"""At once."""


def by_length(lengths: torch.Tensor) -> list[torch.Tensor]:
    """Places of the sentences, alike in length, longest first, `SENTENCES` at a time."""
    return list(lengths.argsort(descending=True, stable=True).split(SENTENCES)) if len(lengths) else []


def translate(
    model: Translator,
    vocabulary: Vocabulary,
    language: str,
    texts: Sequence[str],
    settings: DecodeSettings,
    device: torch.device,
) -> list[str]:
    """The English of each text."""
    sources = vocabulary.encode(language, texts)
    translations = [""] * len(texts)
    for index in by_length(sources.lengths):
        source, lengths = (tensor.to(device, non_blocking=True) for tensor in padded(sources[index]))
        found = beam_search(
            model,
            source,
            lengths,
            beam=settings.beam,
            length_penalty=settings.length_penalty,
            max_ratio=settings.max_ratio,
        )
        for place, text in zip(index.tolist(), vocabulary.decode(found), strict=True):
            translations[place] = text
    return translations


@torch.no_grad()
def perplexity(model: Translator, sources: Ragged, targets: Ragged, device: torch.device) -> float:
    """exp of the mean loss of a piece."""
    total, count = torch.zeros((), dtype=torch.float64, device=device), 0
    with untouched(model, training=False):
        for index in by_length(sources.lengths + targets.lengths):
            batch = on_device(batch_of(sources[index], targets[index]), device)
            total += translation_loss(model, batch).sum().double()
            count += len(batch.places)
    return math.exp(min(50.0, total.item() / count))
