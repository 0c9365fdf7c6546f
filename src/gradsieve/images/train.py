"""One training run, top to bottom."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from ..baselines import Uniform
from ..errors import GradsieveError
from ..record import StepRecord
from ..reweight import DDS
from ..sampling import ScoreSampler
from .data import ImageSet, Splits

METHODS = ("uniform", "uniform+dev", "oracle", "oracle+dev", "dds")


class Method(Protocol):
    """What the loop asks of DDS and of every baseline."""

    def loss(self, batch: Any) -> Tensor: ...
    def step(self) -> StepRecord | None: ...


@dataclass(frozen=True)
class Budget:
    """What all methods of a comparison share."""

    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], Optimizer]
    steps: int
    batch_size: int
    dev_batch_size: int
    evaluate_every: int = 50
    cosine: bool = False
    """Whether the learning rate falls to zero along a half cosine; else it is constant."""


@dataclass
class Outcome:
    """Accuracies in per cent. `best_by_dev`: on test, at the latest step where dev accuracy was highest."""

    last: float = 0.0
    best_by_dev: float = 0.0
    seconds: float = 0.0
    effective_share: float = 1.0
    """Effective sample size over batch size, mean over the run."""
    skipped: int = 0
    right: list[float] = field(default_factory=list)
    """Per step, the mean weight of rightly labelled examples, where 1 is a uniform weight."""
    wrong: list[float] = field(default_factory=list)


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def training_set(method: str, splits: Splits) -> ImageSet:
    """The examples that the method may train on."""
    train = splits.train[~splits.damaged] if method.startswith("oracle") else splits.train
    if not method.endswith("+dev"):
        return train
    both = zip((train.images, train.labels), (splits.dev.images, splits.dev.labels), strict=True)
    return ImageSet(*(torch.cat(parts) for parts in both))


def train(
    method: str,
    splits: Splits,
    budget: Budget,
    *,
    seed: int,
    scorer: Callable[[nn.Module], nn.Module] | None = None,
    options: dict[str, Any] | None = None,
    sampled: bool = False,
    on_step: Callable[[], None] = lambda: None,
) -> Outcome:
    """Trains `budget.model` by `method` and measures it. `scorer`, `options` and `sampled` are for DDS."""
    if method not in METHODS:
        raise GradsieveError(f"unknown method {method!r}; choose one of {', '.join(METHODS)}.")
    torch.manual_seed(seed)
    model = budget.model()
    optimizer = budget.optimizer(model)
    half_wave = math.pi / budget.steps if budget.cosine else 0.0
    schedule = LambdaLR(optimizer, lambda t: 0.5 + 0.5 * math.cos(t * half_wave))
    data = training_set(method, splits)
    shuffle = torch.Generator().manual_seed(seed)
    loader = data.loader(budget.batch_size, generator=shuffle, drop_last=True)
    way: Method = Uniform(model, cross_entropy)
    if method == "dds":
        dev_loader = splits.dev.loader(budget.dev_batch_size, generator=torch.Generator().manual_seed(seed + 1))
        net = scorer(model) if scorer else None
        sampler = None
        if sampled and net is not None:
            sampler = ScoreSampler(data.dataset(), net, batch_size=budget.batch_size, generator=shuffle)
            loader = DataLoader(data.dataset(), budget.batch_size, sampler=sampler, drop_last=True)
        way = DDS(model, net, cross_entropy, optimizer, dev_loader, sampler=sampler, **options or {})

    outcome, weights, best_dev = Outcome(), [], -1.0
    start, paused = time.perf_counter(), 0.0
    step = 0
    while step < budget.steps:
        for batch in loader:
            optimizer.zero_grad()
            loss = way.loss(batch)
            loss.backward()
            optimizer.step()
            record = way.step()
            schedule.step()

            step += 1
            if record is not None:
                weights.append((record.weights, batch[2]))
            if step % budget.evaluate_every == 0 or step == budget.steps:
                before = time.perf_counter()
                dev = accuracy(model, splits.dev)
                if dev >= best_dev or step == budget.steps:
                    outcome.last = accuracy(model, splits.test)
                if dev >= best_dev:
                    best_dev, outcome.best_by_dev = dev, outcome.last
                paused += time.perf_counter() - before
            on_step()
            if step == budget.steps:
                break
    outcome.seconds = time.perf_counter() - start - paused
    _summarize(outcome, weights, splits.damaged)
    if isinstance(way, DDS):
        outcome.skipped = way.skipped
    return outcome


@torch.no_grad()
def accuracy(model: nn.Module, data: ImageSet) -> float:
    """Per cent of the labels that the model gets right, in eval mode."""
    training = model.training
    model.eval()
    right = sum(
        (model(images).argmax(1) == labels).sum()
        for images, labels in zip(data.images.split(500), data.labels.split(500), strict=True)
    )
    model.train(training)
    return 100 * float(right) / len(data)


def _summarize(outcome: Outcome, weights: list[tuple[Tensor, Tensor]], damaged: Tensor) -> None:
    if not weights:
        return
    relative = torch.stack([w * len(w) for w, _ in weights])  # (T, B), 1 = uniform
    wrong = damaged[torch.stack([index for _, index in weights])]  # (T, B)
    outcome.effective_share = float((1 / relative.square().mean(1)).mean())
    for mask, trace in ((~wrong, outcome.right), (wrong, outcome.wrong)):
        trace.extend(((relative * mask).sum(1) / mask.sum(1)).tolist())
