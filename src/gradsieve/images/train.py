"""One training run, top to bottom: any method, any recipe, from data to result, and on from wherever it was stopped."""

import math
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ..errors import GradsieveError
from ..parameters import to_device, untouched
from ..randomness import RandomStream
from ..reweight import DDS
from ..runs.directory import RunDirectory
from ..runs.journal import Journal
from ..runs.progress import Progress
from ..runs.signature import environment, signature
from ..runs.team import Team
from ..runs.timing import Times
from ..scorer import checked_scores
from .data import ImageSet, Splits
from .evaluate import EVALUATION_BATCH, Preparation, evaluate
from .examples import describe, look, save_examples
from .load import load_splits
from .methods import METHODS, Bench, training_damage, training_set, training_weights
from .models import build_model
from .recipe import ImageRecipe, OptimizerSettings
from .scoring import final_direction, save_scorer
from .stream import Batch, InOrder, Shuffled, Stream


def train(
    recipe: ImageRecipe,
    method: str,
    *,
    seed: int,
    data: Path | None,
    out: Path,
    resume: bool,
    device: torch.device,
    progress: Progress,
) -> dict[str, Any]:
    """Trains, measures and writes the run directory `out`; returns what result.json holds."""
    splits = load_splits(recipe, data, seed)
    run = RunDirectory(out, recipe, method, seed, splits.checksum, resume=resume)
    if run.result is not None:
        return run.result
    setup = SetUp(recipe, method, splits, seed, device)
    setup.try_out()
    signed = signature(recipe, method, seed, splits.checksum)
    with run.opened(environment(device) | {"signature": signed}):
        earlier = 0.0
        if method == "dds-retrained":  # a scorer first, then the model again from scratch with it
            first = out / "first"
            found = train(recipe, "dds", seed=seed, data=data, out=first, resume=True, device=device, progress=progress)
            earlier = found["seconds"]
            scorer = recipe.scorer.model_copy(update={"init": first / "final/scorer.safetensors"})
            setup = SetUp(recipe.model_copy(update={"scorer": scorer}), method, splits, seed, device)
        result: dict[str, Any] = {"recipe": recipe.name, "method": method, "seed": seed}
        result |= _trained(setup, run, progress)
        result |= {"seconds": earlier + result["seconds"], "signature": signed}
        run.finish(result)
    return result


def check(recipe: ImageRecipe, method: str, *, data: Path | None, device: torch.device) -> None:
    """Raises what `train` would refuse, without training."""
    SetUp(recipe, method, load_splits(recipe, data, 0), 0, device).try_out()


