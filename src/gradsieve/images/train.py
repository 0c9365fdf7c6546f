"""One training run, top to bottom: any method, any recipe, from data to result, and on from wherever it was stopped."""

import math
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ..errors import GradsieveError
from ..runs.directory import RunDirectory
from ..runs.journal import Journal
from ..runs.progress import Progress
from ..runs.signature import environment, signature
from .augment import normalized, pad_crop_flip
from .data import ImageSet, Splits
from .load import load_splits
from .methods import METHODS, Bench, training_set
from .models import build_model
from .recipe import ImageRecipe, OptimizerSettings
from .stream import InOrder, Shuffled, Stream, seeded

EVALUATION_BATCH = 500


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
    if method not in METHODS:
        raise GradsieveError(f"unknown method {method!r}; choose one of {', '.join(METHODS)}.")
    run = RunDirectory(out, recipe, method, seed, resume=resume)
    if run.result is not None:
        return run.result
    splits = load_splits(recipe, data, seed)
    examples = training_set(method, splits)
    result: dict[str, Any] = {"recipe": recipe.name, "method": method, "seed": seed}
    signed = signature(recipe, method, seed, splits.checksum)
    run.open(environment(device) | {"signature": signed})
    earlier = 0.0
    if method == "dds-retrained":  # a scorer first, then the model again from scratch with it
        first = out / "first"
        found = train(recipe, "dds", seed=seed, data=data, out=first, resume=True, device=device, progress=progress)
        earlier = found["seconds"]
        scorer = recipe.scorer.model_copy(update={"init": first / "final/scorer.safetensors"})
        recipe = recipe.model_copy(update={"scorer": scorer})

    torch.manual_seed(seed)
    prepare = Preparation(recipe, splits, seed, device)
    workers = recipe.data.workers
    stream = Stream(Shuffled(examples, recipe.batch_size, seed, "train"), prepare.training, device, workers)
    dev = Stream(Shuffled(splits.dev, recipe.dev_batch_size, seed, "dev"), prepare.evaluation, device, workers)
    channels, height, width = splits.dev.read(torch.tensor([0]))[0].shape[1:]
    shape = (channels, height, width)
    model = build_model(recipe.model.name, shape=shape, num_classes=splits.num_classes).to(device)
    if recipe.model.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = build_optimizer(recipe.optimizer, model)
    schedule = LambdaLR(optimizer, lambda t: learning_rate_factor(t, recipe.steps, recipe.optimizer))
    average = moving_average(model, recipe.optimizer.average)
    way = METHODS[method](Bench(recipe, model, cross_entropy, optimizer, dev, shape, splits.num_classes, seed))
    if recipe.model.compile:
        model.compile()
    low = torch.autocast(device.type, torch.bfloat16, enabled=recipe.model.precision == "bf16")
    evaluated = model if average is None else average.module

    parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "method": way, "stream": stream}
    journal = Journal(
        run,
        recipe,
        parts if average is None else parts | {"average": average},
        evaluated=evaluated,
        evaluate_dev=lambda: evaluate(evaluated, splits.dev, prepare, low),
        num_examples=len(examples),
        device=device,
        progress=progress,
    )
    step = journal.begin(f"{method}, seed {seed}")
    batches = iter(stream)
    while step < recipe.steps:
        batch = next(batches)
        optimizer.zero_grad()
        with low:
            loss = way.loss(batch)
        loss.backward()
        optimizer.step()
        record = way.step()
        schedule.step()
        if average is not None:
            average.update_parameters(model)
        step += 1
        journal.after_step(step, loss, record, batch[2])

    if (scorer_module := getattr(way, "scorer", None)) is not None:
        run.save_tensors("final/scorer", scorer_module.state_dict())
    if splits.damaged is not None:
        run.save_tensors("damaged", {"damaged": splits.damaged})
    result |= journal.result(lambda: evaluate(evaluated, splits.test, prepare, low))
    result["seconds"] += earlier
    result |= {"skipped": getattr(way, "skipped", 0), "signature": signed}
    run.finish(result)
    return result


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


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


class Preparation:
    """From bytes to what the network sees, for training (at random, but the same for the same step) and evaluation."""

    def __init__(self, recipe: ImageRecipe, splits: Splits, seed: int, device: torch.device):
        self.mean = torch.tensor(splits.mean, device=device)
        self.deviation = torch.tensor(splits.deviation, device=device)
        self.augmented, self.seed, self.device = recipe.augment == "pad-crop-flip", seed, device
        self.format = torch.channels_last if recipe.model.channels_last else torch.contiguous_format
        self.workers = recipe.data.workers

    def evaluation(self, pixels: Tensor, step: int) -> Tensor:
        return normalized(pixels, self.mean, self.deviation).contiguous(memory_format=self.format)

    def training(self, pixels: Tensor, step: int) -> Tensor:
        images = self.evaluation(pixels, step)
        if not self.augmented:
            return images
        cropped = pad_crop_flip(images, generator=seeded(self.seed, "augment", step, device=self.device))
        return cropped.contiguous(memory_format=self.format)


@torch.no_grad()
def evaluate(
    model: nn.Module, images: ImageSet, prepare: Preparation, low: AbstractContextManager[Any]
) -> dict[str, float]:
    """Accuracy in per cent and mean loss, in eval mode."""
    training = model.training
    model.eval()
    totals = torch.zeros(2, dtype=torch.float64, device=prepare.device)
    stream = Stream(InOrder(images, EVALUATION_BATCH), prepare.evaluation, prepare.device, prepare.workers)
    for x, y, _ in stream:
        with low:
            logits = model(x).float()
        right, loss = (logits.argmax(1) == y).sum(), F.cross_entropy(logits, y, reduction="sum")
        totals += torch.stack([right.double(), loss.double()])
    model.train(training)
    accuracy, loss = (totals / len(images)).tolist()
    return {"accuracy": 100 * accuracy, "loss": loss}
