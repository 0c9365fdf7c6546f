"""What psi makes of rare lessons: what its weights bring, by rewards of batches that it had not been taught by yet.

Training goes as under a budget that measures at every 16th step: then psi learns, and then the dev gradient is renewed
that signals agree with. Rewards are measured at every step all the same, and further pupils, psi's of other settings
that have no hand in the training, are told the same signals and taught by some of the same rewards. Of each, in each
third of the training:

- gain: sum_i (w_i - 1/B) r_i, rewards in units of their deviation, mean over batches;
- unevenness: B sum_i w_i^2 - 1;
- gain over the root of unevenness: how well weights are aimed, whatever their strength;
- wrong: weight of the wrong labels, beside 1 for uniform weights.

python benchmarks/lessons.py cifar10-4k-cpu --data DIR --set data.held_out=true --set steps=1200 --seeds 4
"""

import argparse
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import gradsieve.scorer
from gradsieve import DDS, SignalScorer
from gradsieve.images.load import load_splits
from gradsieve.images.recipe import ImageRecipe
from gradsieve.images.train import SetUp
from gradsieve.joint import Joint
from gradsieve.learner import Learner, Scored
from gradsieve.parallel import ALONE
from gradsieve.randomness import RandomStream
from gradsieve.reweight import REPLAY
from gradsieve.scorer import LESS_COMMON_CAUTION, MAX_LOGIT, OUTLOOK_MEAN
from gradsieve.tasks import recipe_for

EVERY = 16


class ByLoss(SignalScorer):
    """Told the loss alone."""

    signals = ("loss",)  # type: ignore[assignment]

    def forward(self, batch: None, *, loss: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(batch, loss=loss, alignment=torch.zeros_like(loss))


@dataclass(frozen=True)
class Pupil:
    learner: Learner
    every: int = EVERY
    mean: int = OUTLOOK_MEAN
    """Of how many measurements its outlook is a mean, at least."""


def pupils(seed: int) -> dict[str, Pupil]:
    def learner(
        scorer: SignalScorer | None = None, replay: int = REPLAY, caution: float = LESS_COMMON_CAUTION
    ) -> Learner:
        return Learner(
            scorer,
            None,
            RandomStream(torch.device("cpu"), seed),
            ALONE,
            psi_gradient="expectation",
            max_logit=MAX_LOGIT,
            uniform_mix=0.0,
            caution=caution,
            replay=replay,
            precision="float32",
            sampler=None,
        )

    return {
        "every step, each lesson once": Pupil(learner(replay=0), every=1),
        "every step": Pupil(learner(), every=1),
        "every 4th": Pupil(learner(), every=4),
        "every 16th: as a budget": Pupil(learner()),
        "every 16th, outlook of 7": Pupil(learner(), mean=1),
        "every 16th, caution 1": Pupil(learner(caution=1.0)),
        "every 16th, told the loss alone": Pupil(learner(ByLoss())),
    }


@contextmanager
def outlook_of(mean: int) -> Iterator[None]:
    gradsieve.scorer.OUTLOOK_MEAN = mean
    try:
        yield
    finally:
        gradsieve.scorer.OUTLOOK_MEAN = OUTLOOK_MEAN


def judged(weights: Tensor, r: Tensor, wrong: Tensor) -> Tensor:
    """Gain, unevenness and the weight of wrong labels, (3,)."""
    n, r = len(r), (r - r.mean()) / r.std(correction=0)
    share = weights[wrong].sum() / wrong.float().mean()
    return torch.stack([(weights * r).sum(), n * weights.square().sum() - 1, share])


def watch(dds: DDS, others: dict[str, Pupil], found: dict[str, list[Tensor]], wrong: list[Tensor]) -> None:
    """From now on `dds`, which measures at every step, learns at every 16th, and the others beside it."""
    own, old = dds.learner.learn, dict[str, Tensor]()

    def learn(parts: Sequence[Scored], joint: Joint, r: Sequence[Tensor], good: Tensor, steps: int) -> Tensor:
        nonlocal old
        (part,), (rewards,), sizes = parts, r, ALONE.sizes(len(r[0]))
        for name, pupil in others.items():
            told = {signal: part.signals[signal] for signal in pupil.learner.signals}
            its, its_joint = pupil.learner.score(None, told, rewards, sizes, learning=True), pupil.learner.joint()
            its_joint.join(its.logits, sizes)
            found[name].append(judged(its_joint.own_weights()[0], rewards, wrong[-1]))
            with outlook_of(pupil.mean):
                if dds.steps % pupil.every == 0:
                    pupil.learner.learn([its], its_joint, r, good, pupil.every)
            pupil.learner.hear_again()
        if dds.steps % EVERY:
            dds.agreement.direction = old
            return good
        old = dds.agreement.direction
        return own(parts, joint, r, good, EVERY)

    dds.learner.learn = learn  # type: ignore[method-assign]


def one_run(recipe: ImageRecipe, data: Path | None, seed: int) -> dict[str, Tensor]:
    """Of each pupil, (thirds, 3)."""
    splits = load_splits(recipe, data, seed)
    setup = SetUp(recipe, "dds", splits, seed, torch.device("cpu"))
    damaged = torch.zeros(len(setup.examples), dtype=torch.bool) if splits.damaged is None else splits.damaged
    found, wrong = defaultdict[str, list[Tensor]](list), list[Tensor]()
    assert isinstance(setup.way, DDS)
    watch(setup.way, pupils(seed), found, wrong)
    for _, batch in zip(range(recipe.steps), setup.stream, strict=False):
        wrong.append(damaged[batch[2]])
        setup.optimizer.zero_grad()
        setup.way.loss(batch).backward()
        setup.optimizer.step()
        setup.way.step()
        setup.schedule.step()
    return {
        name: torch.stack([third.nanmean(0) for third in torch.stack(rows).tensor_split(3)])
        for name, rows in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--seeds", type=int, default=1)
    given = parser.parse_args()
    as_budget = ["scorer.kind=signal", "scorer.lr=0.003", f"dds.replay={REPLAY}", "dds.alignment=last_layer"]
    recipe = recipe_for("dds", given.recipe, [*as_budget, "damage.kind=uniform", *given.set])
    assert isinstance(recipe, ImageRecipe)
    runs = [one_run(recipe, given.data, seed) for seed in range(given.seeds)]
    print(f"{given.seeds} runs, by thirds of the training: gain, unevenness, gain / root of unevenness, wrong")
    for name in runs[0]:
        thirds = torch.stack([run[name] for run in runs]).mean(0)  # (thirds, 3)
        columns = (
            f"{gain:.3f} {uneven:.3f} {gain / max(uneven, 1e-9) ** 0.5:.3f} {wrong:.2f}"
            for gain, uneven, wrong in thirds.tolist()
        )
        print(f"  {name:32} {'   '.join(columns)}")


if __name__ == "__main__":
    main()
