"""Examples as thumbnails: the most and the least wanted (Figure 3), and more that scorer and model think wrong."""

import base64
import os
from dataclasses import dataclass
from io import BytesIO

import numpy as np
from PIL import Image

from .read import Run
from .spread import mean_weights

EACH = 18
"""Pictures of a kind; a run keeps a few more."""
PIXELATED = 16
"""Pictures no larger than this are shown with sharp pixels, and kept without loss."""


@dataclass(frozen=True)
class Picture:
    """One example."""

    source: str
    """A data URI."""
    label: str
    predicted: str | None
    weight: float | None
    loss: float | None
    wrong: bool | None
    name: str
    sharp: bool


def gallery(run: Run) -> dict[str, list[Picture]]:
    """By kind; empty if the run has left no pictures."""
    examples = run.examples
    shown = examples.get("shown", np.zeros(0, int))
    if "thumbnails" not in examples or len(shown) != len(examples["thumbnails"]):
        return {}
    labels, predicted = examples["labels"][shown], examples.get("predicted")
    _, weights = run.weights
    mean = mean_weights(weights[:, shown]) if weights.shape[1] > shown.max() else None
    losses = examples["losses"][shown] if "losses" in examples else None
    kinds: dict[str, np.ndarray] = {}
    if mean is not None:
        order = np.argsort(mean, kind="stable")
        order = order[np.isfinite(mean[order])]
        kinds["most wanted"], kinds["least wanted"] = order[::-1][:EACH], order[:EACH]
        if predicted is not None:
            others = order[EACH:]
            kinds["thought wrong"] = others[predicted[others] != labels[others]][:EACH]
    elif losses is not None:
        kinds["hardest"] = np.argsort(-losses, kind="stable")[:EACH]

    classes = run.about.get("classes", [])
    damaged = examples.get("damaged")
    names = short_names([run.about.get("names", {}).get(str(place), "") for place in shown])

    def called(label: int) -> str:
        return str(classes[label]) if label < len(classes) else str(label)

    def picture(i: int) -> Picture:
        pixels = examples["thumbnails"][i]
        return Picture(
            source=data_uri(pixels),
            label=called(int(labels[i])),
            predicted=None if predicted is None else called(int(predicted[i])),
            weight=None if mean is None else float(mean[i]),
            loss=None if losses is None else float(losses[i]),
            wrong=None if damaged is None else bool(damaged[shown[i]]),
            name=names[i],
            sharp=max(pixels.shape[1:]) <= PIXELATED,
        )

    return {kind: [picture(int(i)) for i in places] for kind, places in kinds.items()}


def data_uri(pixels: np.ndarray) -> str:
    """(C, h, w) bytes as a picture within the page: PNG if it is tiny, else WebP."""
    channels = np.moveaxis(pixels, 0, -1)
    image = Image.fromarray(channels[..., 0] if channels.shape[-1] != 3 else channels)
    kind, options = ("png", {}) if max(pixels.shape[1:]) <= PIXELATED else ("webp", {"quality": 85, "method": 4})
    place = BytesIO()
    image.save(place, kind, **options)
    return f"data:image/{kind};base64,{base64.b64encode(place.getvalue()).decode()}"


def short_names(names: list[str]) -> list[str]:
    """Without the folders that all of them share."""
    known = [name for name in names if os.path.isabs(name)]
    if not known:
        return names
    shared = os.path.commonpath([os.path.dirname(name) for name in known])
    return [os.path.relpath(name, shared) if name in known else name for name in names]
