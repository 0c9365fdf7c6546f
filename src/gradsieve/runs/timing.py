"""Where the time of a run goes, by part."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch


class Times:
    """Adds up seconds by part; what lies outside of all parts is counted nowhere.

    A part within a step is timed at every step on a CPU, and elsewhere, where the work goes on by itself, only at
    steps that wait for the device anyway; `timed_steps` says how many these were. `history` has the sums of the parts
    of a step as they stood at each `note`.
    """

    def __init__(self, device: torch.device):
        self.seconds: dict[str, float] = {}
        self.in_step: dict[str, float] = {}
        self.timed_steps = 0
        self.history: list[dict[str, Any]] = []
        self.device, self.sampled = device, device.type == "cpu"

    @contextmanager
    def around(self, name: str) -> Iterator[None]:
        """A part of what is done between steps."""
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A part of a step."""
        if not self.sampled:
            yield
            return
        start = self._now()
        yield
        self.in_step[name] = self.in_step.get(name, 0.0) + self._now() - start

    def after_step(self, *, next_waits: bool) -> None:
        """`next_waits`: whether the step that comes is one that waits for the device."""
        self.timed_steps += self.sampled
        self.sampled = next_waits or self.device.type == "cpu"

    def note(self, step: int) -> None:
        self.history.append({"step": step, "timed_steps": self.timed_steps, "in_step": dict(self.in_step)})

    def state_dict(self) -> dict[str, Any]:
        sums = {"around": dict(self.seconds), "in_step": dict(self.in_step), "timed_steps": self.timed_steps}
        return sums | {"history": list(self.history)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seconds, self.in_step = dict(state["around"]), dict(state["in_step"])
        self.timed_steps = state["timed_steps"]
        self.history = list(state.get("history", ()))  # older checkpoints have none

    def _now(self) -> float:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()
