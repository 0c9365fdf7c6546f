"""`gradsieve demo`: digits with wrong labels, plain training against DDS, in about a minute."""

import json
import platform
from dataclasses import asdict
from pathlib import Path
from statistics import mean, stdev

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from . import __version__
from .errors import GradsieveError
from .images.data import digits, with_label_noise
from .images.models import mlp
from .images.train import Budget, Outcome, train
from .report.weights import plot_weights

METHODS = ("uniform", "uniform+dev", "dds")
NOISE = 0.4
NAMES = {"uniform": "Uniform", "uniform+dev": "Uniform, dev examples too", "dds": "DDS"}


def digits_budget(steps: int, lr: float = 2e-3) -> Budget:
    """The setting of every digits figure in README and RESULTS."""
    return Budget(
        model=mlp,
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=lr),
        steps=steps,
        batch_size=64,
        dev_batch_size=64,
    )


def run_demo(out: Path, *, seeds: int, steps: int, console: Console) -> None:
    """Trains 3 methods x `seeds`, prints the table, writes ``results.json`` and ``weights.png`` into `out`."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "results.json").touch()
    except OSError as error:
        raise GradsieveError(f"cannot write into {out} ({error.strerror}). Give another folder with --out.") from error

    console.print(
        f"Digits (1,100 images of 8x8), [bold]{NOISE:.0%} of the training labels wrong[/], 100 clean dev examples; "
        f"{seeds} seeds, {steps:,} steps each."
    )
    torch.set_num_threads(1)  # more would spend their time waiting for each other on models of this size
    outcomes: dict[str, list[Outcome]] = {name: [] for name in METHODS}
    columns = (TextColumn("{task.description:<26}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(METHODS) * seeds * steps)
        for seed in range(seeds):
            splits = with_label_noise(digits(seed=seed), NOISE, seed=seed)
            for name in METHODS:
                progress.update(task, description=f"{NAMES[name]}, seed {seed}")
                outcome = train(name, splits, digits_budget(steps), seed=seed, on_step=lambda: progress.advance(task))
                outcomes[name].append(outcome)
                if not console.is_terminal:
                    console.print(f"  {NAMES[name]}, seed {seed}: {outcome.last:.1f}% ({outcome.seconds:.1f} s)")

    console.print(_table(outcomes))
    console.print(_verdict(outcomes))
    (out / "results.json").write_text(json.dumps(_results(outcomes, steps), indent=1) + "\n")
    plot_weights(
        [o.right for o in outcomes["dds"]],
        [o.wrong for o in outcomes["dds"]],
        out / "weights.png",
        title=f"DDS learns which labels are wrong ({NOISE:.0%} of them are)",
    )
    console.print(f"\nHow the weights part company: {out / 'weights.png'}\nAll numbers: {out / 'results.json'}")


def _table(outcomes: dict[str, list[Outcome]]) -> Table:
    table = Table(title="Test accuracy, mean ± standard deviation over seeds")
    table.add_column("method")
    for column in ("last", "best by dev", "time"):
        table.add_column(column, justify="right")
    plain = mean(o.seconds for o in outcomes["uniform"])
    for name, runs in outcomes.items():
        best = "-" if name == "uniform+dev" else spread([o.best_by_dev for o in runs])  # it has trained on dev
        ratio = f"{mean(o.seconds for o in runs) / plain:.1f}x"
        style = "bold" if name == "dds" else ""
        table.add_row(NAMES[name], spread([o.last for o in runs]), best, ratio, style=style)
    return table


def spread(values: list[float]) -> str:
    """Mean ± standard deviation; a single value as it is."""
    return f"{mean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")


def _verdict(outcomes: dict[str, list[Outcome]]) -> str:
    best = max(mean(o.last for o in outcomes[name]) for name in METHODS[:2])
    gain = mean(o.last for o in outcomes["dds"]) - best
    if gain > 0:
        return f"DDS is {gain:.1f} points above the better of the two plain ways to train."
    return f"DDS is {-gain:.1f} points below the better of the two plain ways to train: no evidence that it helps here."


def _results(outcomes: dict[str, list[Outcome]], steps: int) -> dict[str, object]:
    signature = {
        "gradsieve": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "data": "scikit-learn digits",
        "noise": NOISE,
        "steps": steps,
    }
    return {"signature": signature, "runs": {name: [asdict(o) for o in runs] for name, runs in outcomes.items()}}
