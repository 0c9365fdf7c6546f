"""The translation model in a benchmark: the real loop's parts on random sentences in eight languages."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.optim import Adam

from ..translation.corpus import MultiWay
from ..translation.methods import METHODS, Bench
from ..translation.model import build_translator
from ..translation.ragged import EOS, Ragged
from ..translation.recipe import DataSettings, GroupSettings, ModelSettings, TranslationRecipe
from ..translation.stream import Stream
from ..translation.train import accumulate
from .timing import Step

LANGUAGES, TARGETS, PIECES, LONGEST = 8, 4000, 4000, 24


def random_corpus(generator: torch.Generator) -> MultiWay:
    """Every target in half of the languages, sentences of up to LONGEST pieces."""

    def sentences(count: int, pieces: int) -> Ragged:
        lengths = torch.randint(2, LONGEST + 1, (count,), generator=generator)
        ids = torch.randint(4, pieces, (int(lengths.sum()),), generator=generator, dtype=torch.int32)
        ragged = Ragged(ids, torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]))
        ragged.values[ragged.offsets[1:] - 1] = EOS
        return ragged

    available = torch.rand(TARGETS, LANGUAGES, generator=generator) < 0.5
    available[:, 1] |= ~available.any(1)
    places = tuple(available[:, group].nonzero()[:, 0] for group in range(LANGUAGES))
    return MultiWay(
        tuple(f"l{group}" for group in range(LANGUAGES)),
        sentences(TARGETS, PIECES),
        available,
        tuple(sentences(len(its), LANGUAGES * PIECES // 2) for its in places),
        places,
        {},
        "random",
    )


def translation_steps(device: torch.device, hidden: int = 256) -> dict[str, Callable[[], Step]]:
    """By method, what makes a training step of it; DDS updates its scorer as often as the recipe `translation` does."""
    corpus = random_corpus(torch.Generator().manual_seed(0))
    recipe = TranslationRecipe(
        name="bench",
        task="translation",
        description="",
        steps=1000,
        data=DataSettings(target="l0"),
        model=ModelSettings(hidden=hidden),
        dds=GroupSettings(items_between=2000, updates=10),
        tcs_dds=GroupSettings(items_between=2000, updates=10),
    )

    def make(method: str) -> Step:
        torch.manual_seed(0)
        model = build_translator("lstm", LANGUAGES * PIECES // 2, PIECES, hidden=hidden).to(device)
        bench = Bench(recipe, model, corpus.available, 0, 1, torch.linspace(1, 0, LANGUAGES), 0)
        way, parameters = METHODS[method](bench), list(model.parameters())
        optimizer = Adam(parameters, lr=1e-3)
        stream = Stream(
            corpus, way, words=recipe.batch_words, batching="language", pool=recipe.pool, seed=0, device=device
        )
        batches, learned = iter(stream), True

        def step() -> None:
            nonlocal learned
            optimizer.zero_grad()
            for part in next(batches):
                gradients = torch.autograd.grad(way.loss(part.batch), parameters)
                if way.observes:
                    way.observe(part.group, gradients)
                accumulate(parameters, gradients, part)
            nn.utils.clip_grad_norm_(parameters, recipe.optimizer.clip)
            optimizer.step()
            learned = way.step() is not None

        return Step(step, lambda: learned or not way.observes)

    return {method: partial(make, method) for method in METHODS}
