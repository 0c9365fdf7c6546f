"""A run while it goes on: weights on the terminal, event files for TensorBoard."""

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Ended
from rich.console import Console
from test_runs import CPU, SMALL, digest, run

from gradsieve import GradsieveError
from gradsieve.record import StepRecord
from gradsieve.runs import live
from gradsieve.runs.live import histogram, numbers
from gradsieve.runs.progress import Progress
from gradsieve.tasks import TASKS, recipe_of


class TestHistogram:
    def test_the_bars(self) -> None:
        assert histogram(torch.ones(5)) == "1/4|    █    |4"
        assert histogram(torch.tensor([0.0, 0.25, 1, 4, 100])) == "1/4|█   ▄   █|4"
        assert histogram(torch.tensor([1.0] * 99 + [torch.nan, 2]), plain=True) == "1/4|    @ .  |4"
        assert histogram(torch.full((3,), torch.nan)) == "1/4|         |4"

    def test_it_takes_half_precision(self) -> None:
        assert histogram(torch.tensor([0.5, 2], dtype=torch.float16)) == "1/4|  █   █  |4"


def told(terminal: bool, width: int = 120) -> str:
    """What a person sees of a few steps."""
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=width)
    weights = torch.tensor([0.5, 0.25, 0.25, 0.0])
    record = StepRecord(1, None, weights, 1 / weights.square().sum(), None, {})
    with Progress(console) as progress:
        progress.begin("dds, seed 0", 10, 0)
        progress.advance(5)
        progress.weigh(record, weights * 4)
        progress.tell(5, loss=0.5, dev=97)
        progress.bar.refresh()
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output.getvalue())


def test_effective_size_and_weights_are_shown() -> None:
    line = told(terminal=False)
    assert "loss 0.5, dev 97" in line
    assert "3 of 4 effective, weights 1/4|▄   █ ▄  |4" in line
    bar = told(terminal=True, width=100)
    assert "3 of 4 effective, weights 1/4|▄   █ ▄  |4" in bar
    assert "5/10" in bar


def test_plain_training_shows_no_weights(call: Callable[..., Ended]) -> None:
    settings = [part for key in SMALL for part in ("--set", key)]
    for method, shown in (("uniform", False), ("dds", True)):
        result = call("train", "digits-noisy", "--method", method, "--out", method, *settings)
        assert ("effective, weights 1/4|" in result.out) == shown
        assert result.err == ""


def test_numbers_of_a_record() -> None:
    record = {"loss": 1.5, "dev": {"accuracy": 97}, "rewards": [0.5, None], "skipped": None, "name": "x", "on": True}
    assert dict(numbers(record)) == {"loss": 1.5, "dev/accuracy": 97.0, "rewards/0": 0.5}


class TestTensorBoard:
    def scalars(self, folder: Path) -> dict[str, list[tuple[int, float]]]:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(folder / "tensorboard"))
        events.Reload()
        assert events.Tags()["histograms"] == ["weights"]
        return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}

    def train(self, out: Path, **options: Any) -> None:
        pytest.importorskip("tensorboard", reason="needs the extra tensorboard")
        with Progress(Console(quiet=True), quiet=True, tensorboard=True) as progress:
            settings = {"seed": 0, "data": None, "resume": False, "device": CPU, "progress": progress}
            TASKS["images"].train(recipe_of("digits-noisy", SMALL), "dds", out=out, **settings | options)

    def test_event_files_hold_what_metrics_hold(self, tmp_path: Path) -> None:
        self.train(tmp_path / "run")
        found = self.scalars(tmp_path / "run")
        assert [step for step, _ in found["loss"]] == [5, 10, 15, 20, 25, 30]
        assert [step for step, _ in found["dev/accuracy"]] == [10, 20, 30]
        assert {"effective_sample_size", "reward_mean", "weight_max"} <= set(found)
        run(tmp_path / "without")
        assert not (tmp_path / "without/tensorboard").exists()
        assert digest(tmp_path / "run") == digest(tmp_path / "without")

    def test_a_resumed_run_has_each_step_once(self, tmp_path: Path, stopped: Callable[..., Any]) -> None:
        with stopped(20):
            self.train(tmp_path / "run")
        self.train(tmp_path / "run", resume=True)
        assert [step for step, _ in self.scalars(tmp_path / "run")["loss"]] == [5, 10, 15, 20, 25, 30]

    def test_in_a_comparison(self, call: Callable[..., Ended], tmp_path: Path) -> None:
        pytest.importorskip("tensorboard", reason="needs the extra tensorboard")
        arguments = ("--methods", "uniform,dds", "--seeds", "1", "--set", "steps=4", "--out", "c", "--tensorboard")
        assert call("compare", "digits-noisy", *arguments).code == 0
        assert len(list((tmp_path / "c").glob("*/seed-0/tensorboard/events*"))) == 2

    def test_without_the_package(self, call: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(live, "find_spec", lambda _: None)
        refused = call("train", "digits", "--out", "x", "--tensorboard")
        assert refused.code == 2
        assert "gradsieve[tensorboard]" in refused.err
        with pytest.raises(GradsieveError, match="needs the package tensorboard"):
            live.Events(Path("x"), 0)
