"""What goes on around the steps of a run: figures, weights of examples, evaluation, checkpoints, the result."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import GradsieveError
from ..optimizers import load_optimizer
from ..parameters import to_device
from ..randomness import random_state, set_random_state
from ..record import GroupRecord, StepRecord
from .directory import RunDirectory, numbered
from .live import Events
from .progress import Progress
from .recipe import Recipe
from .timing import Times

Metrics = dict[str, float]


def first_is_higher(new: Metrics, old: Metrics) -> bool:
    """Whether `new` is to be preferred: the first metric decides, and of equals the later one."""
    name = next(iter(new))
    return new[name] >= old[name]


class Journal:
    """Keeps a run's books. The loop stays the task's own::

        step = journal.begin(title)
        while step < recipe.steps:
            ...                                        # one training step
            step += 1
            journal.after_step(step, loss, record, index=index)
        result = journal.result(evaluate_test)

    Args:
        parts: everything with a state that a resumed run needs, by name.
        evaluated: the module whose parameters are measured and kept.
        evaluate_dev: gives its metrics, the most telling one first.
        better: ``better(new, old)`` chooses the best step by them.
        num_examples: size of the training set, for the latest weight of each example; 0 where examples have none.
        evaluate_more: gives metrics of other sets, by name; they are noted beside dev's and choose nothing.
        on_checkpoint: called before each checkpoint, for whatever else is to be written down now and then.
    """

    def __init__(
        self,
        run: RunDirectory,
        recipe: Recipe,
        parts: Mapping[str, Any],
        *,
        evaluated: nn.Module,
        evaluate_dev: Callable[[], Metrics],
        better: Callable[[Metrics, Metrics], bool] = first_is_higher,
        num_examples: int = 0,
        evaluate_more: Callable[[], Mapping[str, Metrics]] = dict,
        on_checkpoint: Callable[[], None] = lambda: None,
        device: torch.device,
        progress: Progress,
    ):
        self.run, self.recipe, self.parts, self.progress = run, recipe, parts, progress
        self.evaluated, self.evaluate_dev, self.better, self.device = evaluated, evaluate_dev, better, device
        self.latest = torch.full((num_examples,), torch.nan, dtype=torch.float16, device=device)  # 1 is uniform
        self.share, self.updates = torch.zeros((), device=device), 0
        self.untold: StepRecord | GroupRecord | None = None  # the newest since the log's last line
        self.best: dict[str, Any] = {"step": 0, "dev": None}
        self.evaluate_more, self.on_checkpoint = evaluate_more, on_checkpoint
        self.events: Events | None = None
        self.seconds = self.clock = 0.0
        self.times = Times(device)

    def begin(self, title: str) -> int:
        """Goes back to the last checkpoint, if there is one, and returns its step, else 0."""
        step = 0
        if (found := self.run.restore()) is not None:
            step, state = found
            try:
                self._load(state)
            except (KeyError, TypeError, RuntimeError, ValueError) as error:
                raise GradsieveError(
                    f"the checkpoint at step {step} in {self.run.path} does not fit this run ({error}). "
                    "Begin anew with another --out."
                ) from error
        self.events = self.progress.events(self.run.path, step)
        self.progress.begin(title, self.recipe.steps, step)
        self.clock = time.perf_counter()
        return step

    def after_step(
        self,
        step: int,
        loss: Tensor,
        record: StepRecord | GroupRecord | None,
        *,
        index: Tensor | None = None,
        figures: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        """Notes the step, and does what is due after it. Waits for the device only then.

        `index` tells which examples the weights of a StepRecord are for; `figures` gives more for the log.
        """
        team, record = self.run.team, self.run.team.joint(record)
        if isinstance(record, StepRecord) and index is not None:
            index = team.gathered(index)
            self.latest[index] = (record.weights * len(record.weights)).half()
            self.share += record.effective_sample_size / len(record.weights)
            self.updates += 1
        self.untold = self.untold if record is None else record
        self.progress.advance(step)
        recipe = self.recipe
        moments = (
            recipe.log_every,
            -(-recipe.steps // recipe.scores),
            recipe.evaluate_every,
            recipe.checkpoint_every,
        )
        log, scores, evaluate, checkpoint = (step % every == 0 or step == recipe.steps for every in moments)
        if log or isinstance(record, GroupRecord):  # which come seldom
            newest, self.untold = self.untold, None
            line = {"step": step, "loss": team.summed(loss).item() / team.size}
            self._log((newest.to_dict() if newest is not None else {}) | line | dict(figures()))
            if isinstance(newest, StepRecord) and self.updates:
                self.progress.weigh(newest, self.latest)
            self.progress.tell(step, loss=line["loss"])
        self.times.after_step(next_waits=(step + 1) % recipe.log_every == 0)
        if not (scores or evaluate or checkpoint):
            return
        self.seconds += time.perf_counter() - self.clock
        if scores and self.updates:
            with self.times.around("records"):
                self.run.save_scores(step, self.latest)
                if self.events is not None:
                    self.events.weights(step, self.latest)
        if evaluate:
            with self.times.around("evaluation"):
                self._evaluate(step)
            self.times.note(step)
            self._save_times(step)
        if checkpoint:
            with self.times.around("records"):
                self.on_checkpoint()
                self._checkpoint(step)
        self.clock = time.perf_counter()

    def result(self, evaluate_test: Callable[[str], Metrics]) -> dict[str, Any]:
        """What is measured on test, once, after training: the "last" parameters, and the "best", which dev chose.

        Of several processes the first one measures.
        """
        if not self.run.team.first:
            return self.run.team.told(None)
        self.run.save_tensors("final/model", self.evaluated.state_dict())
        with self.times.around("test"):
            last = evaluate_test("last")
            self.evaluated.load_state_dict(load_file(self._best_file()))
            best = last if self.best["step"] == self.recipe.steps else evaluate_test("best")
        self._save_times(self.recipe.steps)
        self.progress.end()
        found = {
            "steps": self.recipe.steps,
            "seconds": self.seconds,
            "test": last,
            "test_best_by_dev": best,
            "dev_best": self.best["dev"],
            "best_step": self.best["step"],
        }
        if len(self.latest):
            found["effective_share"] = (self.share / self.updates).item() if self.updates else 1.0
        return self.run.team.told(found)

    def _log(self, record: Mapping[str, Any]) -> None:
        self.run.log(record)
        if self.events is not None:
            self.events.log(record)

    def _evaluate(self, step: int) -> None:
        metrics = self.evaluate_dev()
        self._log({"step": step, "seconds": self.seconds, "dev": metrics} | dict(self.evaluate_more()))
        self.progress.tell(step, dev=next(iter(metrics.values())))
        if self.best["dev"] is None or self.better(metrics, self.best["dev"]):
            self.best = {"step": step, "dev": metrics}
            self.run.save_tensors(f"best/{numbered(step)}", self.evaluated.state_dict())

    def _save_times(self, step: int) -> None:
        self.run.save_times({"step": step, "training": self.seconds} | self.times.state_dict())

    def _checkpoint(self, step: int) -> None:
        own = {"latest": self.latest, "share": self.share, "updates": self.updates, "best": self.best}
        state = {"parts": {name: part.state_dict() for name, part in self.parts.items()}, "seconds": self.seconds}
        state["times"] = self.times.state_dict()
        state["untold"] = None if self.untold is None else vars(self.untold)
        self.run.save_checkpoint(step, own | state | {"random": random_state(self.device)})
        for file in self._best_file().parent.glob("step-*"):  # what an older checkpoint called the best
            if file != self._best_file() and self.run.team.first:
                file.unlink()

    def _best_file(self) -> Path:
        return self.run.path / f"best/{numbered(self.best['step'])}.safetensors"

    def _load(self, state: Mapping[str, Any]) -> None:
        for name, part in self.parts.items():
            if isinstance(part, Optimizer):
                load_optimizer(part, state["parts"][name])
            else:
                part.load_state_dict(state["parts"][name])
        self.latest.copy_(state["latest"])
        self.share.copy_(state["share"])
        self.updates, self.seconds = state["updates"], state["seconds"]
        self.untold = StepRecord(**to_device(state["untold"], self.device)) if state.get("untold") else None
        if "times" in state:  # older checkpoints have none
            self.times.load_state_dict(state["times"])
        nothing, self.best = self.best, state["best"]
        if not self._best_file().is_file():  # only an older checkpoint could be read: dev chooses anew
            self.best = nothing
        set_random_state(self.device, state["random"])
        self.run.team.reseed(self.updates, int(1000 * self.seconds))
