"""A trained scorer as a product: what a run keeps of it, and the scores that it gives any set of images.

A scorer that asks for signals gets them from the run's final model: the loss of each example, and its gradient's
agreement with the dev set's at the final parameters. It puts them on the scale of the examples that it sees together;
in training that is a batch, here the whole set, so that its scores do not hang on the company an example is in.
(Agreement in the last layer is relative to the BATCH images that are read with it.)
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer

from ..dev import dev_gradient
from ..errors import GradsieveError
from ..last_layer import LastLayer
from ..parameters import Direction, LossFn, trainable, untouched
from ..randomness import RandomStream, seeded
from ..reward import rewards
from ..runs.checkpoint import load_json, save_json
from ..runs.directory import RunDirectory
from ..scorer import bounded, checked_scores
from .augment import normalized
from .data import ImageSet, Splits
from .methods import make_scorer
from .models import build_model
from .recipe import ImageRecipe
from .stream import Batch, InOrder, Stream

BATCH = 500
TOGETHER = 1 << 18
"""Examples, at most, whose signals are put on one scale at once."""
SCORED = ("dds", "dds-retrained")
ANEW = "The run must be trained again."

OnRows = Callable[[int, int], None]
"""``on_rows(done, total)`` hears of the progress."""


def save_scorer(
    run: RunDirectory,
    scorer: nn.Module,
    splits: Splits,
    shape: tuple[int, ...],
    direction: Direction | None,
    *,
    last_layer: bool,
    trust: float,
) -> None:
    """``final/scorer.safetensors``, and what it takes to use it on other data: what the network saw; v, if wanted."""
    content = {"shape": shape, "mean": splits.mean, "deviation": splits.deviation, "num_classes": splits.num_classes}
    save_json(
        run.path / "final/input.json", content | {"classes": splits.classes, "last_layer": last_layer, "trust": trust}
    )
    if direction is not None:
        run.save_tensors("final/direction", direction)
    run.save_tensors("final/scorer", scorer.state_dict())


def final_direction(
    model: nn.Module, loss_fn: LossFn, batches: Iterator[Batch], optimizer: Optimizer | None, *, mode: str
) -> dict[str, Tensor]:
    """V of Eq. 2 for a run that is over: the gradient of the whole dev set, each coordinate scaled as g' would.

    What Eq. 17 depends on in an optimizer at rest are Adam's second moments: g' is near ``lr / sqrt(v_t)``. The
    length of v does not matter, so that lr is left out, and of SGD nothing remains. `optimizer` None leaves g' out.
    """
    total: dict[str, Tensor] = {}
    theta = trainable(model)
    for batch in batches:
        _, d_theta = dev_gradient(model, loss_fn, batch, theta, mode=mode)
        total = {name: d + total[name] if total else d for name, d in d_theta.items()}
    held = [p for group in optimizer.param_groups for p in group["params"]] if optimizer else []
    for (name, _), parameter in zip(model.named_parameters(), held, strict=False):  # the model may be an average
        state = optimizer.state.get(parameter, {}) if optimizer else {}
        if "exp_avg_sq" in state and name in total:
            total[name] = total[name] / (state["exp_avg_sq"].sqrt() + 1e-8)
    return total


class TrainedScorer:
    """The scorer of a finished run, with its model where it asks for signals."""

    def __init__(self, run: Path, device: torch.device):
        settings = _settings(run)
        self.recipe = recipe = ImageRecipe.model_validate(settings["recipe"])
        self.seed, self.device, self.run = int(settings["seed"]), device, run
        given = load_json(run / "final/input.json", ANEW)
        self.shape, self.num_classes = tuple(given["shape"]), int(given["num_classes"])
        self.classes = tuple(given["classes"])
        self.trust = float(given.get("trust", 1.0))
        """How far its scores counted at the end of the run."""
        self.mean, self.deviation = (torch.tensor(given[name], device=device) for name in ("mean", "deviation"))
        model = build_model(recipe.model.name, shape=self.shape, num_classes=self.num_classes)
        model.load_state_dict(_tensors(run / "final/model.safetensors"))
        self.format = torch.channels_last if recipe.model.channels_last else torch.contiguous_format
        self.model = model.to(device).to(memory_format=self.format).eval()  # type: ignore[call-overload]
        final = recipe.scorer.model_copy(update={"init": run / "final/scorer.safetensors"})
        self.scorer = make_scorer(final, self.model, self.shape, self.num_classes, self.seed).eval()
        self.signals: tuple[str, ...] = tuple(getattr(self.scorer, "signals", ()))
        self.direction: dict[str, Tensor] = {}
        self.last_layer: LastLayer | None = None
        if "alignment" in self.signals:
            self.direction = {n: v.to(device) for n, v in _tensors(run / "final/direction.safetensors").items()}
            if given.get("last_layer") and self.direction:
                self.last_layer = LastLayer(self.model)

    def low(self) -> AbstractContextManager[Any]:
        """The precision that the run trained in."""
        half = self.recipe.model.precision == "bf16"
        return torch.autocast(self.device.type, torch.bfloat16) if half else nullcontext()

    def batches(self, images: ImageSet) -> Stream:
        """The set in its own order, as evaluation sees it."""

        def prepare(pixels: Tensor, step: int) -> Tensor:
            return normalized(pixels, self.mean, self.deviation).contiguous(memory_format=self.format)

        return Stream(InOrder(images, BATCH), prepare, self.device, self.recipe.data.workers)

    @torch.no_grad()
    def told(self, batch: Batch, loss_fn: LossFn) -> dict[str, Tensor]:
        """The signals that the scorer asks for, (B,) each, at the final parameters."""
        found = {}
        last = self.last_layer
        with self.low(), torch.set_grad_enabled(last is not None), last.heard() if last else nullcontext():
            losses = loss_fn(self.model, batch).float()
        if "loss" in self.signals:
            found["loss"] = losses.detach()
        if last is not None:
            found["alignment"] = last.alignment(last.seen(losses), self.direction)
        elif "alignment" in self.signals and not self.direction:  # nor was it told any in training
            found["alignment"] = torch.zeros_like(losses)
        elif "alignment" in self.signals:
            own = self.recipe.dds.reward
            found["alignment"] = rewards(
                self.model,
                loss_fn,
                batch,
                self.direction,
                estimator=own if own in ("finite_difference", "jvp") else "jvp",
                losses=None if self.recipe.model.precision == "bf16" else losses,
            )
        return found

    @torch.no_grad()
    def scores(self, batch: Batch | None, told: dict[str, Tensor], like: Tensor) -> Tensor:
        """As DDS bounds them, (B,): weights are the softmax of `trust` times them. `like` has a number for each."""
        with self.low():
            found = checked_scores(self.scorer(batch, **told), like)
        return bounded(found, self.recipe.dds.max_logit)


def score_set(trained: TrainedScorer, images: ImageSet, loss_fn: LossFn, on_rows: OnRows) -> Tensor:
    """A score for each image, (N,) float32 on the CPU. What is held at once is a batch, and a few numbers a row."""
    return scores_by(trained, told_of(trained, images, loss_fn, on_rows))


def told_of(trained: TrainedScorer, images: ImageSet, loss_fn: LossFn, on_rows: OnRows) -> dict[str, Tensor]:
    """The signals of each image that the scorer asks for; of a scorer that asks for none, its scores; (N,) each."""
    count, done = len(images), 0
    columns = {name: torch.empty(count) for name in trained.signals or ("score",)}
    with RandomStream(trained.device, 0), untouched(trained.model, training=False):
        for batch in trained.batches(images):
            told = trained.told(batch, loss_fn) if trained.signals else {}
            found = told or {"score": trained.scores(batch, {}, batch[1].float())}
            for name, column in columns.items():
                column[done : done + len(batch[1])] = found[name].cpu()
            done += len(batch[1])
            on_rows(done, count)
    return columns


def scores_by(trained: TrainedScorer, told: dict[str, Tensor]) -> Tensor:
    """A score for each row of what `told_of` gave, (N,)."""
    scores = _scored_together(trained, told) if trained.signals else told["score"]
    if bad := int((~scores.isfinite()).sum()):
        raise GradsieveError(
            f"{bad:,} of {len(scores):,} scores are not finite: the training of {trained.run} went astray."
        )
    return scores


def _scored_together(trained: TrainedScorer, columns: dict[str, Tensor]) -> Tensor:
    count = len(next(iter(columns.values())))
    scores = torch.empty(count)
    parts = torch.randperm(count, generator=seeded(trained.seed, "together")).tensor_split(-(-count // TOGETHER))
    for rows in parts:
        told = {name: column[rows].to(trained.device) for name, column in columns.items()}
        scores[rows] = trained.scores(None, told, next(iter(told.values()))).cpu()
    return scores


def _settings(run: Path) -> dict[str, Any]:
    """What recipe.json says, if the run is one whose scorer can be used again."""
    if not (run / "recipe.json").is_file():
        raise GradsieveError(f"{run} is no run directory: it has no recipe.json. Give the --out of gradsieve train.")
    settings = load_json(run / "recipe.json", ANEW)
    task, method = settings.get("recipe", {}).get("task"), settings.get("method")
    if task != "images":
        raise GradsieveError(f"{run} is a run of the task {task}; its scorer chooses languages, not examples.")
    if method not in SCORED:
        raise GradsieveError(f"{run} was trained by {method}, which leaves no scorer. Give a run of dds.")
    if not (run / "result.json").is_file():
        raise GradsieveError(f"{run} has not ended yet. Go on with it by gradsieve train ... --resume.")
    return settings


def _tensors(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise GradsieveError(f"{file} is damaged ({error}). {ANEW}") from error
