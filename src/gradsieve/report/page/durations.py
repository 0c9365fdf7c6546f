"""Where the time of runs went."""

from collections.abc import Iterable, Mapping

from .curves import Points
from .read import Run

IN_STEP = {
    "data": "reading batches",
    "loss": "forward pass and weights",
    "update": "backward pass and update",
    "method": "rewards and scorer",
}
"""What a run calls the parts of its steps -> what the page calls them."""
AROUND = {"evaluation": "evaluation on dev", "records": "records and checkpoints", "test": "test"}
FIRST, TRAINING, REST = "training the scorer first", "training", "rest of a step"
PARTS = (FIRST, TRAINING, *IN_STEP.values(), REST, *AROUND.values())
"""In the order in which they are shown."""


def parts(run: Run) -> dict[str, float]:
    """Seconds by part. The steps that were timed stand for all."""
    times = run.optional("time.json")
    first = run.path / "first"
    if not times:
        seconds = (run.result or {}).get("seconds") or max((line.get("seconds", 0) for line in run.lines), default=0)
        return {TRAINING: float(seconds)} if seconds else {}
    found = {}
    if first.is_dir():
        found[FIRST] = sum(parts(Run(first, run.settings)).values())
    scale = times.get("step", 0) / max(1, times.get("timed_steps", 0))
    found |= divided(float(times["training"]), {name: scale * s for name, s in times.get("in_step", {}).items()})
    return found | {AROUND.get(name, name): float(seconds) for name, seconds in times.get("around", {}).items()}


def divided(training: float, in_step: Mapping[str, float]) -> dict[str, float]:
    """The seconds of training by what was done in its steps."""
    total = sum(in_step.values())
    if not total:
        return {TRAINING: training}
    scale = min(1.0, training / total)  # steps that were timed may have been slower than the others
    found = {IN_STEP.get(name, name): scale * seconds for name, seconds in in_step.items()}
    return found | {REST: max(0.0, training - sum(found.values()))}


def step_times(run: Run, names: Iterable[str] = IN_STEP) -> Points:
    """Milliseconds a step that those parts of it took, by step: the mean since the evaluation before."""
    found, timed, seconds = {}, 0, 0.0
    for noted in run.optional("time.json").get("history", []):
        count, total = noted["timed_steps"], sum(noted["in_step"].get(name, 0.0) for name in names)
        if count > timed:
            found[noted["step"]] = 1000 * (total - seconds) / (count - timed)
            timed, seconds = count, total
    return found


def mean_parts(runs: Iterable[Run]) -> dict[str, float]:
    """Over the runs that have ended; if none has, over all."""
    every = list(runs)
    known = [own for run in every if run.result is not None and (own := parts(run))] or [
        own for run in every if (own := parts(run))
    ]
    names = dict.fromkeys(name for own in known for name in own)
    return {name: sum(own.get(name, 0.0) for own in known) / len(known) for name in names}
