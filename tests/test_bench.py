"""The benchmark: that it measures what it says. How fast things are is no matter of a test."""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Ended
from scipy.stats import spearmanr
from torch import nn
from torch.optim import SGD

from gradsieve import DDS, SignalScorer
from gradsieve.baselines import BatchWeight
from gradsieve.bench import contenders, run
from gradsieve.bench.subjects import SUBJECTS, loss_fn, subject_of
from gradsieve.bench.timing import Step, breakdown, interleaved, peak_memory, ratio, timed
from gradsieve.bench.translating import translation_steps
from gradsieve.reward import alignment

CPU = torch.device("cpu")


def test_all_take_turns_between_turns_of_the_base() -> None:
    order: list[str] = []
    steps = {name: Step(lambda name=name: order.append(name)) for name in "abc"}  # type: ignore[misc]
    found = interleaved(steps, "a", CPU, rounds=2, block=0.0, warm_up=1)
    assert "".join(order) == "aaabbbccc" + "abaca" + "acaba"
    assert {name: len(pairs) for name, pairs in found.items()} == {"a": 6, "b": 2, "c": 2}
    (_, first), (before, _), (after, _) = found["b"][0], *found["a"][:2]
    assert first == (before + after) / 2


def test_a_turn_takes_whole_cycles_however_long_they_are() -> None:
    order: list[str] = []
    lengths = iter([1, 2, 3, 4])
    left = 0

    def step() -> None:
        nonlocal left
        left = (left or next(lengths)) - 1
        order.append("b")

    steps = {"a": Step(lambda: order.append("a")), "b": Step(step, lambda: left == 0)}
    interleaved(steps, "a", CPU, rounds=2, block=0.0, warm_up=0)
    assert "".join(order) == "aa" + "bbb" + "abbba" + "abbbba"


def test_a_method_that_measures_now_and_then_is_timed_from_one_measurement_to_the_next() -> None:
    step = contenders.dds_same_scorer(SUBJECTS["mlp"], CPU)
    timed(step, 1, CPU)
    assert timed(step, 2, CPU)[1] == 2 * 3
    assert timed(contenders.uniform(SUBJECTS["mlp"], CPU), 2, CPU)[1] == 2


def test_a_turn_is_as_long_as_its_block() -> None:
    counts = {"slow": 0, "fast": 0}

    def slow() -> None:
        counts["slow"] += 1
        time.sleep(0.02)

    def fast() -> None:
        counts["fast"] += 1
        time.sleep(0.002)

    interleaved({"slow": Step(slow), "fast": Step(fast)}, "slow", CPU, rounds=1, block=0.05, warm_up=1)
    assert counts["slow"] < counts["fast"]


def test_the_ratio_is_the_median_of_ratios_of_neighbours() -> None:
    assert ratio([(2.0, 1.0), (30.0, 10.0), (4.0, 1.0)]) == 3.0


def test_peak_memory_counts_what_lives_at_once() -> None:
    def make() -> Step:
        kept = torch.zeros(1_000_000)

        def step() -> None:
            torch.zeros(500_000)
            torch.zeros(500_000).add_(kept[0])

        return Step(step)

    assert peak_memory(make, CPU) == pytest.approx(4 * 1_500_000, rel=0.01)


def test_the_breakdown_is_of_the_whole_step() -> None:
    parts = breakdown(contenders.dds_no_budget(SUBJECTS["mlp"], CPU), CPU)
    assert {"training", "alignment", "dev_gradient", "reward", "scorer"} <= set(parts)
    assert sum(parts.values()) == pytest.approx(1)


def test_per_example_gradients_by_vmap_are_the_rewards() -> None:
    subject = SUBJECTS["mlp"]
    found = contenders.per_example_vmap(subject, CPU)()
    model, batch, direction = contenders._measuring(subject, CPU)
    expected = alignment(model.eval(), loss_fn, batch, direction, estimator="jvp")
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_per_example_gradients_by_opacus_are_the_rewards() -> None:
    pytest.importorskip("opacus")
    found = contenders.per_example_opacus(SUBJECTS["mlp"], CPU)()
    model, batch, direction = contenders._measuring(SUBJECTS["mlp"], CPU)
    expected = alignment(model, loss_fn, batch, direction, estimator="jvp")
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_learning_to_reweight_by_higher_gives_our_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("higher")
    monkeypatch.setattr(contenders, "BATCHES", 1)
    subject = replace(SUBJECTS["mlp"], optimizer=partial(SGD, lr=0.1))
    found = contenders.batchweight_higher(subject, CPU)()
    ours: list[torch.Tensor] = []

    def way(model: nn.Module, _: Any, dev: Any) -> BatchWeight:
        method = BatchWeight(model, loss_fn, dev)
        step = method.step
        monkeypatch.setattr(method, "step", lambda: ours.append(step().weights))
        return method

    contenders._training(subject, CPU, way)()
    torch.testing.assert_close(ours[0], found, rtol=1e-2, atol=1e-4)


