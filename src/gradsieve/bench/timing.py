"""Time and memory of steps, measured so that ratios mean something on a machine that is not quiet."""

import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from ..runs.team import Team

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler speaks up at each start and stop

PARTS = "gradsieve."
"""How `record_function` labels of the library begin."""


@dataclass(frozen=True)
class Step:
    """What is timed."""

    take: Callable[[], Any]
    period: Callable[[], int] = lambda: 1
    """How many steps make a whole cycle: a method that does more at every k-th step is timed over multiples of k."""

    def __call__(self) -> Any:
        return self.take()


def wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def seconds(step: Step, times: int, device: torch.device) -> float:
    """Of one step, mean over `times` of them."""
    wait(device)
    start = time.perf_counter()
    for _ in range(times):
        step()
    wait(device)
    return (time.perf_counter() - start) / times


def interleaved(
    steps: Mapping[str, Step], device: torch.device, *, rounds: int, block: float, warm_up: int
) -> dict[str, list[float]]:
    """Seconds a step of each, round by round: within a round all take turns, so that all suffer the same neighbours.

    In each turn as many steps are taken as fit in `block` seconds, in whole cycles and one of them at least. Several
    processes take as many steps as the first one can.
    """
    times, team = {}, Team()
    for name, step in steps.items():
        for _ in range(warm_up):
            step()
        cycle, one = step.period(), max(1e-9, seconds(step, 1, device))
        times[name] = team.told(cycle * max(1, math.floor(block / one / cycle)))
    found: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds):
        order = list(steps) if number % 2 == 0 else list(steps)[::-1]
        for name in order:
            found[name].append(seconds(steps[name], times[name], device))
    return found


def ratio(own: list[float], base: list[float]) -> float:
    """Median over rounds of the ratio within a round."""
    return median(a / b for a, b in zip(own, base, strict=True))


def peak_memory(make: Callable[[], Step], device: torch.device, steps: int = 3) -> int:
    """Most bytes in tensors at once, from before the model is made to the end of a few steps."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step = make()
        for _ in range(steps):
            step()
        wait(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as found:
        step = make()
        for _ in range(steps):
            step()
    now = most = 0
    for event in sorted(_memory_events(found), key=lambda event: event[0]):
        now += event[1]
        most = max(most, now)
    return most


def _memory_events(found: profile) -> list[tuple[int, int]]:
    """(when, bytes taken or given back)."""
    assert found.profiler is not None
    assert found.profiler.kineto_results is not None
    events = found.profiler.kineto_results.events()
    return [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]  # type: ignore[attr-defined]


def breakdown(step: Step, device: torch.device, steps: int = 5) -> dict[str, float]:
    """Share of the time of a step by part: the library's own labels, and the rest as ``training``."""
    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=kinds, acc_events=True) as found:
        start = time.perf_counter()
        for _ in range(steps):
            step()
        wait(device)
        total = time.perf_counter() - start
    parts = {
        event.key.removeprefix(PARTS): event.cpu_time_total / 1e6 / total
        for event in found.key_averages()
        if event.key.startswith(PARTS)
    }
    return {"training": max(0.0, 1 - sum(parts.values())), **parts}
