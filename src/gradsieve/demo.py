"""`gradsieve demo`: digits with wrong labels, plain training against DDS, in about a minute."""

from pathlib import Path

import torch
from rich.console import Console

from .compare import compare
from .report.page.build import write_report
from .tasks import TASKS


def run_demo(out: Path, *, seeds: int, steps: int, console: Console) -> None:
    """Compares three methods on the recipe digits-noisy and makes the report of it."""
    console.print(
        "Digits (1,100 images of 8x8), [bold]40% of the training labels wrong[/], 100 clean dev examples; "
        f"{seeds} seeds, {steps:,} steps each."
    )
    torch.set_num_threads(1)  # more would spend their time waiting for each other on models of this size
    compare(
        "digits-noisy",
        ["uniform", "uniform+dev", "dds"],
        seeds,
        overrides=[f"steps={steps}"],
        data=None,
        out=out,
        device=torch.device("cpu"),
        jobs=1,
        console=console,
        quiet=not console.is_terminal,
    )
    page = write_report([out], None, TASKS)
    console.print(f"\nAll numbers: {out / 'comparison.json'}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"Look at it in a browser: {page}", style="bold", highlight=False, markup=False, soft_wrap=True)
