"""What a run shows of the data it trained on: a few examples as thumbnails, and of all of them labels and losses.

It is kept small, whatever the data: a few megabytes for ImageNet.
"""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from ..runs.checkpoint import save_json
from ..runs.directory import RunDirectory
from .data import ImageSet, Joined, Source, Splits
from .stream import Stream
from .view import Pictures, readable

SHOWN = 24
"""Examples of each kind: the most wanted, the least wanted, those that the model contradicts, the hardest."""
SIDE = 48
"""Pixels of a thumbnail, at most."""
PROBABILITIES = 1_000_000
"""As many of the model's probabilities are kept, or none."""


def describe(run: RunDirectory, splits: Splits, examples: ImageSet, shown: Tensor | None = None) -> None:
    """Writes examples.json: how many examples there are, what the classes are called, which files are `shown`."""
    sizes = {"train": len(examples), "dev": len(splits.dev), "test": len(splits.test)}
    if splits.dev_holdout is not None:
        sizes["dev_holdout"] = len(splits.dev_holdout)
    classes = splits.classes or tuple(map(str, range(splits.num_classes)))
    places = [] if shown is None else shown.tolist()
    names = {place: name_of(examples.source, int(examples.rows[place])) for place in places}
    content = {"sizes": sizes, "classes": classes, "names": {place: name for place, name in names.items() if name}}
    save_json(run.path / "examples.json", content)


@torch.no_grad()
def look(model: nn.Module, stream: Stream, low: AbstractContextManager[Any]) -> dict[str, Tensor]:
    """Loss of each example under the model in eval mode, and what it takes each for: probabilities, if they are few."""
    training = model.training
    model.eval()
    found: list[tuple[Tensor, ...]] = []
    for x, y, _ in stream:
        with low:
            logits = model(x).float()
        losses = F.cross_entropy(logits, y, reduction="none").clamp(max=torch.finfo(torch.float16).max)
        found.append((losses.half().cpu(), logits.argmax(1).cpu(), logits.softmax(1).half().cpu()))
        if sum(part[2].numel() for part in found) > PROBABILITIES:
            found = [(losses, predicted, probabilities[:0]) for losses, predicted, probabilities in found]
    model.train(training)
    losses, predicted, probabilities = (torch.cat(parts) for parts in zip(*found, strict=True))
    kept = {"probabilities": probabilities} if len(probabilities) == len(losses) else {}
    return {"losses": losses, "predicted": predicted, **kept}


def mean_weights(folder: Path, num_examples: int) -> Tensor | None:
    """Of each example over all the times that weights were written down, nan if it never had one; None without any."""
    total, count = torch.zeros(num_examples), torch.zeros(num_examples)
    for file in sorted((folder / "scores").glob("step-*.safetensors")):
        weights = load_file(file)["weights"].float()
        total += weights.nan_to_num()
        count += weights.isfinite()
    return total / count if count.any() else None


def choose(weights: Tensor | None, labels: Tensor, seen: dict[str, Tensor]) -> Tensor:
    """Places of the examples to show, (M,): at both ends of the weights, and where the model disagrees."""
    parts = []
    if weights is not None:
        known = weights.isfinite().nonzero().squeeze(1)
        known = known[weights[known].argsort(stable=True)]
        parts += [known[:SHOWN], known[-SHOWN:]]
        if "predicted" in seen:
            others = known[SHOWN:]
            parts.append(others[seen["predicted"][others] != labels[others]][:SHOWN])
    if "losses" in seen:
        parts.append(seen["losses"].argsort(descending=True, stable=True)[:SHOWN])
    return torch.cat(parts).unique() if parts else torch.empty(0, dtype=torch.long)


def save_examples(
    run: RunDirectory, splits: Splits, examples: ImageSet, damaged: Tensor | None, seen: dict[str, Tensor] | None = None
) -> None:
    """Writes examples.json and examples.safetensors; `seen` is what `look` has found, after the last step."""
    seen = seen or {}
    labels = examples.labels
    shown = choose(mean_weights(run.path, len(examples)), labels, seen)
    small = torch.int16 if splits.num_classes <= torch.iinfo(torch.int16).max else torch.int32
    kept = {"labels": labels.to(small), "shown": shown}
    if len(shown):
        kept["thumbnails"] = thumbnails(examples.read(shown)[0])
    if damaged is not None:
        kept["damaged"] = damaged
    for name, value in seen.items():
        kept[name] = value[shown].to(small) if name == "predicted" else value
    describe(run, splits, examples, shown)
    run.save_tensors("examples", kept)


def thumbnails(pixels: Tensor) -> Tensor:
    """At most `SIDE` pixels wide and high, the brightest value as white, (M, C, h, w) uint8."""
    height, width = (min(SIDE, side) for side in pixels.shape[2:])
    small = F.adaptive_avg_pool2d(pixels.float(), (height, width)) * (255 / max(1, int(pixels.max())))
    return small.round().clamp(0, 255).to(torch.uint8)


def name_of(source: Source, row: int) -> str | None:
    """Under which the user knows the picture."""
    if isinstance(source, Joined):
        count = len(source.first.labels)
        return name_of(source.first, row) if row < count else name_of(source.second, row - count)
    return readable(source.locate(row)[1]) if isinstance(source, Pictures) else None
