"""A few steps of DDS on the copies: do the weights move, do they collapse, what does it cost?"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from ..parameters import trainable
from ..record import StepRecord
from .case import Case, plain_step
from .copies import duplicates, muted
from .diagnosis import BROKEN, DOUBTFUL, FINE, Finding
from .figures import rank_correlation

STEPS = 10
UNMOVED = 1e-4
"""Deviation of a weight from 1/B, times B."""
COLLAPSED, UNEVEN = 0.05, 0.2
"""Effective sample size over the batch's."""
KEPT, HELD, PEAK = 1, 2, 5
"""Of the parameters, copies that DDS has between steps, between `loss()` and `step()`, and at most."""


@dataclass(frozen=True)
class Trial:
    records: list[StepRecord]
    plain_seconds: float
    dds_seconds: float
    peak_bytes: tuple[int, int] | None
    """Of a plain step and of one with DDS, on a GPU."""


def tried(case: Case) -> Trial:
    """Plain steps on a copy of the copies, then steps of DDS on the copies themselves, all on the one batch."""
    dds, batch = case.dds, case.train_batch
    model, optimizer = duplicates((dds.model, dds.optimizer))
    records: list[StepRecord] = []

    def plain() -> None:
        plain_step(optimizer, case.losses(model, batch).mean())

    def with_dds() -> None:
        dds.optimizer.zero_grad()
        with case.low():
            loss = dds.loss(batch)
        loss.backward()
        dds.optimizer.step()
        if (record := dds.step()) is not None:
            records.append(record)

    plain_seconds, plain_peak = _measured(plain, case.device)
    with muted():
        dds_seconds, dds_peak = _measured(with_dds, case.device)
    peaks = (plain_peak, dds_peak) if case.device.type == "cuda" else None
    return Trial(records, plain_seconds, dds_seconds, peaks)


def _measured(step: Callable[[], None], device: torch.device) -> tuple[float, int]:
    """Seconds of a step, the median of several, and the most memory that a GPU had to give."""
    seconds = []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(STEPS):
        start = time.perf_counter()
        step()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return sorted(seconds)[STEPS // 2], torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def check_weights(trial: Trial) -> Finding:
    """Whether weights move at all, follow the rewards, and stay spread over the batch."""
    name, last = "weights", trial.records[-1]
    if skipped := [record.skipped for record in trial.records if record.skipped]:
        count = f"{len(skipped)} of {len(trial.records)} scorer updates were held back: {skipped[0]}."
        advice = "Lower the learning rate, look for numbers that are not finite, step an optimizer of torch's."
        return Finding(name, BROKEN if len(skipped) == len(trial.records) else DOUBTFUL, count, advice)
    relative = last.weights * len(last.weights)  # (B,), 1 is uniform
    share = float(last.effective_sample_size) / len(relative)
    farthest = float((relative - 1).abs().max())
    seen = (
        f"after {STEPS} steps on one batch, weights from {float(relative.min()):.3g} to {float(relative.max()):.3g} "
        f"(1 is uniform), effective sample size {share:.0%} of the batch"
    )
    if farthest < UNMOVED:
        advice = "Raise the scorer's learning rate, or look at what the scorer sees."
        nothing = last.rewards is not None and not bool(last.rewards.any())
        return Finding(name, BROKEN if nothing else DOUBTFUL, f"the weights do not move: {seen}.", advice)
    if share < UNEVEN:
        advice = (
            "Bound the scores (max_logit=2), lower the scorer's learning rate, or mix in uniform weights (uniform_mix)."
        )
        return Finding(name, BROKEN if share < COLLAPSED else DOUBTFUL, f"the weights collapse: {seen}.", advice)
    follow = "" if last.rewards is None else f", rank correlation with rewards {_follow(last):+.2f}"
    return Finding(name, FINE, f"{seen}{follow}.")


def _follow(record: StepRecord) -> float:
    assert record.rewards is not None
    return rank_correlation(record.weights, record.rewards)


def check_cost(case: Case, trial: Trial) -> Finding:
    """Time and memory beside plain training. A forecast, never a fault."""
    theta, scorer = _bytes(list(trainable(case.model).values())), _bytes(list(case.dds.scorer.parameters()))
    ratio = trial.dds_seconds / trial.plain_seconds
    seen = (
        f"a step takes {_milliseconds(trial.dds_seconds)}, {ratio:.1f} times the {_milliseconds(trial.plain_seconds)} "
        f"of a plain one. Parameters {_size(theta)}, so DDS keeps {_size(KEPT * theta)} more between steps, "
        f"{_size(HELD * theta)} between loss() and step(), {_size(PEAK * theta)} at the peak, and the scorer "
        f"{_size(scorer)}."
    )
    if trial.peak_bytes is not None:
        seen += f" Peak on the device: {_size(trial.peak_bytes[0])} plain, {_size(trial.peak_bytes[1])} with DDS."
    every, overhead = case.settings["update_every"], case.settings["overhead"]
    if overhead is not None:
        seen += f" overhead={overhead:g} will have rewards measured as often as keeps it to that, if anything does."
    elif every > 1:
        seen += f" With update_every={every} about {1 + (ratio - 1) / every:.1f} times."
    return Finding("cost", FINE, seen)


def _bytes(tensors: list[nn.Parameter]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _size(count: int) -> str:
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count = count / 1000  # type: ignore[assignment]
    return f"{count:.3g} GB"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
