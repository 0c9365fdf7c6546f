"""The guards, the scorers, and weighting against sampling, on digits: the tables "Digits" of RESULTS.md.

python studies/digits.py --seeds 5 --out runs/digits.jsonl
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from grid import Cell, run_grid, table
from torch import nn

from gradsieve import MLPScorer, like
from gradsieve.demo import digits_budget
from gradsieve.images.data import digits, with_label_noise
from gradsieve.images.train import Outcome, train

Scorer = Callable[[nn.Module], nn.Module] | None


def with_label(model: nn.Module) -> nn.Module:
    return MLPScorer(64, 10)


def image_only(model: nn.Module) -> nn.Module:
    return MLPScorer(64)


VARIANTS: dict[str, tuple[str, Scorer, dict[str, Any]]] = {
    "uniform": ("uniform", None, {}),
    "uniform+dev": ("uniform+dev", None, {}),
    "oracle": ("oracle", None, {}),
    "DDS (default)": ("dds", None, {}),
    "bound 1": ("dds", None, {"max_logit": 1.0}),
    "bound 4": ("dds", None, {"max_logit": 4.0}),
    "no bound": ("dds", None, {"max_logit": None}),
    "no bound, mix 0.2": ("dds", None, {"max_logit": None, "uniform_mix": 0.2}),
    "bound 2, mix 0.2": ("dds", None, {"uniform_mix": 0.2}),
    "printed psi gradient": ("dds", None, {"psi_gradient": "algorithm1"}),
    "not optimizer-aware": ("dds", None, {"optimizer_aware": False}),
    "jvp rewards": ("dds", None, {"reward": "jvp"}),
    "every 4th step": ("dds", None, {"update_every": 4}),
    "MLPScorer, image and label": ("dds", with_label, {}),
    "MLPScorer, image and label, no bound": ("dds", with_label, {"max_logit": None}),
    "MLPScorer, image and label, printed psi gradient": ("dds", with_label, {"psi_gradient": "algorithm1"}),
    "MLPScorer, image and label, sampling": ("dds", with_label, {}),
    "MLPScorer, image only": ("dds", image_only, {}),
    "like(model), image only (the paper's)": ("dds", like, {}),
}


def run(cell: Cell, lr: float) -> Outcome:
    variant, noise, seed = cell
    method, scorer, options = VARIANTS[variant]
    splits = with_label_noise(digits(seed=seed), noise, seed=seed)
    sampled = variant.endswith("sampling")
    return train(method, splits, digits_budget(1500, lr), seed=seed, scorer=scorer, options=options, sampled=sampled)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--lr", type=float, default=2e-3, help="of the model")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/digits.jsonl"))
    arguments = parser.parse_args()
    noises = (0.0, 0.2, 0.4, 0.6)
    cells = [(v, noise, seed) for seed in range(arguments.seeds) for v in arguments.variants for noise in noises]
    rows = run_grid(cells, partial(run, lr=arguments.lr), arguments.out, arguments.workers)
    for metric in ("last", "best_by_dev"):
        print(f"\n{metric}\n\n{table(rows, VARIANTS, metric)}")


if __name__ == "__main__":
    main()
