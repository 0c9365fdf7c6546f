"""A budget instead of knobs: how often rewards may be measured so that a step costs no more than it is allowed to."""

import math
import time
from collections import deque
from statistics import median
from typing import Any

import torch

from .parallel import ALONE, World

LONGEST = 16
"""Rewards are measured at every 16th step at least: rarer ones teach too little. So often, too, before the first
choice: lessons of the very first steps, when the model knows nothing yet, do harm if they are many."""
OUT_OF_REACH = 4
"""k where no k can keep the budget, because DDS costs more on a step that measures nothing: a very small model."""
MARGIN = 0.65
"""Share of the budget that is planned with. A budget is a limit: the memory that DDS touches also slows the user's own
part of a step, and clocks err."""
WINDOW = 32
"""Steps of each kind whose times count."""
FIRST = 4
"""Steps of each kind before the first choice."""
AGREEMENT = 8
"""Steps after which several processes agree on k."""


def steps_between(overhead: float, plain: float, idle: float, measuring: float) -> int:
    """The smallest k with ``idle + measuring / k <= overhead * plain``, seconds being those of a step.

    Args:
        plain: the user's own step.
        idle: what DDS adds to a step that measures no rewards.
        measuring: what rewards add to that.
    """
    left = overhead * plain - idle
    if left <= 0:
        return OUT_OF_REACH
    return LONGEST if left * LONGEST <= measuring else max(1, math.ceil(measuring / left))


class Budget:
    """Times the parts of each step, and chooses k by their medians.

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
        if min(len(self._idle), len(self._measured)) >= FIRST:
            idle = median(self._idle)
            self._choice = steps_between(
                MARGIN * self.overhead, median(self._plain), idle, max(0.0, median(self._measured) - idle)
            )

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
