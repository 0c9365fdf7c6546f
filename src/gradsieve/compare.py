"""`gradsieve compare`: the same data and budget for several methods, over several seeds."""

import re
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from .errors import GradsieveError
from .report.comparison import BASE, HEAD, Row, cells, markdown, oracle_shares, summarize, verdict
from .runs.checkpoint import save_json, written_whole
from .runs.progress import Progress
from .tasks import TASKS, recipe_for, recipe_of


@dataclass(frozen=True)
class Cell:
    """One run of a comparison."""

    variant: str
    """A method, and what differs from the recipe: ``dds:scorer.kind=paper:dds.max_logit=none``."""
    seed: int

    @property
    def method(self) -> str:
        return self.variant.partition(":")[0]

    @property
    def overrides(self) -> list[str]:
        return self.variant.split(":")[1:]

    @property
    def folder(self) -> str:
        return f"{re.sub(r'[^A-Za-z0-9.+=-]', '_', self.variant)}/seed-{self.seed}"


def compare(
    recipe: str,
    variants: Sequence[str],
    seeds: int,
    *,
    overrides: Sequence[str],
    data: Path | None,
    out: Path,
    device: torch.device,
    jobs: int,
    console: Console,
    quiet: bool = False,
) -> list[Row]:
    """Runs what is not there yet, prints the table and the verdicts, writes them into `out`."""
    if not variants:
        raise GradsieveError("--methods names none; for instance --methods uniform,dds.")
    if len(set(variants)) < len(variants):
        raise GradsieveError(f"--methods names one twice: {', '.join(variants)}.")
    for variant in variants:  # a bad name or key is an error now, not after hours
        recipe_for(Cell(variant, 0).method, recipe, [*overrides, *Cell(variant, 0).overrides])
    todo = [Cell(variant, seed) for seed in range(seeds) for variant in variants]
    run = partial(_run, recipe, overrides, data, out, device)
    if jobs == 1:
        with Progress(console, quiet=quiet) as progress:
            found = [run(cell, progress) for cell in todo]
    else:
        found = _parallel(run, todo, jobs, console)

    results: dict[str, dict[int, Any]] = {variant: {} for variant in variants}
    for cell, result in zip(todo, found, strict=True):
        results[cell.variant][cell.seed] = result
    metric = TASKS[recipe_of(recipe, overrides).task].metric
    rows = summarize(results, metric)
    _write(out, rows, metric)
    _show(console, rows, f"{recipe}: test {metric}, mean ± standard deviation over {seeds} seed{'s' * (seeds > 1)}")
    return rows


def _run(
    recipe: str,
    overrides: Sequence[str],
    data: Path | None,
    out: Path,
    device: torch.device,
    cell: Cell,
    progress: Progress,
) -> dict[str, Any]:
    resolved = recipe_for(cell.method, recipe, [*overrides, *cell.overrides])
    return TASKS[resolved.task].train(
        resolved,
        cell.method,
        seed=cell.seed,
        data=data,
        out=out / cell.folder,
        resume=True,
        device=device,
        progress=progress,
    )


def _parallel(
    run: Callable[..., dict[str, Any]], todo: list[Cell], jobs: int, console: Console
) -> list[dict[str, Any]]:
    threads = max(1, torch.get_num_threads() // jobs)
    context = get_context("spawn")
    with ProcessPoolExecutor(jobs, context, initializer=torch.set_num_threads, initargs=(threads,)) as pool:
        futures = [pool.submit(_quietly, run, cell) for cell in todo]
        try:
            results = []
            for cell, future in zip(todo, futures, strict=True):
                results.append(future.result())
                console.print(f"{cell.variant}, seed {cell.seed}: done in {results[-1]['seconds']:.0f} s")
            return results
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _quietly(run: Callable[..., dict[str, Any]], cell: Cell) -> dict[str, Any]:
    with Progress(Console(quiet=True), quiet=True) as progress:
        return run(cell, progress)


def _write(out: Path, rows: list[Row], metric: str) -> None:
    verdicts = [verdict(row) for row in rows if row.variant != BASE]
    content = {"metric": metric, "rows": [asdict(row) for row in rows], "verdicts": verdicts}
    save_json(out / "comparison.json", content | {"share_of_oracle": oracle_shares(rows)})
    with written_whole(out / "comparison.md") as place:
        place.write_text(markdown(rows) + "\n" + "".join(f"- {line}\n" for line in verdicts))


def _show(console: Console, rows: list[Row], title: str) -> None:
    table = Table(title=title)
    for column in HEAD:
        table.add_column(column, justify="left" if column == "method" else "right")
    for row in rows:
        table.add_row(*cells(row), style="bold" if row.variant.startswith("dds") else "")
    console.print(table)
    for row in rows:
        if row.variant != BASE:
            console.print(verdict(row), highlight=False, soft_wrap=True)
    for variant, share in oracle_shares(rows).items():
        if variant not in (BASE, "uniform+dev", "oracle"):
            console.print(
                f"{variant}: {share:.0%} of the oracle's gain over uniform+dev.", highlight=False, soft_wrap=True
            )
