"""`gradsieve compare`: the same data and budget for several methods, over several seeds."""

import logging
import os
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import active_children, connection, get_context, parent_process
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .budget import LOG as BUDGET_LOG
from .errors import GradsieveError
from .report.comparison import BASE, NO_CHOICE, SHARED, Row, markdown, oracle_shares, summarize, table, verdict
from .report.frontier import check_drawing, plot_frontier
from .runs.checkpoint import save_json, written_whole
from .runs.memory import keep_freed_memory
from .runs.progress import Progress
from .runs.recipe import Recipe
from .runs.team import Team
from .tasks import TASKS, recipe_for, recipe_of


@dataclass(frozen=True)
class Cell:
    """One run of a comparison."""

    variant: str
    """A method, and what differs from the recipe: ``dds:scorer.kind=paper:dds.max_logit=none``."""
    seed: int
    recipe: Recipe

    @property
    def method(self) -> str:
        return split(self.variant)[0]

    @property
    def folder(self) -> str:
        return f"{re.sub(r'[^A-Za-z0-9.+=-]', '_', self.variant)}/seed-{self.seed}"


def split(variant: str) -> list[str]:
    """The method and its overrides; a colon within a value does not divide."""
    return re.split(r":(?=[\w.]+=)", variant)


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
    first_seed: int = 0,
    quiet: bool = False,
    tensorboard: bool = False,
    frontier: Path | None = None,
) -> list[Row]:
    """Runs what is not there yet, prints the table and the verdicts, writes them into `out`.

    `frontier` is a file for a picture of results against time.
    """
    if frontier is not None:
        check_drawing(frontier)
    team = Team()
    if team.size > 1 and jobs > 1:
        raise GradsieveError("--jobs starts processes of its own; under torchrun leave it at 1.")
    if not team.first:
        console, quiet, tensorboard = Console(quiet=True), True, False
    recipes = _checked(recipe, variants, overrides, data, device)
    numbers = range(first_seed, first_seed + seeds)
    todo = [Cell(variant, seed, recipes[variant]) for seed in numbers for variant in variants]
    run = partial(_run, data, out, device)
    if jobs == 1:
        with Progress(console, quiet=quiet, tensorboard=tensorboard) as progress:
            found = []
            for number, cell in enumerate(todo, 1):
                progress.label = f"{number} of {len(todo)}: {cell.variant}, seed {cell.seed}"
                found.append(run(cell, progress))
    else:
        found = _parallel(partial(_quietly, run, tensorboard), todo, jobs, console)

    results: dict[str, dict[int, Any]] = {variant: {} for variant in variants}
    for cell, result in zip(todo, found, strict=True):
        results[cell.variant][cell.seed] = result
    task = TASKS[recipe_of(recipe, overrides).task]
    runs = {variant: [out / cell.folder for cell in todo if cell.variant == variant] for variant in variants}
    bootstrap = task.bootstrap(runs, BASE) if task.bootstrap and BASE in runs else None
    rows = summarize(results, task.metric, judged=task.judged, bootstrap=bootstrap)
    if not team.first:
        return rows
    _write(out, rows, task.metric)
    title = f"{recipe}: test {task.metric}, mean ± standard deviation over {seeds} seed{'s' * (seeds > 1)}"
    _show(console, rows, title, task.caption)
    if task.picture is not None:
        for variant, its in runs.items():
            task.picture(its, its[0].parent / "usage.png", title=f"{recipe}: {variant}")
        console.print(f"Pictures: {out}/METHOD/usage.png", highlight=False, markup=False, soft_wrap=True)
    if frontier is not None:
        plot_frontier(rows, frontier, title=f"{recipe}, {seeds} seed{'s' * (seeds > 1)}", metric=task.metric)
    return rows


def _checked(
    recipe: str, variants: Sequence[str], overrides: Sequence[str], data: Path | None, device: torch.device
) -> dict[str, Recipe]:
    """The recipe of each variant. Whatever is to be refused is refused now, not after hours."""
    if not variants:
        raise GradsieveError("--methods names none; for instance --methods uniform,dds.")
    if len(set(variants)) < len(variants):
        raise GradsieveError(f"--methods names one twice: {', '.join(variants)}.")
    recipes = {}
    for variant in variants:
        method, *own = split(variant)
        if unfair := [key for key in own if re.split(r"[.=]", key)[0] in SHARED]:
            raise GradsieveError(
                f"--methods {variant}: {unfair[0]} would not be the same for all methods. Set it for all with --set."
            )
        recipes[variant] = recipe_for(method, recipe, [*overrides, *own])
        TASKS[recipes[variant].task].check(recipes[variant], method, data=data, device=device)
    return recipes


def _run(data: Path | None, out: Path, device: torch.device, cell: Cell, progress: Progress) -> dict[str, Any]:
    BUDGET_LOG.setLevel(logging.ERROR)  # the table has a column of times
    return TASKS[cell.recipe.task].train(
        cell.recipe,
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
    with ProcessPoolExecutor(jobs, get_context("spawn"), initializer=_begin_worker, initargs=(threads,)) as pool:
        futures: dict[Future[dict[str, Any]], Cell] = {pool.submit(run, cell): cell for cell in todo}
        try:
            for number, future in enumerate(as_completed(futures), 1):
                cell, seconds = futures[future], future.result()["seconds"]
                line = f"{number} of {len(todo)}: {cell.variant}, seed {cell.seed}: {seconds:.0f} s of training"
                console.print(line, highlight=False, markup=False, soft_wrap=True)
            return [future.result() for future in futures]
        except BrokenProcessPool as error:
            raise GradsieveError(
                "a worker process was killed, perhaps for want of memory. Nothing is lost: run the same command again, "
                "with fewer --jobs."
            ) from error
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in active_children():  # their checkpoints are whole
                worker.terminate()
            raise


def _begin_worker(threads: int) -> None:
    torch.set_num_threads(threads)
    keep_freed_memory()
    parent = parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (connection.wait([parent.sentinel]), os._exit(1)), daemon=True).start()


def _quietly(run: Callable[..., dict[str, Any]], tensorboard: bool, cell: Cell) -> dict[str, Any]:
    with Progress(Console(quiet=True), quiet=True, tensorboard=tensorboard) as progress:
        return run(cell, progress)


def _write(out: Path, rows: list[Row], metric: str) -> None:
    verdicts = [verdict(row) for row in rows if row.variant != BASE]
    content = {"metric": metric, "rows": [asdict(row) for row in rows], "verdicts": verdicts}
    save_json(out / "comparison.json", content | {"share_of_oracle": oracle_shares(rows)})
    with written_whole(out / "comparison.md") as place:
        place.write_text(markdown(rows) + "\n" + "".join(f"- {line}\n" for line in verdicts))


def _show(console: Console, rows: list[Row], title: str, caption: str) -> None:
    shown = Table(title=escape(title), caption=caption)
    head, body = table(rows)
    for column in head:
        shown.add_column(column, justify="left" if column == "method" else "right", overflow="fold")
    for texts in body:
        shown.add_row(*map(escape, texts), style="bold" if "dds" in texts[0] else "")
    console.print(shown)
    lines = [verdict(row) for row in rows if row.variant != BASE]
    shares = {variant: share for variant, share in oracle_shares(rows).items() if variant not in (BASE, *NO_CHOICE)}
    lines += [f"{variant}: {share:.0%} of the oracle's gain over uniform+dev." for variant, share in shares.items()]
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
