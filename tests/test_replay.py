"""Less work for the same signal: last-layer alignment, lessons heard again, a budget."""

import copy
import logging
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Adam
from zoo import KINDS, cross_entropy, make, mlp

from gradsieve import DDS, GradsieveError, MLPScorer, SignalScorer, alignment, learner
from gradsieve import budget as budget_module
from gradsieve.agreement import FRESH, Agreement
from gradsieve.budget import FIRST, LONGEST, MARGIN, OUT_OF_REACH, SURE, Budget, steps_between
from gradsieve.last_layer import LastLayer, last_linear
from gradsieve.parameters import Direction, lent, untouched
from gradsieve.replay import SHORTEST, Lesson, Ring, foresight, hindsight
from gradsieve.scorer import example_weights

CPU = torch.device("cpu")


def without_the_common_change(model: nn.Module, run: Callable[[], Tensor], direction: Direction) -> dict[str, Tensor]:
    """The direction that moves the last layer's outputs by nothing on average: its bias takes back what others do."""
    found = last_linear(model)
    assert found is not None
    bias, seen, eps = f"{found[0]}.bias".lstrip("."), list[Tensor](), 1e-5
    hook = found[1].register_forward_hook(lambda _, __, output: seen.append(output.detach()))
    state, theta = torch.get_rng_state(), dict(model.named_parameters())
    for step in (eps, -eps):
        torch.set_rng_state(state)
        with untouched(model), lent(model, {n: theta[n].detach() + step * v for n, v in direction.items()}):
            run()
    hook.remove()
    torch.set_rng_state(state)
    change = (seen[len(seen) // 2 - 1] - seen[-1]).flatten(0, -2).mean(0) / (2 * eps)
    return {**direction, bias: direction[bias] - change}


class TestLastLayer:
    @pytest.mark.parametrize("kind", KINDS)
    def test_it_is_the_exact_alignment_in_that_layer_less_the_common_change(self, kind: str) -> None:
        model, batch = make(kind, 5, 4, 3)
        layer = LastLayer(model)
        direction = {
            name: torch.randn_like(p) if name.startswith(f"{layer.name}.") else torch.zeros_like(p)
            for name, p in model.named_parameters()
        }
        state = torch.get_rng_state()
        with layer.heard():
            losses = cross_entropy(model, batch)
        found = layer.alignment(layer.seen(losses), direction)
        torch.set_rng_state(state)
        twin = copy.deepcopy(model)
        own = without_the_common_change(twin, lambda: cross_entropy(twin, batch), direction)
        expected = alignment(twin, cross_entropy, batch, own, estimator="per_example")
        torch.testing.assert_close(found, expected)
        losses.sum().backward()  # the graph is still there

    def test_rows_of_several_places_count_together(self) -> None:
        """A layer that is applied to each of T places of an example."""
        model, x = nn.Linear(4, 3).double(), torch.randn(5, 7, 4).double()

        def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
            return model(batch).square().mean((1, 2))

        layer, direction = LastLayer(model), {n: torch.randn_like(p) for n, p in model.named_parameters()}
        with layer.heard():
            losses = loss_fn(model, x)
        own = without_the_common_change(model, lambda: model(x), direction)
        torch.testing.assert_close(layer.alignment(layer.seen(losses), direction), alignment(model, loss_fn, x, own))

    def test_a_shift_of_all_outputs_tells_nothing(self) -> None:
        model, batch = make("mlp", 5, 4, 3)
        layer = LastLayer(model)
        with layer.heard():
            losses = cross_entropy(model, batch)
        found = layer.alignment(layer.seen(losses), {layer.bias: torch.randn(3).double()})
        assert found.abs().max() < 1e-12

    def test_a_tied_weight_is_found_by_its_first_name(self) -> None:
        class Tied(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.words, self.head = nn.Embedding(7, 4), nn.Linear(4, 7)
                self.head.weight = self.words.weight

            def forward(self, x: Tensor) -> Tensor:
                return self.head(self.words(x))

        model, batch = Tied(), (torch.randint(7, (5,)), torch.randint(7, (5,)))
        layer = LastLayer(model)
        with layer.heard():
            losses = cross_entropy(model, batch)
        assert layer.weight == "words.weight"
        assert (layer.alignment(layer.seen(losses), {"words.weight": torch.randn(7, 4)}) != 0).all()

    def test_a_computed_weight_is_no_layer_of_its_own(self) -> None:
        head = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
        with pytest.raises(GradsieveError, match="the model has none"):
            LastLayer(head)
        assert LastLayer(nn.Sequential(nn.Linear(4, 4), head)).name == "0"

    def test_it_listens_to_nothing_else(self) -> None:
        model, batch = make("mlp", 5, 4, 3)
        layer = LastLayer(model)
        twin = copy.deepcopy(model)
        with layer.heard():
            losses = cross_entropy(model, batch)
        cross_entropy(twin, batch)
        with layer.heard():  # a teacher's pass within the student's
            losses = cross_entropy(model, batch)
            cross_entropy(twin, batch)
        model(torch.randn(2, 4).double())
        assert layer.alignment(layer.seen(losses), {}).tolist() == [0] * 5
        with pytest.raises(GradsieveError, match="was not called"):
            layer.alignment(layer.seen(losses), {})

    def test_what_it_cannot_do_is_said(self) -> None:
        with pytest.raises(GradsieveError, match="the model has none"):
            LastLayer(nn.Conv2d(1, 1, 1))
        model = nn.Linear(4, 3)
        layer = LastLayer(model)
        with layer.heard():
            losses = model(torch.randn(6, 4)).view(2, 9).mean(1)
        with pytest.raises(GradsieveError, match=r"gave shape \(6, 3\)"):
            layer.alignment(layer.seen(losses), {})

    def test_a_direction_without_the_layer_is_nothing(self) -> None:
        model, batch = make("mlp", 5, 4, 3)
        layer = LastLayer(model)
        with layer.heard():
            losses = cross_entropy(model, batch)
        assert layer.alignment(layer.seen(losses), {"0.weight": torch.ones(8, 4)}).tolist() == [0] * 5


def lessons_of(dds: DDS, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What psi is going to learn from."""
    told, learn = list[Tensor](), dds.learner.learn

    def listen(parts: Any, joint: Any, r: Sequence[Tensor], *more: Any) -> Tensor:
        told.extend(r)
        return learn(parts, joint, r, *more)

    monkeypatch.setattr(dds.learner, "learn", listen)
    return told


class TestLessCommon:
    """With alignment in the last layer psi learns from rewards less what the batch has in common."""

    @pytest.mark.parametrize("kind", KINDS)
    def test_they_are_rewards_of_all_layers_less_the_common_change(
        self, kind: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model, batch = make(kind, 6, 4, 3)
        twin, optimizer = copy.deepcopy(model), SGD(model.parameters(), lr=0.1)
        dds = DDS(model, None, cross_entropy, optimizer, [batch], alignment="last_layer")
        lessons, state = lessons_of(dds, monkeypatch), torch.get_rng_state()
        dds.loss(batch).backward()
        optimizer.step()
        record = dds.step()
        assert record is not None

        v = dds.agreement.direction
        torch.set_rng_state(state)
        own = without_the_common_change(twin, lambda: cross_entropy(twin, batch), v)
        for found, direction in ((record.rewards, v), (lessons[0], own)):
            expected = alignment(twin, cross_entropy, batch, direction, estimator="per_example")
            torch.testing.assert_close(found, expected, rtol=0, atol=0.01 * float(record.rewards.abs().max()))
        assert (record.rewards - lessons[0]).abs().max() > 0.02 * record.rewards.abs().max()

    @pytest.mark.parametrize("low", [False, True])
    def test_by_the_latest_call_of_a_layer_and_under_autocast(self, low: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        class Twice(nn.Module):
            """Whose second bias belongs to the latest call alone."""

            def __init__(self) -> None:
                super().__init__()
                self.body, self.head, self.bias = nn.Linear(4, 3), nn.Linear(3, 3), nn.Parameter(torch.zeros(3))

            def forward(self, x: Tensor) -> Tensor:
                return self.head(torch.tanh(self.head(self.body(x)))) + self.bias

        torch.manual_seed(0)
        model, batch = Twice(), (torch.randn(8, 4), torch.randint(3, (8,)))
        twin, optimizer = copy.deepcopy(model).double(), SGD(model.parameters(), lr=0.1)
        dds = DDS(model, None, cross_entropy, optimizer, [batch], alignment="last_layer", seed=0)
        lessons = lessons_of(dds, monkeypatch)
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            loss = dds.loss(batch)
        loss.backward()
        optimizer.step()
        record = dds.step()
        assert record is not None

        wide = batch[0].double(), batch[1]
        v = {name: value.double() for name, value in dds.agreement.direction.items()}
        taken_back = without_the_common_change(twin, lambda: cross_entropy(twin, wide), v)["head.bias"] - v["head.bias"]
        expected = alignment(twin, cross_entropy, wide, v | {"bias": v["bias"] + taken_back}).float()
        largest = float(record.rewards.abs().max())
        torch.testing.assert_close(lessons[0], expected, rtol=0, atol=(0.05 if low else 0.01) * largest)
        assert (record.rewards - lessons[0]).abs().max() > 0.1 * largest

    @pytest.mark.parametrize("parts", [2, 8])
    def test_a_batch_in_parts_has_in_common_what_all_of_it_has(
        self, parts: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        told = []
        for count in (1, parts):
            torch.manual_seed(0)
            model, (x, y) = mlp(6, 3, 8), (torch.randn(8, 6), torch.randint(3, (8,)))
            optimizer, scorer = SGD(model.parameters(), lr=0.1), SignalScorer()
            for parameter in scorer.parameters():  # even weights, in whatever parts
                nn.init.zeros_(parameter)
            dds = DDS(model, scorer, cross_entropy, optimizer, [(x, y)], alignment="last_layer", seed=0)
            lessons = lessons_of(dds, monkeypatch)
            for part in zip(x.chunk(count), y.chunk(count), strict=True):
                dds.loss(part).backward()
            optimizer.step()
            record = dds.step()
            assert record is not None
            told.append((record.rewards, torch.cat(lessons)))
        torch.testing.assert_close(told[0], told[1], rtol=1e-3, atol=1e-5)
        assert told[0][1].abs().max() > 0.1 * told[0][0].abs().max()

    def test_logits_that_are_changed_in_place(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model, (_, batches, dev, _) = nn.Sequential(nn.Linear(6, 5)), problem()

        def loss_fn(model: nn.Module, batch: Any) -> Tensor:
            logits = model(batch[0])
            logits[:, 3:] = -torch.inf
            logits += 100
            return nn.functional.cross_entropy(logits, batch[1], reduction="none")

        optimizer = SGD(model.parameters(), lr=0.1)
        dds = DDS(model, None, loss_fn, optimizer, dev, alignment="last_layer")
        lessons = lessons_of(dds, monkeypatch)
        dds.loss(batches[0]).backward()
        optimizer.step()
        record = dds.step()
        assert record is not None
        assert record.skipped is None
        assert lessons[0].abs().max() < 10 * record.rewards.abs().max()

    @pytest.mark.parametrize("unused", [False, True])
    def test_a_budget_gives_up_a_layer_that_losses_do_not_depend_on(self, unused: bool) -> None:
        """Its latest call is a teacher's, or one that nobody uses."""
        model, (_, batches, dev, _) = mlp(6, 3, 8), problem()

        def loss_fn(model: nn.Module, batch: Any) -> Tensor:
            losses = cross_entropy(model, batch)
            with torch.set_grad_enabled(unused):
                model(batch[0])
            return losses

        optimizer = SGD(model.parameters(), lr=0.1)
        dds = DDS(model, None, loss_fn, optimizer, dev, overhead=0.1)
        plan(dds, 1)
        with pytest.warns(UserWarning, match="on which their losses depend"):
            dds.loss(batches[0])
        assert dds.last_layer is None

    def test_a_compiled_model_tells_the_same(self, monkeypatch: pytest.MonkeyPatch) -> None:
        told = []
        for compiled in (False, True):
            model, batches, dev, _ = problem()
            optimizer = SGD(model.parameters(), lr=0.1)
            taught = torch.compile(model, backend="eager") if compiled else model
            dds = DDS(taught, None, cross_entropy, optimizer, dev, alignment="last_layer", seed=0)
            lessons = lessons_of(dds, monkeypatch)
            for batch in batches[:3]:
                optimizer.zero_grad()
                dds.loss(batch).backward()
                optimizer.step()
                dds.step()
            told.append(torch.cat(lessons))
        torch.testing.assert_close(told[0], told[1])

    def test_a_layer_that_rewards_pass_by_is_said(self) -> None:
        class Shy(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.head = nn.Linear(6, 3)

            def forward(self, x: Tensor) -> Tensor:
                return self.head(x) if torch.is_grad_enabled() else x[:, :3]

        model, (_, batches, dev, _) = Shy(), problem()
        optimizer = SGD(model.parameters(), lr=0.1)
        dds = DDS(model, None, cross_entropy, optimizer, dev, alignment="last_layer")
        dds.loss(batches[0]).backward()
        optimizer.step()
        with pytest.raises(GradsieveError, match="was called 1 times in the training forward, but 0 times"):
            dds.step()

    @pytest.mark.parametrize(
        ("options", "caution"),
        [
            ({}, 8.0),
            ({"alignment": "last_layer"}, 2.0),
            ({"overhead": 0.1}, 2.0),
            ({"overhead": 0.1, "alignment": "full"}, 8.0),
            ({"alignment": "last_layer", "reward": "per_example"}, 8.0),
            ({"alignment": "last_layer", "caution": 5.0}, 5.0),
        ],
    )
    def test_they_need_less_caution(self, options: dict[str, Any], caution: float) -> None:
        dds, _ = trained(3, **options)
        assert dds.learner.caution == caution

    def test_other_rewards_stay_as_they_are(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model, batches, dev, _ = problem()
        optimizer = SGD(model.parameters(), lr=0.1)
        dds = DDS(model, None, cross_entropy, optimizer, dev, alignment="last_layer", reward="jvp")
        lessons = lessons_of(dds, monkeypatch)
        dds.loss(batches[0]).backward()
        optimizer.step()
        record = dds.step()
        assert record is not None
        assert torch.equal(record.rewards, lessons[0])


def lesson(value: float, count: int = 4) -> Lesson:
    return Lesson(None, {"loss": torch.full((count,), value)}, torch.tensor([1.0, -1.0] * (count // 2)))


class TestRing:
    def ring(self, size: int = 8) -> Ring:
        return Ring(size, torch.Generator().manual_seed(0), CPU)

    def test_foresight_is_a_correlation(self) -> None:
        w, r = torch.rand(50).softmax(0), torch.randn(50)
        expected = torch.corrcoef(torch.stack([w, r]))[0, 1]
        torch.testing.assert_close(foresight(w, r), expected)

    @given(st.integers(1, 600), st.sampled_from([0.0, 1.7]), st.sampled_from([torch.float32, torch.float64]))
    def test_rounding_is_no_evidence(self, size: int, score: float, dtype: torch.dtype) -> None:
        weights = example_weights(torch.full((size,), score, dtype=dtype))
        r = torch.randn(size, generator=torch.Generator().manual_seed(size), dtype=dtype)
        ring = self.ring()
        ring.judge(hindsight(weights, r, torch.tensor(0.1)), 16)
        assert float(ring.trust) == float(foresight(weights, r)) == 0

    def test_the_young_come_more_often_and_the_old_are_forgotten(self) -> None:
        ring = self.ring(40)
        assert ring.draw() is None
        for value in range(60):
            ring.add([lesson(value)], torch.zeros(()))
        drawn = [float(ring.draw().signals["loss"][0]) for _ in range(1000)]  # type: ignore[union-attr]
        forgotten, old, young = (sum(a <= value < a + 20 for value in drawn) for a in (0, 20, 40))
        assert forgotten == 0
        assert 200 < old < young

    def test_lessons_that_mislead_make_it_shorter_and_good_ones_longer(self) -> None:
        ring, bad, good = self.ring(SHORTEST + 8), torch.tensor(-1.0), torch.tensor(1.0)
        for _ in range(6):
            ring.add([lesson(0)], bad)
        assert ring.length == SHORTEST
        lengths = []
        for _ in range(16):
            ring.add([lesson(0)], good)
            lengths.append(ring.length)
        assert lengths[-1] == SHORTEST + 8
        assert lengths == sorted(lengths)

    def test_a_small_one_is_never_shorter_than_it_is(self) -> None:
        ring = self.ring(3)
        for _ in range(6):
            ring.add([lesson(0)], torch.tensor(-1.0))
        assert ring.length == 3

    @given(seed=st.integers(0, 1000), size=st.integers(2, 50), price=st.floats(0.01, 10))
    def test_trust_is_the_largest_share_of_the_weights_that_would_have_been_worth_its_price(
        self, seed: int, size: int, price: float
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        weights = torch.rand(3, size, generator=generator, dtype=torch.float64)
        weights, r = weights / weights.sum(1, keepdim=True), torch.randn(3, size, generator=generator).double()
        total = torch.stack([hindsight(w, its, torch.tensor(price)) for w, its in zip(weights, r, strict=True)]).sum(0)

        def brought(tau: Tensor) -> Tensor:
            given = 1 / size + tau * (weights - 1 / size)
            return ((given - 1 / size) * r).sum() - price * (size * given.square().sum(1) - 1).sum()

        trust = total[0] / total[1]
        torch.testing.assert_close(brought(trust), torch.zeros_like(trust), atol=1e-6, rtol=0)
        assert brought(trust / 2) > 0 > brought(2 * trust) or trust < 0

    def test_trust_is_earned_and_lost(self) -> None:
        ring, w = self.ring(), torch.tensor([0.4, 0.1, 0.4, 0.1])
        right = torch.tensor([1.0, -1.0, 1.0, -1.0])
        assert float(ring.trust) == 0
        ring.judge(hindsight(w, right, torch.tensor(0.1)), 16)
        assert float(ring.trust) == 1
        ring.judge(hindsight(w, -right, torch.tensor(0.1)), 32)
        assert float(ring.trust) == 0
        half = self.ring()
        for _ in range(100):  # P U = 2 G
            half.judge(hindsight(w, right, 1.2 / torch.tensor(0.36)), 16)
        torch.testing.assert_close(half.trust, torch.tensor(0.5))
        free = self.ring()
        free.judge(hindsight(w, right, torch.tensor(0.0)), 16)  # caution 0
        assert float(free.trust) == 1

    def test_its_bytes(self) -> None:
        ring = self.ring(3)
        for _ in range(5):
            ring.add([lesson(0.0, 10)], torch.zeros(()))
        assert ring.bytes == 3 * 2 * 10 * 4

    def test_saved_and_loaded_it_goes_on_alike(self) -> None:
        ring = self.ring()
        for value in range(5):
            ring.add([lesson(value)], torch.rand(()))
        again = self.ring()
        ring.judge(torch.tensor([0.3, 1.0]), 4)
        again.load_state_dict(ring.state_dict(), CPU)
        assert (again.length, again.bytes) == (ring.length, ring.bytes)
        for its in (ring, again):
            its.judge(torch.tensor([0.1, 1.0]), 4)
        assert float(again.trust) == float(ring.trust) > 0
        for _ in range(5):
            assert torch.equal(again.draw().signals["loss"], ring.draw().signals["loss"])  # type: ignore[union-attr]


def problem(seed: int = 0) -> tuple[nn.Module, list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]], Tensor]:
    """Three classes, half of the training labels wrong; batches of 32, and whether the labels of the first are."""
    torch.manual_seed(seed)
    x = torch.randn(640, 6)
    y = x[:, :3].argmax(1)
    wrong = torch.rand(640) < 0.4
    noisy = torch.where(wrong, (y + 1 + torch.randint(2, y.shape)) % 3, y)
    dev_x = torch.randn(128, 6)
    dev = list(zip(dev_x.split(32), dev_x[:, :3].argmax(1).split(32), strict=True))
    return mlp(6, 3, 32), list(zip(x.split(32), noisy.split(32), strict=True)), dev, wrong


def trained(steps: int, **options: Any) -> tuple[DDS, dict[str, Any]]:
    model, batches, dev, wrong = problem()
    optimizer = Adam(model.parameters(), lr=0.01)
    dds = DDS(model, options.pop("scorer", None), cross_entropy, optimizer, dev, seed=0, **options)
    weights, records = torch.ones(640), []
    for step in range(steps):
        place = step % len(batches)
        optimizer.zero_grad()
        dds.loss(batches[place]).backward()
        assert dds._turn is not None
        weights[32 * place : 32 * (place + 1)] = 32 * dds._turn.joint.own_weights()[0]
        optimizer.step()
        records.append(dds.step())
    return dds, {"right": weights[~wrong].mean(), "wrong": weights[wrong].mean(), "records": records}


def plan(dds: DDS, every: int) -> None:
    """As if the budget had chosen it."""
    assert dds.budget is not None
    dds.budget.every = dds.budget._choice = every


@pytest.mark.parametrize("how", ["full", "last_layer"])
def test_rewards_at_every_eighth_step_teach_when_they_are_replayed(how: str) -> None:
    dds, found = trained(400, update_every=8, replay=32, alignment=how, caution=1.0)
    assert found["right"] > 1.2 * found["wrong"]
    assert [found["records"][step].to_dict()["trust"] for step in (7, -1)] == [0, 1]
    assert [r is not None for r in found["records"][:16]] == [step % 8 == 7 for step in range(16)]
    assert dds.learner.ring is not None
    assert dds.learner.ring.bytes == 32 * 3 * 32 * 4  # loss, alignment, rewards: no batch is kept


def test_a_scorer_that_learns_chance_by_heart_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    rewards = Agreement.rewards
    chance = torch.Generator().manual_seed(0)

    def random(self: Agreement, *args: Any) -> tuple[list[Tensor], list[Tensor]]:
        r, _ = rewards(self, *args)
        return r, [torch.randn(its.shape, generator=chance) for its in r]

    monkeypatch.setattr(Agreement, "rewards", random)
    monkeypatch.setattr(learner, "outlook", lambda before, *_: before)
    dds, found = trained(800, update_every=8, replay=32, scorer=MLPScorer(6, 3), caution=1.0)
    _, batches, _, _ = problem()
    own = torch.stack([torch.softmax(dds.scorer(batch).detach(), 0) for batch in batches])
    given = torch.stack([record.weights for record in found["records"][400:] if record])
    unevenness = [float((32 * weights.square().sum(1) - 1).mean()) for weights in (own, given)]
    assert unevenness[1] < 0.1 * unevenness[0]
    assert unevenness[0] > 0.1


def test_a_scorer_that_learns_nothing_counts_in_full() -> None:
    weights = []
    for replay in (0, 4):
        torch.manual_seed(0)
        scorer = MLPScorer(6, 3)
        nn.init.normal_(scorer.body[-1].weight)  # type: ignore[index]
        scorer.requires_grad_(False)
        _, found = trained(4, scorer=scorer, replay=replay)
        weights.append([record.weights for record in found["records"]])
    torch.testing.assert_close(*weights)
    assert weights[0][-1].std() > 0.001


def test_equal_rewards_teach_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def equal(self: Agreement, forwards: Sequence[Any], *_: Any) -> tuple[list[Tensor], list[Tensor]]:
        r = [torch.full((32,), 0.3) for _ in forwards]
        return r, r

    monkeypatch.setattr(Agreement, "rewards", equal)
    dds, _ = trained(50, scorer=MLPScorer(6, 3), replay=4)
    assert dds.learner.ring is not None
    assert float(dds.learner.ring._evidence.abs().max()) < 1


def test_a_scorer_that_reads_the_batch_has_it_kept() -> None:
    dds, _ = trained(20, scorer=MLPScorer(6, 3), update_every=2, replay=4)
    assert dds.learner.ring is not None
    assert dds.learner.ring.bytes == 4 * (32 * 6 * 4 + 32 * 8 + 32 * 4)


def test_a_resumed_run_with_replay_goes_on_bit_for_bit() -> None:
    options: dict[str, Any] = {"update_every": 3, "replay": 4, "alignment": "last_layer", "seed": 1}

    def set_up() -> tuple[nn.Module, Adam, DDS]:
        model, _, dev, _ = problem()
        optimizer = Adam(model.parameters(), lr=0.01)
        return model, optimizer, DDS(model, None, cross_entropy, optimizer, dev, **options)

    def go_on(model: nn.Module, optimizer: Adam, dds: DDS, steps: range) -> None:
        _, batches, _, _ = problem()
        for step in steps:
            torch.manual_seed(step)
            optimizer.zero_grad()
            dds.loss(batches[step % 20]).backward()
            optimizer.step()
            dds.step()

    whole = set_up()
    go_on(*whole, range(25))
    first, second = set_up(), set_up()
    go_on(*first, range(11))
    for a, b in zip(first, second, strict=True):
        b.load_state_dict(a.state_dict())
    go_on(*second, range(11, 25))
    for part in (0, 2):
        states = [set_ups[part].state_dict() for set_ups in (whole, second)]
        states = states if part == 0 else [state["scorer"] for state in states]
        for name, value in states[0].items():
            assert torch.equal(value, states[1][name]), name


def clocked(overhead: float, monkeypatch: pytest.MonkeyPatch) -> tuple[Budget, Callable[[bool], None]]:
    """A budget by a clock of its own, and a step of 0.99 s plain, to which DDS adds 0.02 s and 0.49 s for rewards."""
    now = [0.0]
    monkeypatch.setattr(budget_module.time, "perf_counter", lambda: now[0])
    budget = Budget(overhead, CPU)

    def step(measured: bool) -> None:
        # before, forward, after, backward and optimizer, step(): the second and fourth are the user's own
        for seconds in (0.0, 0.3, 0.01, 0.69, 0.5 if measured else 0.01):
            budget.mark()
            now[0] += seconds
        budget.mark()
        budget.ended(measured)

    return budget, step


class TestBudget:
    @given(st.floats(0.01, 0.5), st.floats(1e-3, 1.0), st.floats(0, 0.2), st.floats(0, 2.0))
    def test_it_measures_as_often_as_it_may(self, overhead: float, plain: float, idle: float, measuring: float) -> None:
        k = steps_between(overhead, plain, idle, measuring)
        over = idle - overhead * plain
        if over >= 0:  # no k keeps it
            assert OUT_OF_REACH <= k <= LONGEST
            assert k == LONGEST or measuring / k <= over + 1e-9
            assert k == OUT_OF_REACH or measuring / (k - 1) > over - 1e-9
            return
        assert 1 <= k <= LONGEST
        if k < LONGEST:
            assert idle + measuring / k <= overhead * plain + 1e-9
        if k > 1:
            assert idle + measuring / (k - 1) > overhead * plain - 1e-9

    def test_it_tells_the_parts_of_a_step_apart(self, monkeypatch: pytest.MonkeyPatch) -> None:
        budget, step = clocked(0.1, monkeypatch)
        for number in range(2 * FIRST):
            step(number % 2 == 0)
        assert budget.every == LONGEST
        assert budget.spent is None
        step(False)
        assert budget.every == steps_between(MARGIN * 0.1, 0.99, 0.02, 0.49) == 12
        assert budget.spent == pytest.approx((0.02 + 0.49 / 12) / 0.99)
        again = Budget(0.1, CPU)
        again.load_state_dict(budget.state_dict())
        assert again.every == 12
        assert again.spent == budget.spent

    def test_it_says_once_that_it_is_missed(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.WARNING, logger=budget_module.__name__)
        for overhead in (0.1, 0.04, 0.015):  # kept; every 16th step is too often; no k keeps it
            _, step = clocked(overhead, monkeypatch)
            for number in range(2 * SURE):
                step(number % 2 == 0)
            assert not caplog.messages
            step(False)
            step(True)
            said = [rf"overhead={overhead} is not kept: DDS adds 0\.\d\d of a plain step of 990 ms, 0\.02 of it"]
            for text, found in zip(said if overhead < 0.1 else [], caplog.messages, strict=True):
                assert re.match(text, found)
            caplog.clear()

    def test_a_budget_in_a_loop(self) -> None:
        dds, found = trained(LONGEST * FIRST + 60, overhead=100.0)  # whatever else the machine does
        assert dds.budget is not None
        assert dds.last_layer is not None
        records = [record for record in found["records"] if record is not None]
        assert {record.update_every for record in records[:FIRST]} == {LONGEST}  # the first steps teach little
        assert dds.update_every < LONGEST
        assert records[-1].to_dict()["update_every"] == records[-1].update_every
        assert records[0].overhead is None
        assert records[-1].to_dict()["overhead"] > 0

    def test_a_model_without_a_linear_layer_is_measured_whole(self) -> None:
        model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten(1), nn.AvgPool1d(9))
        dds = DDS(model, None, cross_entropy, SGD(model.parameters(), lr=0.1), [0], overhead=0.1)
        assert dds.last_layer is None

    def test_such_a_model_costs_no_further_pass_until_rewards_are_measured(self) -> None:
        passes = 0

        def loss_fn(model: nn.Module, batch: Any) -> Tensor:
            nonlocal passes
            passes += 1
            return cross_entropy(model, batch)

        model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten(1), nn.AvgPool1d(9))
        batch, optimizer = (torch.randn(8, 1, 5, 5), torch.randint(3, (8,))), SGD(model.parameters(), lr=0.1)
        dds = DDS(model, None, loss_fn, optimizer, [batch], overhead=0.1)
        plan(dds, 2)
        for expected in (1, 3, 1, 3):  # training, then dev and rewards too
            passes = 0
            dds.loss(batch).backward()
            optimizer.step()
            dds.step()
            assert passes == expected

    @pytest.mark.parametrize(
        ("every", "options", "told"),
        [
            (FRESH, {}, True),
            (FRESH + 1, {}, False),
            (FRESH + 1, {"alignment": "last_layer"}, True),
            (FRESH + 1, {"alignment": "full"}, True),
        ],
    )
    def test_alignment_is_told_while_it_is_fresh(
        self, every: int, options: dict[str, Any], told: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Or if the user asks for it. What psi learns from stays rewards less what the batch has in common."""
        heard = list[Tensor]()

        class Spy(SignalScorer):
            def forward(self, batch: Any, *, loss: Tensor, alignment: Tensor) -> Tensor:
                heard.append(alignment)
                return super().forward(batch, loss=loss, alignment=alignment)

        model, batches, dev, _ = problem()
        optimizer = SGD(model.parameters(), lr=0.1)
        dds = DDS(model, Spy(), cross_entropy, optimizer, dev, overhead=0.1, **options)
        lessons = lessons_of(dds, monkeypatch)
        plan(dds, every)
        assert dds.tells_alignment == told
        for step, batch in enumerate(batches):
            heard.clear()
            optimizer.zero_grad()
            dds.loss(batch).backward()
            assert bool(heard[0].any()) == (told and step >= every)
            assert dds.last_layer is None or dds.last_layer._latest is None  # it would keep the graph
            optimizer.step()
            record = dds.step()
        assert len(lessons) == len(batches) // every
        assert record is not None
        assert torch.equal(lessons[-1], record.rewards) == (dds.last_layer is None)

    def test_a_scorer_that_has_nothing_else_is_told_alignment_however_old(self) -> None:
        class Alone(SignalScorer):
            signals = ("alignment",)

        for model, layer in ((mlp(), True), (nn.Sequential(nn.Conv2d(1, 3, 3)), False)):
            optimizer = SGD(model.parameters(), lr=0.1)
            dds = DDS(model, Alone(), cross_entropy, optimizer, [0], overhead=0.1)
            assert dds.tells_alignment
            assert (dds.last_layer is not None) == layer

    def test_what_the_user_asks_for_is_not_overruled(self) -> None:
        dds, _ = trained(3, overhead=0.1, alignment="full")
        assert dds.last_layer is None
        assert dds.tells_alignment

    @pytest.mark.parametrize(
        ("scorer", "asked", "kept"),
        [(None, 0, 128), (SignalScorer(), 0, 128), (MLPScorer(6), 0, 0), (MLPScorer(6), 8, 8)],
    )
    def test_it_keeps_lessons_of_signals_and_no_batches(self, scorer: nn.Module | None, asked: int, kept: int) -> None:
        model = mlp(6, 3)
        optimizer = SGD(model.parameters(), lr=0.1)
        dds = DDS(model, scorer, cross_entropy, optimizer, [0], overhead=0.1, replay=asked)
        assert (dds.learner.ring.size if dds.learner.ring else 0) == kept

    def test_a_layer_that_is_never_called_is_given_up(self) -> None:
        model = nn.Sequential(mlp(), nn.Identity())
        model[1].unused = nn.Linear(3, 3)
        optimizer, batch = SGD(model.parameters(), lr=0.1), (torch.randn(8, 6), torch.randint(3, (8,)))
        dds = DDS(model, None, cross_entropy, optimizer, [batch], overhead=0.1)
        for step in range(1, LONGEST + 2):
            given_up = (
                pytest.warns(UserWarning, match="does without the last layer: .*unused, which was not called")
                if step == LONGEST
                else nullcontext()
            )
            with given_up:
                dds.loss(batch).backward()
            optimizer.step()
            dds.step()
        assert dds.last_layer is None
        assert not dds.tells_alignment
        assert dds.learner.caution == 8.0

    def test_a_scorer_without_alignment_needs_no_layer(self) -> None:
        model = mlp()
        dds = DDS(model, MLPScorer(6), cross_entropy, SGD(model.parameters(), lr=0.1), [0], alignment="last_layer")
        assert dds.last_layer is None
        assert SignalScorer().reads_batch is False


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replay": -1}, "replay must be 0 or more"),
        ({"alignment": "half"}, "alignment must be one of"),
        ({"overhead": 0.0}, "overhead must be above 0"),
        ({"overhead": 0.1, "update_every": 4}, "give one of them"),
    ],
)
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    model = mlp()
    with pytest.raises(GradsieveError, match=message):
        DDS(model, None, cross_entropy, SGD(model.parameters(), lr=0.1), [0], **options)
