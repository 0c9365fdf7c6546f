"""How well the signals of a training step tell wrong labels from right ones: AUROC over the training set, by step.

Training is plain, so that no signal has a hand in it. Each example counts with what was measured of it last.

python benchmarks/signals.py cifar10-4k-cpu --data DIR --set model.name=small-cnn --set steps=600
"""

import argparse
from pathlib import Path

import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

from gradsieve import DDS, alignment
from gradsieve.dev import dev_gradient
from gradsieve.images.load import load_splits
from gradsieve.images.recipe import ImageRecipe
from gradsieve.images.stream import Batch
from gradsieve.images.train import SetUp, cross_entropy
from gradsieve.last_layer import LastLayer
from gradsieve.parameters import Direction, trainable, untouched
from gradsieve.tasks import recipe_for

STALE = 16
"""Steps between the dev gradients of a budget at its rarest."""


def agreement(model: nn.Module, layer: LastLayer, batch: Batch, v: Direction) -> dict[str, Tensor]:
    """Of each example's gradient with v, (B,), by three measures. Low is suspicious, so signs are turned."""
    part = {name: value for name, value in v.items() if name in (layer.weight, layer.bias)}
    with untouched(model), layer.heard():
        losses = cross_entropy(model, batch)
    return {
        "all layers": -alignment(model, cross_entropy, batch, v),
        "last layer as it is": -alignment(model, cross_entropy, batch, part),
        "last layer, less what is common": -layer.alignment(layer.seen(losses), v),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    recipe = recipe_for("dds", given.recipe, ["scorer.kind=signal", "damage.kind=uniform", *given.set])
    assert isinstance(recipe, ImageRecipe)
    splits = load_splits(recipe, given.data, given.seed)
    setup = SetUp(recipe, "dds", splits, given.seed, torch.device("cpu"))
    model, wrong = setup.model, splits.damaged
    assert isinstance(setup.way, DDS)
    assert wrong is not None
    layer, batches = LastLayer(model), iter(setup.stream)
    table: dict[str, Tensor] = {}
    directions: dict[str, Direction] = {}
    for step in range(1, recipe.steps + 1):
        batch = next(batches)
        losses = cross_entropy(model, batch)
        found = {"loss": losses.detach()}
        for age, v in directions.items():
            found |= {f"{name}, {age}": value for name, value in agreement(model, layer, batch, v).items()}
        for name, value in found.items():
            table.setdefault(name, torch.full((len(wrong),), torch.nan))[batch[2]] = value.float()
        setup.optimizer.zero_grad()
        losses.mean().backward()
        setup.optimizer.step()
        setup.schedule.step()
        fresh = dev_gradient(model, cross_entropy, setup.way.dev.draw(), trainable(model), mode="train")[1]
        directions["fresh"] = fresh
        if step % STALE == 1:
            directions[f"up to {STALE} steps old"] = fresh
        if step % (recipe.steps // 3) == 0:
            print(f"step {step}")
            for name, values in table.items():
                seen = ~values.isnan()
                print(f"  {roc_auc_score(wrong[seen], values[seen]):.2f}  {name}", flush=True)


if __name__ == "__main__":
    main()
