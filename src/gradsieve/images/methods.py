"""The methods by name: which examples each may train on, and how each is made from a recipe."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from ..baselines import SPCL, BatchWeight, MentorNet, Uniform
from ..errors import GradsieveError
from ..networks import ConvScorer, MLPScorer, SignalScorer, like
from ..parallel import unwrapped
from ..parameters import LossFn, device_of
from ..randomness import RandomStream
from ..record import StepRecord
from ..reweight import DDS
from .data import ImageSet, Splits
from .recipe import ImageRecipe, ScorerSettings
from .stream import Stream


class Method(Protocol):
    """What the loop asks of DDS and of every baseline."""

    def loss(self, batch: Any) -> Tensor: ...
    def step(self) -> StepRecord | None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Bench:
    """All that a method may be made from."""

    recipe: ImageRecipe
    model: nn.Module
    loss_fn: LossFn
    optimizer: Optimizer
    dev: Stream
    shape: tuple[int, int, int]
    num_classes: int
    seed: int


def uniform(bench: Bench) -> Method:
    return Uniform(bench.model, bench.loss_fn)


def spcl(bench: Bench) -> Method:
    settings = bench.recipe.spcl
    full_at = max(1, round(settings.full_at * bench.recipe.steps))
    return SPCL(bench.model, bench.loss_fn, start=settings.start, full_at=full_at)


def batchweight(bench: Bench) -> Method:
    settings = bench.recipe.batchweight.model_dump()
    return BatchWeight(bench.model, bench.loss_fn, bench.dev, seed=bench.seed, **settings)


def mentornet(bench: Bench) -> Method:
    settings = bench.recipe.mentornet
    return MentorNet(
        bench.model,
        bench.loss_fn,
        bench.dev,
        bench.num_classes,
        total_steps=bench.recipe.steps,
        mentor_optimizer=lambda mentor: Adam(mentor.parameters(), lr=settings.lr, fused=True),
        percentile=settings.percentile,
        burn_in=settings.burn_in,
        seed=bench.seed,
    )


def dds(bench: Bench) -> Method:
    scorer, settings = build_scorer(bench), bench.recipe.dds.model_dump()
    optimizer = Adam(scorer.parameters(), lr=bench.recipe.scorer.lr, fused=True)
    return DDS(
        bench.model,
        scorer,
        bench.loss_fn,
        bench.optimizer,
        bench.dev,
        scorer_optimizer=optimizer,
        seed=bench.seed,
        **settings,
    )


METHODS: dict[str, Callable[[Bench], Method]] = {
    "uniform": uniform,
    "uniform+dev": uniform,
    "spcl": spcl,
    "batchweight": batchweight,
    "mentornet": mentornet,
    "dds": dds,
    "dds-retrained": dds,
    "oracle": uniform,
}


def training_set(method: str, splits: Splits) -> ImageSet:
    """The examples that the method may train on."""
    if method == "uniform+dev":
        return splits.train + splits.dev
    if method != "oracle":
        return splits.train
    if splits.damaged is None or not splits.damaged.any():
        raise GradsieveError(
            "the oracle trains on the examples that were not damaged, but here no damage is known. "
            "Make some, for instance with --set damage.kind=uniform."
        )
    if splits.damaged.all():
        raise GradsieveError("the oracle has nothing to train on: every example is damaged. Lower damage.share.")
    return splits.train[~splits.damaged]


def training_damage(method: str, splits: Splits) -> Tensor | None:
    """Which of the examples of `training_set` have a label made wrong; None where nobody damaged anything."""
    damaged = splits.damaged
    if damaged is None:
        return None
    if method == "uniform+dev":
        return torch.cat([damaged, torch.zeros(len(splits.dev), dtype=torch.bool)])
    return damaged[~damaged] if method == "oracle" else damaged


def training_weights(method: str, splits: Splits) -> Tensor | None:
    """What the losses of the examples of `training_set` are multiplied by; None for 1 everywhere."""
    weights = splits.weights
    if weights is None or method not in ("uniform+dev", "oracle"):
        return weights
    if method == "uniform+dev":
        return torch.cat([weights, torch.ones(len(splits.dev))])
    assert splits.damaged is not None
    return weights[~splits.damaged]


def build_scorer(bench: Bench) -> nn.Module:
    return make_scorer(bench.recipe.scorer, unwrapped(bench.model), bench.shape, bench.num_classes, bench.seed)


def make_scorer(
    settings: ScorerSettings, model: nn.Module, shape: tuple[int, ...], num_classes: int, seed: int
) -> nn.Module:
    """The recipe's scorer on the model's device, from a random stream of its own or from the file of an earlier run."""
    device = device_of(model)
    kind, _, label = settings.kind.partition("+")
    classes = num_classes if label else None
    scorer: nn.Module
    with RandomStream(device, seed):
        if kind == "signal":
            scorer = SignalScorer()
        elif kind == "paper":
            scorer = like(model, label=bool(label))
        elif kind == "conv":
            scorer = ConvScorer(shape[0], classes)
        else:
            scorer = MLPScorer(torch.Size(shape).numel(), classes)
    if settings.init is not None:
        if not settings.init.is_file():
            raise GradsieveError(f"scorer.init={settings.init} is no file.")
        try:
            scorer.load_state_dict(load_file(settings.init))
        except (OSError, SafetensorError, RuntimeError) as error:
            reason = str(error).splitlines()[-1].strip()
            raise GradsieveError(
                f"scorer.init={settings.init} does not fit a {settings.kind} scorer of this recipe: {reason}"
            ) from error
    return scorer.to(device)
