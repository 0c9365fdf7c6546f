"""A budget instead of knobs: how often rewards may be measured so that a step costs no more than it is allowed to."""

import logging
import math
import time
from collections import deque
from statistics import median
from typing import Any

import torch

from .parallel import ALONE, World

LOG = logging.getLogger(__name__)

LONGEST = 16
"""Rewards are measured at every 16th step at least: rarer ones teach too little. So often, too, before the first
choice: lessons of the very first steps, when the model knows nothing yet, do harm if they are many."""
OUT_OF_REACH = 4
"""k at least where no k can keep the budget, because DDS costs more on a step that measures nothing: a small model."""
MARGIN = 0.65
"""Share of the budget that is planned with. A budget is a limit: the memory that DDS touches also slows the user's own
part of a step, and clocks err."""
WINDOW = 32
"""Steps of each kind whose times count."""
FIRST = 4
"""Steps of each kind before the first choice."""
SURE = 8
"""Steps of each kind before it is said that a budget is missed."""
AGREEMENT = 8
"""Steps after which several processes agree on k."""


def steps_between(overhead: float, plain: float, idle: float, measuring: float) -> int:
    """The smallest k with ``idle + measuring / k <= overhead * plain``, seconds being those of a step.

    If `idle` alone is more than that, rewards may cost as much as the budget is missed by: little where it is nearly
    kept, and as much as DDS costs anyway where it means nothing.

    Args:
        plain: the user's own step.
        idle: what DDS adds to a step that measures no rewards.
        measuring: what rewards add to that.
    """
    left = overhead * plain - idle
    most = 1 if left > 0 else OUT_OF_REACH
    return LONGEST if abs(left) * LONGEST <= measuring else max(most, math.ceil(measuring / abs(left)))


class Budget:
    """Times the parts of each step, and chooses k by their medians. If no k keeps it, the log says so once.

    On a GPU marks are events in its queue, read when they have long passed; nobody waits for them.
    """

    def __init__(self, overhead: float, device: torch.device, world: World = ALONE):
        self.overhead, self.device, self.world = overhead, device, world
        self.every = self._choice = LONGEST
        self._steps = 0
        self._idle: deque[float] = deque(maxlen=WINDOW)
        self._measured: deque[float] = deque(maxlen=WINDOW)
        self._plain: deque[float] = deque(maxlen=WINDOW)
        self._marks: list[Any] = []
        self._pending: deque[tuple[list[Any], bool]] = deque()
        self._warned = world.rank > 0

    @property
    def spent(self) -> float | None:
        """What DDS adds to a plain step, 1 being that step, by the clocks of late; None before the first choice."""
        if not self._timed(FIRST):
            return None
        plain, idle, measuring = self._times()
        return (idle + measuring / self.every) / plain

    def mark(self) -> None:
        """At each change between DDS's own work and the user's: four times in `loss()`, twice in `step()`."""
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def ended(self, measured: bool) -> None:
        """Ends a step; its marks and the next step's first tell all times. Processes follow the first one's choice."""
        self._pending.append((self._marks, measured))
        self._marks = []
        while len(self._pending) > 1 and self._passed(self._pending[1][0][0]):
            marks, kind = self._pending.popleft()
            self._note(marks, self._pending[0][0][0], kind)
        self._steps += 1
        if self.world.size == 1 or self._steps % AGREEMENT == 0:
            self.every = self.world.told(self._choice)
        if not self._warned and self._timed(SURE):
            self._warn()

    def _warn(self) -> None:
        spent = self.spent
        assert spent is not None
        self._warned = True
        if spent > self.overhead:
            plain, idle, _ = self._times()
            LOG.warning(
                f"overhead={self.overhead:g} is not kept: DDS adds {spent:.2f} of a plain step of "
                f"{1000 * plain:.3g} ms, {idle / plain:.2f} of it whether rewards are measured or not. Longer steps "
                "(a larger model or batch), smaller dev batches or a smaller scorer bring it down."
            )

    def _passed(self, mark: Any) -> bool:
        return self.device.type != "cuda" or bool(mark.query())

    def _between(self, a: Any, b: Any) -> float:
        return a.elapsed_time(b) / 1000 if self.device.type == "cuda" else b - a

    def _note(self, marks: list[Any], following: Any, measured: bool) -> None:
        if len(marks) % 4 != 2:  # loss() was left by an error
            return
        own = sum(self._between(a, b) for a, b in zip(marks[::2], marks[1::2], strict=True))
        (self._measured if measured else self._idle).append(own)
        self._plain.append(self._between(marks[0], following) - own)
        if self._timed(FIRST):
            self._choice = steps_between(MARGIN * self.overhead, *self._times())

    def _timed(self, steps: int) -> bool:
        """Whether so many of each kind have been."""
        return min(len(self._idle), len(self._measured)) >= steps

    def _times(self) -> tuple[float, float, float]:
        """Seconds of a plain step, of what DDS adds to one that measures nothing, and of what rewards add to that."""
        idle = median(self._idle)
        return max(1e-9, median(self._plain)), idle, max(0.0, median(self._measured) - idle)

    def state_dict(self) -> dict[str, Any]:
        times = {"idle": list(self._idle), "measured": list(self._measured), "plain": list(self._plain)}
        return {"every": self.every, "steps": self._steps, **times}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.every = self._choice = state["every"]
        self._steps = state["steps"]
        for name, times in (("idle", self._idle), ("measured", self._measured), ("plain", self._plain)):
            times.clear()
            times.extend(state[name])
        self._marks, self._pending = [], deque()
