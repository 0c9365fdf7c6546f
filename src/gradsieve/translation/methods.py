"""The methods by name: how each draws source languages, and what it learns from their gradients."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Adam

from ..baselines import SPCL, Uniform
from ..baselines.tcs import (
    Distribution,
    related_distribution,
    target_first_distribution,
    tcs_distribution,
    uniform_distribution,
)
from ..gradients import Gradients
from ..networks import GroupScorer
from ..parallel import World
from ..randomness import seeded
from ..record import GroupRecord
from ..resample import GroupDDS
from .recipe import GroupSettings, TranslationRecipe
from .translator import TranslationBatch, piece_counts, translation_loss

PRIOR_ITEMS = 100_000
"""Targets that a prior is learned from, at most."""


class Method(Protocol):
    """What loop and stream ask of every method."""

    observes: bool

    def times(self, available: Tensor) -> Tensor: ...
    def draw(self, available: Tensor) -> Tensor: ...
    def probabilities(self, available: Tensor) -> Tensor: ...
    def loss(self, batch: TranslationBatch) -> Tensor: ...
    def observe(self, group: int, gradients: Gradients) -> None: ...
    def step(self) -> GroupRecord | None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Bench:
    """All that a method may be made from."""

    recipe: TranslationRecipe
    model: nn.Module
    available: Tensor
    """(T, n), bool."""
    target: int
    related: int
    similarities: Tensor
    """Of each language to the low-resource one, (n,)."""
    seed: int

    def loss_fn(self, model: nn.Module, batch: TranslationBatch) -> Tensor:
        """One loss per sentence, scaled so that their mean is the mean over the batch's pieces."""
        losses = translation_loss(model, batch, label_smoothing=self.recipe.model.label_smoothing)
        return losses * (len(losses) / len(batch.places))

    def tcs(self) -> Distribution:
        return tcs_distribution(self.similarities, self.recipe.tcs.temperature)


class Fixed:
    """Languages from a distribution that training does not change.

    Args:
        by_pair: each sentence pair comes once in a pass, as where data are simply put together; else each target does.
    """

    observes = False

    def __init__(
        self, weighing: Uniform | SPCL, distribution: Distribution, generator: torch.Generator, *, by_pair: bool
    ):
        self.weighing, self.probabilities, self.generator, self.by_pair = weighing, distribution, generator, by_pair

    def times(self, available: Tensor) -> Tensor:
        languages = (self.probabilities(available) > 0).sum(1)
        return languages if self.by_pair else languages.clamp(max=1)

    def draw(self, available: Tensor) -> Tensor:
        return torch.multinomial(self.probabilities(available), 1, generator=self.generator).squeeze(1)

    def loss(self, batch: TranslationBatch) -> Tensor:
        return self.weighing.loss(batch)

    def observe(self, group: int, gradients: Gradients) -> None:
        pass

    def step(self) -> None:
        self.weighing.step()

    def state_dict(self) -> dict[str, Any]:
        return {"weighing": self.weighing.state_dict(), "random": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weighing.load_state_dict(state["weighing"])
        self.generator.set_state(state["random"])


class Learned(GroupDDS):
    """Algorithm 2: languages from a scorer that learns."""

    observes = True

    def __init__(self, weighing: Uniform, *arguments: Any, **settings: Any):
        super().__init__(*arguments, **settings)
        self.weighing, self.world = weighing, World(together=True)

    def times(self, available: Tensor) -> Tensor:
        return torch.ones(len(available), dtype=torch.long)

    def loss(self, batch: TranslationBatch) -> Tensor:
        return self.weighing.loss(batch)


def uniform(bench: Bench) -> Method:
    return _fixed(bench, Uniform(bench.model, bench.loss_fn), uniform_distribution, by_pair=True)


def related(bench: Bench) -> Method:
    distribution = related_distribution(bench.related, bench.target)
    return _fixed(bench, Uniform(bench.model, bench.loss_fn), distribution, by_pair=True)


def tcs(bench: Bench) -> Method:
    return _fixed(bench, Uniform(bench.model, bench.loss_fn), bench.tcs(), by_pair=False)


def spcl(bench: Bench) -> Method:
    settings = bench.recipe.spcl
    weighing = SPCL(
        bench.model,
        bench.loss_fn,
        start=settings.start,
        full_at=max(1, round(settings.full_at * bench.recipe.steps)),
        difficulty=lambda batch, losses: losses / piece_counts(batch),
    )
    return _fixed(bench, weighing, uniform_distribution, by_pair=True)


def dds(bench: Bench) -> Method:
    return _learned(bench, bench.recipe.dds, target_first_distribution(bench.target))


def tcs_dds(bench: Bench) -> Method:
    return _learned(bench, bench.recipe.tcs_dds, bench.tcs())


METHODS: dict[str, Callable[[Bench], Method]] = {
    "uniform": uniform,
    "spcl": spcl,
    "related": related,
    "tcs": tcs,
    "dds": dds,
    "tcs+dds": tcs_dds,
}


def _fixed(bench: Bench, weighing: Uniform | SPCL, distribution: Distribution, *, by_pair: bool) -> Fixed:
    return Fixed(weighing, distribution, seeded(bench.seed, "draws"), by_pair=by_pair)


def _learned(bench: Bench, settings: GroupSettings, prior: Distribution) -> Learned:
    count, generator = bench.available.shape[1], seeded(bench.seed, "draws")
    scorer = GroupScorer(count, generator=generator)
    method = Learned(
        Uniform(bench.model, bench.loss_fn),
        scorer,
        count,
        bench.target,
        scorer_optimizer=Adam(scorer.parameters(), lr=settings.lr),
        items_between=settings.items_between,
        updates=settings.updates,
        batch_size=settings.batch_size,
        decay=(settings.decay_old, settings.decay_new),
        cosine=settings.cosine,
        reward_scale=settings.reward_scale,
        psi_gradient=settings.psi_gradient,
        store_dtype=getattr(torch, settings.store),
        projection=settings.projection,
        generator=generator,
    )
    chosen = torch.randperm(len(bench.available), generator=generator)[:PRIOR_ITEMS]
    method.imitate(prior, bench.available[chosen], passes=settings.prior_passes, lr=settings.prior_lr)
    return method
