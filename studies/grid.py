"""A grid of runs that can be stopped and started again: one line of JSON per finished run."""

import json
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from gradsieve import __version__
from gradsieve.demo import spread
from gradsieve.images.train import Outcome

Cell = tuple[str, float, int]
"""Name of the variant, share of wrong labels, seed."""


def run_grid(cells: Iterable[Cell], run: Callable[[Cell], Outcome], out: Path, workers: int) -> list[dict[str, Any]]:
    """All rows of the grid; those that `out` has already are not run again."""
    out.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    done = {(row["variant"], row["noise"], row["seed"]) for row in rows}
    with ProcessPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool, out.open("a") as file:
        waiting = {pool.submit(run, cell): cell for cell in cells if cell not in done}
        for future in as_completed(waiting):
            variant, noise, seed = waiting[future]
            outcome = {k: v for k, v in asdict(future.result()).items() if k not in ("right", "wrong")}
            row = {"variant": variant, "noise": noise, "seed": seed, "version": __version__, **outcome}
            file.write(json.dumps(row) + "\n")
            file.flush()
            rows.append(row)
            print(f"{len(rows):4} {variant}, noise {noise}, seed {seed}: {row['last']:.1f}%", flush=True)
    return rows


def table(rows: list[dict[str, Any]], variants: Iterable[str], metric: str) -> str:
    """Markdown: one line per variant, one column per noise, mean ± standard deviation over seeds.

    The last column is the effective sample size over the batch size. Times are not shown: the runs share the cores.
    """
    noises = sorted({row["noise"] for row in rows})
    head = ["", *(f"{noise:.0%} wrong" if noise else "clean" for noise in noises), "effective share"]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    for variant in variants:
        own = sorted((r for r in rows if r["variant"] == variant), key=lambda r: r["noise"])
        if not own:
            continue
        cells = {noise: spread([r[metric] for r in group]) for noise, group in groupby(own, lambda r: r["noise"])}
        share = mean(r["effective_share"] for r in own)
        lines.append([variant, *(cells.get(noise, "-") for noise in noises), f"{share:.2f}"])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
