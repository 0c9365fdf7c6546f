"""A budget instead of knobs: how often rewards may be measured so that a step costs no more than it is allowed to."""

import math
import time
from collections import deque
from statistics import median
from typing import Any

import torch

LONGEST = 16
"""Rewards are measured at every 16th step at least, whatever it costs: rarer ones teach too little."""
WINDOW = 32
"""Steps of each kind whose times count."""
FIRST = 8
"""Steps of each kind before the first choice; until then every second step is measured."""


def steps_between(overhead: float, plain: float, idle: float, measuring: float) -> int:
    """The smallest k with ``idle + measuring / k <= overhead * plain``, seconds being those of a step.

    Args:
        plain: the user's own step.
        idle: what DDS adds to a step that measures no rewards.
        measuring: what rewards add to that.
    """
    left = overhead * plain - idle
    return LONGEST if left * LONGEST <= measuring else max(1, math.ceil(measuring / left))


class Budget:
    """Times the parts of each step, and chooses k by their medians.

    On a GPU marks are events in its queue, read when they have long passed; nobody waits for them.
    """

    def __init__(self, overhead: float, device: torch.device):
        self.overhead, self.device = overhead, device
        self.every = 2
        self._idle: deque[float] = deque(maxlen=WINDOW)
        self._measured: deque[float] = deque(maxlen=WINDOW)
        self._plain: deque[float] = deque(maxlen=WINDOW)
        self._marks: list[Any] = []
        self._pending: deque[tuple[list[Any], bool]] = deque()

    def mark(self) -> None:
        """Five times a step: loss() begins, its forward pass begins and ends, loss() ends, then `step` twice."""
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def ended(self, measured: bool) -> None:
        """Ends a step, after its six marks; together with the next step's first they tell all times."""
        self._pending.append((self._marks, measured))
        self._marks = []
        while len(self._pending) > 1 and self._passed(self._pending[1][0][0]):
            marks, kind = self._pending.popleft()
            self._note(marks, self._pending[0][0][0], kind)

    def _passed(self, mark: Any) -> bool:
        return self.device.type != "cuda" or bool(mark.query())

    def _between(self, a: Any, b: Any) -> float:
        return a.elapsed_time(b) / 1000 if self.device.type == "cuda" else b - a

    def _note(self, marks: list[Any], following: Any, measured: bool) -> None:
        if len(marks) != 6:
            return
        own = sum(self._between(a, b) for a, b in ((marks[0], marks[1]), (marks[2], marks[3]), (marks[4], marks[5])))
        (self._measured if measured else self._idle).append(own)
        self._plain.append(self._between(marks[0], following) - own)
        if min(len(self._idle), len(self._measured)) >= FIRST:
            idle = median(self._idle)
            self.every = steps_between(
                self.overhead, median(self._plain), idle, max(0.0, median(self._measured) - idle)
            )

    def state_dict(self) -> dict[str, Any]:
        times = {"idle": list(self._idle), "measured": list(self._measured), "plain": list(self._plain)}
        return {"every": self.every, **times}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.every = state["every"]
        for name, times in (("idle", self._idle), ("measured", self._measured), ("plain", self._plain)):
            times.clear()
            times.extend(state[name])
        self._marks, self._pending = [], deque()
