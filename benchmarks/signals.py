"""What the signals of a training step tell: of wrong labels, and of what an example does for images nobody trains on.

Training is plain, so that no signal has a hand in it. At every 4th step each signal is measured, and with it the
truth: the agreement of each example's gradient with that of 256 images of the test split, or with
`--set data.held_out=true` of images that are set aside. In each third of the training, and for each signal:

- AUROC of "this label is wrong" over the training set, by what was measured of each example last;
- its correlation with the truth within a batch, mean over batches;
- the same of what loss does not tell of either.

python benchmarks/signals.py cifar10-4k-cpu --data DIR --set model.name=small-cnn --set steps=600
"""

import argparse
from collections import defaultdict, deque
from pathlib import Path
from statistics import fmean

import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

from gradsieve import DDS, alignment
from gradsieve.checkup.figures import correlation
from gradsieve.dev import dev_gradient
from gradsieve.images.load import load_splits
from gradsieve.images.recipe import ImageRecipe
from gradsieve.images.stream import Batch, Shuffled, Stream
from gradsieve.images.train import SetUp, cross_entropy
from gradsieve.last_layer import LastLayer
from gradsieve.parameters import Direction, trainable, untouched
from gradsieve.tasks import recipe_for

EVERY, TRUTH = 4, 256
AGES = (1, 4, 8, 16)
"""Of a dev gradient, in steps; 16 is a budget's at its rarest."""


def agreement(model: nn.Module, layer: LastLayer, batch: Batch, v: Direction) -> dict[str, Tensor]:
    """Of each example's gradient with v, (B,), by three measures."""
    part = {name: value for name, value in v.items() if name in (layer.weight, layer.bias)}
    with untouched(model), layer.heard():
        losses = cross_entropy(model, batch)
    return {
        "all layers": along(model, batch, v),
        "last layer as it is": along(model, batch, part),
        "last layer, less what is common": layer.alignment(layer.seen(losses), v),
    }


def along(model: nn.Module, batch: Batch, v: Direction) -> Tensor:
    return alignment(model, cross_entropy, batch, v, estimator="finite_difference")


def gradient(model: nn.Module, batch: Batch) -> Direction:
    return dev_gradient(model, cross_entropy, batch, trainable(model), mode="train")[1]


def without(x: Tensor, loss: Tensor) -> Tensor:
    """What a line through loss leaves of x."""
    x, loss = x - x.mean(), loss - loss.mean()
    rest = x - loss * (x @ loss) / (loss @ loss).clamp_min(1e-30)
    return torch.where(rest.norm() < 1e-3 * x.norm(), 0.0, rest)  # loss itself leaves rounding errors


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
    unseen = iter(Stream(Shuffled(splits.test, TRUTH, given.seed), setup.prepare.evaluation, torch.device("cpu")))
    layer, batches = LastLayer(model), iter(setup.stream)
    nothing = torch.full((len(setup.examples),), torch.nan)
    visited, latest = nothing.clone(), defaultdict[str, Tensor](nothing.clone)
    told: dict[str, list[tuple[float, float]]] = defaultdict(list)
    before: deque[Direction] = deque(maxlen=max(AGES))  # youngest last
    for step in range(1, recipe.steps + 1):
        batch = next(batches)
        losses = cross_entropy(model, batch)
        if step % EVERY == 0 and step > max(AGES):
            index, loss, truth = batch[2], losses.detach(), along(model, batch, gradient(model, next(unseen)))
            signals = {"loss": -loss, "loss at the last visit": -visited[index]}
            for age in AGES:
                found = agreement(model, layer, batch, before[-age])
                signals |= {f"{name}, {age} steps old": value for name, value in found.items()}
            for name, value in signals.items():
                known = ~value.isnan()
                if known.sum() > len(known) / 2:
                    rest = without(value[known], loss[known]), without(truth[known], loss[known])
                    told[name].append((correlation(value[known], truth[known]), correlation(*rest)))
                latest[name][index] = value.float()
        visited[batch[2]] = losses.detach().float()
        setup.optimizer.zero_grad()
        losses.mean().backward()
        setup.optimizer.step()
        setup.schedule.step()
        before.append(gradient(model, setup.way.dev.draw()))
        if step % (recipe.steps // 3) == 0:
            print(f"step {step}: AUROC of wrong labels, correlation with the truth, the same without loss")
            for name, pairs in told.items():
                plain, rest_of_it = (fmean(column) for column in zip(*pairs, strict=True))
                print(f"  {auroc(wrong, latest[name])}  {plain:+.2f}  {rest_of_it:+.2f}  {name}", flush=True)
            told.clear()


def auroc(wrong: Tensor | None, values: Tensor) -> str:
    """A low value is a suspicious one."""
    if wrong is None:
        return "   -"
    seen = ~values.isnan()
    return f"{roc_auc_score(wrong[seen], -values[seen]):.2f}"


if __name__ == "__main__":
    main()
