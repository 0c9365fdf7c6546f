"""A small BatchNorm network on the first 4,000 CIFAR-10 images, clean and with wrong labels: RESULTS.md, "CIFAR-10".

python studies/cifar.py --data DIR --seeds 3 --out runs/cifar.jsonl
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from grid import Cell, run_grid, table
from torch import nn

from gradsieve import ConvScorer
from gradsieve.images.data import cifar10_4k, with_label_noise
from gradsieve.images.models import small_cnn
from gradsieve.images.train import Budget, Outcome, train

BUDGET = Budget(
    model=small_cnn,
    optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=1e-3),
    steps=1500,
    batch_size=64,
    dev_batch_size=64,
    evaluate_every=100,
    cosine=True,
)


def with_label(model: nn.Module) -> nn.Module:
    return ConvScorer(3, 10)


VARIANTS: dict[str, tuple[str, Callable[[nn.Module], nn.Module] | None, dict[str, Any]]] = {
    "uniform": ("uniform", None, {}),
    "uniform+dev": ("uniform+dev", None, {}),
    "oracle": ("oracle", None, {}),
    "oracle+dev": ("oracle+dev", None, {}),
    "DDS (default)": ("dds", None, {}),
    "DDS, dev_mode eval": ("dds", None, {"dev_mode": "eval"}),
    "DDS, bound 4": ("dds", None, {"max_logit": 4.0}),
    "DDS, no bound": ("dds", None, {"max_logit": None}),
    "DDS, ConvScorer, image and label": ("dds", with_label, {}),
}


def run(cell: Cell, data: Path) -> Outcome:
    variant, noise, seed = cell
    method, scorer, options = VARIANTS[variant]
    splits = with_label_noise(cifar10_4k(data), noise, seed=seed)
    return train(method, splits, BUDGET, seed=seed, scorer=scorer, options=options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with data_batch_1.bin and test_batch.bin")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/cifar.jsonl"))
    arguments = parser.parse_args()
    cells = [(variant, noise, seed) for variant in VARIANTS for seed in range(arguments.seeds) for noise in (0.4, 0.0)]
    rows = run_grid(cells, partial(run, data=arguments.data), arguments.out, arguments.workers)
    for metric in ("last", "best_by_dev"):
        print(f"\n{metric}\n\n{table(rows, VARIANTS, metric)}")
    noisy = {v: mean(r["last"] for r in rows if r["variant"] == v and r["noise"] == 0.4) for v in VARIANTS}
    for variant in VARIANTS:
        for oracle in ("oracle", "oracle+dev"):
            share = (noisy[variant] - noisy["uniform+dev"]) / (noisy[oracle] - noisy["uniform+dev"])
            print(f"{variant}: {share:.0%} of the gain of {oracle}")


if __name__ == "__main__":
    main()