class SetUp:
    """All that a run is made of, from recipe and seed."""

    def __init__(self, recipe: ImageRecipe, method: str, splits: Splits, seed: int, device: torch.device):
        self.recipe, self.method, self.splits, self.seed, self.device = recipe, method, splits, seed, device
        self.examples = training_set(method, splits)
        self.prepare = prepare = Preparation(recipe, splits, seed, device)
        team = Team()
        train_batches = Shuffled(self.examples, recipe.batch_size, seed, "train", team=team)
        dev_batches = Shuffled(splits.dev, recipe.dev_batch_size, seed, "dev", team=team)
        team.check_divides(train_batches.batch_size, "batch_size")
        team.check_divides(dev_batches.batch_size, "dev_batch_size, or the whole dev set,")
        weights = training_weights(method, splits)
        self.stream = Stream(train_batches, prepare.training, device, recipe.data.workers, weights)
        dev = Stream(dev_batches, prepare.evaluation, device, recipe.data.workers)
        channels, height, width = splits.dev.read(torch.tensor([0]))[0].shape[1:]
        self.shape = shape = (channels, height, width)

        torch.manual_seed(seed)
        model = build_model(recipe.model.name, shape=shape, num_classes=splits.num_classes).to(device)
        if recipe.model.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.model = model
        self.optimizer = build_optimizer(recipe.optimizer, model)
        self.schedule = LambdaLR(self.optimizer, lambda t: learning_rate_factor(t, recipe.steps, recipe.optimizer))
        self.average = moving_average(model, recipe.optimizer.average)
        if recipe.model.compile:
            model.compile()
        bench = Bench(recipe, team.wrapped(model), cross_entropy, self.optimizer, dev, shape, splits.num_classes, seed)
        self.way = METHODS[method](bench)
        team.reseed(seed)
        self.low = torch.autocast(device.type, torch.bfloat16, enabled=recipe.model.precision == "bf16")
        self.evaluated: nn.Module = model if self.average is None else self.average.module

    def try_out(self) -> None:
        """One forward pass on a training batch, which leaves no trace: does the model fit the data, does the scorer?"""
        pixels, labels, index = to_device(self.stream.batches[0], self.device)
        name, shape = self.recipe.model.name, tuple(pixels.shape)
        try:
            with RandomStream(self.device, 0), untouched(self.model), torch.no_grad(), self.low:
                found = self.model(self.prepare.training(pixels, 0))
        except Exception as error:  # a model of the user's may fail in any way
            raise GradsieveError(f"model {name} fails on a batch of images {shape}: {error}") from error
        wanted = (len(labels), self.splits.num_classes)
        if not isinstance(found, Tensor) or found.shape != wanted:
            got = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise GradsieveError(f"model {name} must give logits of shape {wanted} for {shape} images, not {got}.")
        if isinstance(self.way, DDS):
            self._try_out_scorer(self.way.scorer, (pixels, labels, index))

    def _try_out_scorer(self, scorer: nn.Module, batch: Batch) -> None:
        """One pass without a trace, by signals that say nothing: does the scorer fit the data?"""
        settings, nothing = self.recipe.scorer, torch.zeros(len(batch[1]), device=self.device)
        signals = dict.fromkeys(getattr(scorer, "signals", ()), nothing)
        try:
            with RandomStream(self.device, 0), untouched(scorer), torch.no_grad(), self.low:
                ready = (self.prepare.training(batch[0], 0), *batch[1:])
                checked_scores(scorer(ready, **signals), nothing)
        except Exception as error:  # it may be made like a model of the user's
            raise GradsieveError(
                f"scorer.kind={settings.kind} with scorer.shrink={settings.shrink} fails on a batch of images "
                f"{tuple(batch[0].shape)}: {error}. Choose a smaller scorer.shrink or another scorer.kind."
            ) from error

    @property
    def last_layer(self) -> bool:
        """Whether alignment is measured there alone."""
        return isinstance(self.way, DDS) and self.way.last_layer is not None

    @property
    def trust(self) -> float:
        """How far the scorer's scores count at the moment."""
        return float(self.way.learner.trust) if isinstance(self.way, DDS) else 1.0

    def direction(self) -> dict[str, Tensor] | None:
        """The dev gradient at the final parameters, if the scorer of DDS asks for agreement; empty if it gets none."""
        if not isinstance(self.way, DDS) or "alignment" not in getattr(self.way.scorer, "signals", ()):
            return None
        if not self.way.tells_alignment:
            return {}
        batches = Shuffled(self.splits.dev, self.recipe.dev_batch_size, self.seed, "final")
        one_pass = islice(Stream(batches, self.prepare.evaluation, self.device), batches.per_pass)
        optimizer = self.optimizer if self.recipe.dds.optimizer_aware else None
        with RandomStream(self.device, self.seed):
            mode = self.recipe.dds.dev_mode
            found = final_direction(self.evaluated, cross_entropy, one_pass, optimizer, mode=mode)
        last = self.way.last_layer
        return found if last is None else {n: v for n, v in found.items() if n in (last.weight, last.bias)}

    def evaluate(self, images: ImageSet) -> dict[str, float]:
        return evaluate(self.evaluated, images, self.prepare, self.low)

    def evaluate_holdout(self) -> dict[str, dict[str, float]]:
        """On the dev examples that the method does not see, if any were kept back."""
        held = self.splits.dev_holdout
        return {} if held is None else {"dev_holdout": self.evaluate(held)}

    def look(self) -> dict[str, Tensor]:
        """What the model makes of each training example."""
        batches = InOrder(self.examples, EVALUATION_BATCH)
        stream = Stream(batches, self.prepare.evaluation, self.device, self.recipe.data.workers)
        return look(self.evaluated, stream, self.low)


