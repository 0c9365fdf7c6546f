"""What a person sees of a run: a bar on a terminal, a line now and then elsewhere."""

import math
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from torch import Tensor

from ..record import StepRecord
from .live import Events, histogram

LINES = 10
"""Where there is no terminal, a whole run prints about as many."""


class Progress:
    """Loss, dev metric, weights, time of a step and time that remains; for one run after the other.

    With `tensorboard` each run writes event files too.
    """

    def __init__(self, console: Console, *, quiet: bool = False, tensorboard: bool = False):
        self.console, self.quiet, self.label, self.tensorboard = console, quiet, "", tensorboard
        self.opened: list[Events] = []
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
        )
        self.bar = Bar(*columns, console=console, disable=quiet or not console.is_terminal, transient=True)

    def __enter__(self) -> "Progress":
        self.bar.start()
        return self

    def __exit__(self, *exc: Any) -> None:
        self.bar.stop()
        for events in self.opened:
            events.close()

    def events(self, run: Path, step: int) -> Events | None:
        """For the figures of a run that begins or goes on, if anybody wants them."""
        if not self.tensorboard:
            return None
        self.opened.append(Events(run, step))
        return self.opened[-1]

    def begin(self, title: str, steps: int, done: int) -> None:
        """`title` of the run, if nobody has set a `label` of his own."""
        title = escape(self.label or title)
        self.title, self.steps, self.first, self.start = title, steps, done, time.perf_counter()
        self.figures: dict[str, float] = {}
        self.told, self.weighed = done, ""
        self.task = self.bar.add_task(title, total=steps, completed=done, figures="")
        if done and not self.quiet:
            self.console.print(f"{title}: going on from step {done:,}", soft_wrap=True)

    def note(self, text: str) -> None:
        """A line that stays."""
        if not self.quiet:
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def advance(self, step: int) -> None:
        self.bar.update(self.task, completed=step)

    def weigh(self, record: StepRecord, latest: Tensor) -> None:
        """The effective sample size of a batch, and how the `latest` weights of all examples, 1 is uniform, lie."""
        if self.quiet:
            return
        bars = histogram(latest, plain=self.console.options.ascii_only)
        size, batch = float(record.effective_sample_size), len(record.weights)
        self.weighed = f"{size:.0f} of {batch} effective, weights {escape(bars)}"

    def tell(self, step: int, **figures: float) -> None:
        """New figures, such as loss or dev accuracy. Where there is no bar, a dev figure gets a line of its own."""
        self.figures |= figures
        per_step = (time.perf_counter() - self.start) / max(1, step - self.first)
        parts = [f"{name} {value:.4g}" for name, value in self.figures.items()] + [f"{1000 * per_step:.0f} ms a step"]
        lines = [", ".join(parts), *([self.weighed] if self.weighed else [])]
        text = ", ".join(lines)
        self.bar.update(self.task, figures="\n".join(lines))
        if "dev" in figures and self.bar.disable and not self.quiet and (step - self.told) * LINES >= self.steps:
            self.told = step
            left = per_step * (self.steps - step)
            self.console.print(
                f"{self.title}: step {step:,} of {self.steps:,}, {text}, {duration(left)} left", soft_wrap=True
            )

    def end(self) -> None:
        self.bar.remove_task(self.task)


def duration(seconds: float) -> str:
    """As a person says it: 12 s, 3 min, 1 h 20 min."""
    if seconds < 100:
        return f"{math.ceil(seconds)} s"
    minutes = math.ceil(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"
