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
    ends: Callable[[], bool] = lambda: True
    """Whether the latest step was the last of a cycle. A method that does more at some steps than at others is timed
    from one such step to another, however often it chooses to do so."""

    def __call__(self) -> Any:
        return self.take()


def wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def timed(step: Step, cycles: int, device: torch.device) -> tuple[float, int]:
    """Seconds of so many whole cycles, and how many steps they took."""
    wait(device)
    start, steps = time.perf_counter(), 0
    while cycles:
        step()
        steps += 1
        cycles -= step.ends()
    wait(device)
    return time.perf_counter() - start, steps


def interleaved(
    steps: Mapping[str, Step], base: str, device: torch.device, *, rounds: int, block: float, warm_up: int
) -> dict[str, list[tuple[float, float]]]:
    """Seconds a step of each, and of `base` beside it: the mean of its turns before and after.

    In a round all take turns, each between two turns of `base`, so that both suffer the same neighbours. A turn is as
    many cycles as fit in `block` seconds, and one at least. Several processes take as many as the first one can.
    """
    cycles, team = {}, Team()
    for name, step in steps.items():
        for _ in range(warm_up):
            step()
        timed(step, 1, device)  # to the end of a cycle
        one, _ = timed(step, 1, device)
        cycles[name] = team.told(max(1, math.floor(block / max(one, 1e-9))))

    def turn(name: str) -> float:
        seconds, count = timed(steps[name], cycles[name], device)
        return seconds / count

    others = [name for name in steps if name != base]
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for number in range(rounds):
        before = turn(base)
        found[base].append((before, before))
        for name in others if number % 2 == 0 else others[::-1]:
            own, after = turn(name), turn(base)
            found[name].append((own, (before + after) / 2))
            found[base].append((after, after))
            before = after
    return found


def ratio(found: list[tuple[float, float]]) -> float:
    """Median of the ratios of neighbours."""
    return median(own / beside for own, beside in found)


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
    """Share of the time by part, over whole cycles, `steps` or more: the library's labels, the rest ``training``."""
    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=kinds, acc_events=True) as found:
        total = 0.0
        while steps > 0:
            seconds, taken = timed(step, 1, device)
            total, steps = total + seconds, steps - taken
    parts = {
        event.key.removeprefix(PARTS): event.cpu_time_total / 1e6 / total
        for event in found.key_averages()
        if event.key.startswith(PARTS)
    }
    return {"training": max(0.0, 1 - sum(parts.values())), **parts}