def _trained(setup: SetUp, run: RunDirectory, progress: Progress) -> dict[str, Any]:
    """The loop."""
    recipe, way, model, optimizer, average = setup.recipe, setup.way, setup.model, setup.optimizer, setup.average
    parts = {"model": model, "optimizer": optimizer, "schedule": setup.schedule, "method": way, "stream": setup.stream}
    damaged = training_damage(setup.method, setup.splits)
    journal = Journal(
        run,
        recipe,
        parts if average is None else parts | {"average": average},
        evaluated=setup.evaluated,
        evaluate_dev=lambda: setup.evaluate(setup.splits.dev),
        evaluate_more=setup.evaluate_holdout,
        num_examples=len(setup.examples),
        on_checkpoint=lambda: save_examples(run, setup.splits, setup.examples, damaged) if run.team.first else None,
        device=setup.device,
        progress=progress,
    )
    if run.team.first:
        describe(run, setup.splits, setup.examples)
    step = journal.begin(f"{setup.method}, seed {setup.seed}")
    batches, times = iter(setup.stream), journal.times
    while step < recipe.steps:
        with times.part("data"):
            batch = next(batches)
        optimizer.zero_grad()
        with times.part("loss"), setup.low:
            loss = way.loss(batch)
        with times.part("update"):
            loss.backward()
            optimizer.step()
        with times.part("method"):
            record = way.step()
        setup.schedule.step()
        if average is not None:
            average.update_parameters(model)
        step += 1
        journal.after_step(step, loss, record, index=batch[2])

    if run.team.first:
        _write_down(setup, run, times, damaged)
    return journal.result(lambda which: setup.evaluate(setup.splits.test)) | {"skipped": getattr(way, "skipped", 0)}


def _write_down(setup: SetUp, run: RunDirectory, times: Times, damaged: Tensor | None) -> None:
    """What the run knows of its examples, and the scorer for use elsewhere."""
    with times.around("records"):
        save_examples(run, setup.splits, setup.examples, damaged, setup.look())
    if (scorer := getattr(setup.way, "scorer", None)) is not None:
        save_scorer(
            run, scorer, setup.splits, setup.shape, setup.direction(), last_layer=setup.last_layer, trust=setup.trust
        )
    if setup.splits.damaged is not None:
        run.save_tensors("damaged", {"damaged": setup.splits.damaged})


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    """One loss per example; times its weight, if the batch has any."""
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return losses * batch[3] if len(batch) > 3 else losses


def build_optimizer(settings: OptimizerSettings, model: nn.Module) -> Optimizer:
    if settings.name == "adam":
        return Adam(model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay)
    return SGD(
        model.parameters(),
        lr=settings.lr,
        momentum=settings.momentum,
        nesterov=settings.nesterov,
        weight_decay=settings.weight_decay,
    )


def learning_rate_factor(t: int, steps: int, settings: OptimizerSettings) -> float:
    """Of the learning rate of the update after `t` others: a climb from 0, then half a cosine, or level ground."""
    warm = min(1.0, (t + 1) / settings.warmup) if settings.warmup else 1.0
    return warm * (0.5 + 0.5 * math.cos(math.pi * t / steps)) if settings.cosine else warm


def moving_average(model: nn.Module, rate: float) -> AveragedModel | None:
    """Of all parameters and, as the paper does, of BatchNorm's statistics."""
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(rate), use_buffers=True).eval() if rate else None
