"""What methods bring against what they cost."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from ..errors import GradsieveError
from .comparison import Row


def check_drawing(file: Path) -> None:
    """Before hours are spent."""
    if find_spec("matplotlib") is None:
        raise GradsieveError("--frontier needs the package matplotlib: pip install 'gradsieve[report]'")
    if file.suffix not in (".png", ".svg", ".pdf"):
        raise GradsieveError(f"--frontier {file}: name a file that ends in .png, .svg or .pdf.")
    if not file.absolute().parent.is_dir():
        raise GradsieveError(f"--frontier {file}: there is no folder {file.parent}.")


def price(row: Row) -> float:
    """Its time against uniform's, or in seconds where there is no uniform."""
    return row.seconds if row.time_ratio is None else row.time_ratio


def frontier(rows: Sequence[Row]) -> list[Row]:
    """Those that nobody beats at the same or a lower price, the cheapest first."""
    found: list[Row] = []
    for row in sorted(rows, key=lambda row: (price(row), -row.last)):
        if not found or row.last > found[-1].last:
            found.append(row)
    return found


def plot_frontier(rows: Sequence[Row], file: Path, *, title: str, metric: str) -> None:
    """A point for each method, time against result: means over seeds, and the result's standard deviation."""
    from .drawing import COLOURS, INK, drawn

    unit = "seconds of training" if rows[0].time_ratio is None else "time of training, uniform's being 1"
    with drawn(file, title, unit, f"test {metric}") as axes:
        best = frontier(rows)
        axes.plot([price(row) for row in best], [row.last for row in best], color=INK, alpha=0.35, linewidth=1.5)
        for number, row in enumerate(rows):
            axes.errorbar(
                price(row),
                row.last,
                yerr=row.last_spread,
                color=COLOURS[number % len(COLOURS)],
                marker="os^Dv"[number // len(COLOURS) % 5],
                markersize=8,
                elinewidth=1.5,
                linestyle="none",
                label=row.variant.replace(":", "\n  "),
            )
        axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1), frameon=False, labelcolor=INK, fontsize=8)
