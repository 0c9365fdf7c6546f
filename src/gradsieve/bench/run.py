"""`gradsieve bench`: all contenders of a model take turns, and each is compared with plain training beside it."""

import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from ..budget import LOG as BUDGET_LOG
from ..errors import GradsieveError
from ..runs.checkpoint import save_json
from ..runs.team import Team
from .contenders import CONTENDERS, TOGETHER
from .subjects import SUBJECTS, sized, subject_of
from .timing import Step, breakdown, interleaved, peak_memory, ratio

BASE = "uniform"
TRANSLATION = "translation"
MODELS = (*SUBJECTS, TRANSLATION)
PACKAGES = {"batchweight-higher": "higher", "per-example-opacus": "opacus"}
Makers = dict[str, Callable[[], Step]]


@dataclass(frozen=True)
class Row:
    model: str
    batch_size: int | None
    """None where batches are of words."""
    processes: int
    method: str
    time_ratio: float
    """To a plain training step beside it, median over rounds."""
    memory_ratio: float
    """Most bytes in tensors at once, to plain training's."""
    milliseconds: float
    parts: dict[str, float]
    """Share of the step's time."""


def makers_of(model: str, batch_size: int | None, device: torch.device) -> Makers:
    """What makes a step of each method on that model."""
    if model == TRANSLATION:
        from .translating import translation_steps

        return translation_steps(device)
    subject = subject_of(model)
    if subject is None:
        raise GradsieveError(f"unknown model {model!r}; there are {', '.join(MODELS)}, and any wrn-DEPTH-WIDTH.")
    usable = CONTENDERS if Team().size == 1 else {name: CONTENDERS[name] for name in TOGETHER}
    return {method: partial(make, sized(subject, batch_size), device) for method, make in usable.items()}


def bench(
    models: Sequence[str],
    methods: Sequence[str] | None,
    *,
    batch_sizes: Sequence[int] = (),
    rounds: int,
    block: float,
    device: torch.device,
    console: Console,
    json: Path | None,
) -> list[Row]:
    """Measures, prints a table for each model and batch size, and writes the rows."""
    BUDGET_LOG.setLevel(logging.ERROR)  # the table says what is kept
    team = Team()
    if team.size > 1 and TRANSLATION in models:
        raise GradsieveError(f"several processes are measured on {', '.join(SUBJECTS)}, not on {TRANSLATION}.")
    cases = [(m, size) for m in models for size in ((None,) if m == TRANSLATION else batch_sizes or (None,))]
    makers = {case: makers_of(*case, device) for case in cases}
    known = list(dict.fromkeys(name for its in makers.values() for name in its))
    if unknown := [name for name in methods or () if name not in known]:
        raise GradsieveError(f"unknown method {unknown[0]!r}; these models have {', '.join(known)}.")
    rows: list[Row] = []
    for (model, size), its in makers.items():
        chosen = [name for name in its if methods is None or name in methods or name == BASE]
        left_out: dict[str, str] = {}
        subject = None if model == TRANSLATION else subject_of(model)
        batch = None if subject is None else sized(subject, size).batch_size
        found = _rows((model, batch), {name: its[name] for name in chosen}, left_out, rounds, block, device)
        if team.first:
            _show(console, found, left_out)
        rows += found
    if json is not None and team.first:
        save_json(json, [asdict(row) for row in rows])
    return rows


def _rows(
    case: tuple[str, int | None],
    makers: Makers,
    left_out: dict[str, str],
    rounds: int,
    block: float,
    device: torch.device,
) -> list[Row]:
    steps, memory = {}, {}
    for name, make in makers.items():
        package = PACKAGES.get(name)
        if package is not None and find_spec(package) is None:
            left_out[name] = f"needs the package {package}: pip install 'gradsieve[bench]'"
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of other people's packages
                memory[name] = peak_memory(make, device)
                steps[name] = make()
                steps[name]()
        except Exception as error:
            if package is None and not isinstance(error, GradsieveError | NotImplementedError | RuntimeError):
                raise  # one of ours
            left_out[name] = str(error).splitlines()[0]
            steps.pop(name, None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = interleaved(steps, BASE, device, rounds=rounds, block=block, warm_up=2)
        parts = {name: breakdown(step, device) for name, step in steps.items()}
    return [
        Row(
            *case,
            Team().size,
            name,
            ratio(times),
            memory[name] / memory[BASE],
            1000 * median(own for own, _ in times),
            parts[name],
        )
        for name, times in found.items()
    ]


def _show(console: Console, rows: list[Row], left_out: dict[str, str]) -> None:
    first = rows[0]
    title = first.model if first.batch_size is None else f"{first.model}, batch {first.batch_size}"
    title += f" in each of {first.processes} processes" if first.processes > 1 else ""
    table = Table(title=f"{title}: time and memory of a step, plain training = 1")
    for column in ("method", "time", "memory", "ms", "where the time goes"):
        table.add_column(column, justify="left" if column in ("method", "where the time goes") else "right")
    for row in rows:
        parts = ", ".join(f"{name.replace('_', ' ')} {share:.0%}" for name, share in row.parts.items() if share > 0.005)
        figures = (f"{row.time_ratio:.2f}", f"{row.memory_ratio:.2f}", f"{row.milliseconds:.1f}")
        table.add_row(row.method, *figures, parts, style="bold" if "dds" in row.method else "")
    console.print(table)
    for name, reason in left_out.items():
        console.print(f"{name} was left out: {reason}.", highlight=False, markup=False, soft_wrap=True)