def test_every_translation_method_takes_steps() -> None:
    for method, make in translation_steps(CPU, hidden=16).items():
        if method in ("uniform", "tcs+dds"):
            step = make()
            step()
            step()


def test_rows_for_machines(call: Callable[..., Ended], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(run.PACKAGES, "reward-jvp", "no_such_package")
    ended = call("bench", "--models", "mlp", "--rounds", "1", "--block", "0", "--json", "rows.json")
    assert ended.code == 0, ended.err
    assert "reward-jvp was left out: needs the package no_such_package" in ended.out
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert {"uniform", "dds", "dds-every-step", "batchweight", "reward-finite-difference"} <= {
        r["method"] for r in rows
    }
    for row in rows:
        assert row["model"] == "mlp"
        assert row["time_ratio"] > 0
        assert row["memory_ratio"] > 0
    assert rows[0]["time_ratio"] == rows[0]["memory_ratio"] == 1


def test_a_package_that_fails_in_its_own_way_is_left_out(call: Callable[..., Ended], tmp_path: Path) -> None:
    """Opacus does not know the attention of torch's own Transformer."""
    pytest.importorskip("opacus")
    small = ("--rounds", "1", "--block", "0", "--json", "rows.json")
    ended = call("bench", "--models", "transformer", "--methods", "per-example-opacus", *small)
    assert ended.code == 0, ended.err
    assert "per-example-opacus was left out" in ended.out
    assert [row["method"] for row in json.loads((tmp_path / "rows.json").read_text())] == ["uniform"]


def test_growth_with_batch_and_model(call: Callable[..., Ended], tmp_path: Path) -> None:
    small = ("--methods", "batchweight", "--rounds", "1", "--block", "0")
    ended = call("bench", "--models", "mlp,wrn-10-2", "--batch-sizes", "4,8", *small, "--json", "rows.json")
    assert ended.code == 0, ended.err
    rows = json.loads((tmp_path / "rows.json").read_text())
    found = {(row["model"], row["batch_size"]) for row in rows}
    assert found == {("mlp", 4), ("mlp", 8), ("wrn-10-2", 4), ("wrn-10-2", 8)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--models", "resnet"), "unknown model 'resnet'; there are mlp"),
        (("--models", "wrn-11-2"), "unknown model 'wrn-11-2'"),
        (("--models", "mlp", "--batch-sizes", "many"), "--batch-sizes many: give numbers"),
        (("--models", "mlp", "--batch-sizes", "1"), "a batch has two examples at least"),
        (("--models", "mlp", "--methods", "adam"), "unknown method 'adam'; these models have uniform"),
        (("--rounds", "0"), "--rounds"),
    ],
)
def test_bad_names_are_explained(arguments: tuple[str, ...], message: str, call: Callable[..., Ended]) -> None:
    ended = call("bench", *arguments)
    assert ended.code == 2
    assert message in ended.err


@pytest.mark.parametrize("kind", ["wrn-10-1", "transformer"])
def test_under_bf16_autocast_rewards_keep_their_order(kind: str) -> None:
    """Dev gradient and training step in bfloat16, against the same step in float32."""
    subject = subject_of(kind)
    assert subject is not None
    found = []
    for low in (False, True):
        torch.manual_seed(0)
        model = subject.model()
        optimizer = SGD(model.parameters(), lr=0.01)
        dds = DDS(model, SignalScorer(), loss_fn, optimizer, [subject.batch(32, CPU)], seed=0)
        batches = [subject.batch(64, CPU) for _ in range(4)]
        for batch in batches:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=low):
                loss = dds.loss(batch)
            loss.backward()
            optimizer.step()
            record = dds.step()
        assert record is not None
        assert record.rewards is not None
        found.append(record.rewards)
    assert spearmanr(*(r.numpy() for r in found)).statistic > 0.95
