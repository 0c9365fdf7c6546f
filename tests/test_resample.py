"""Algorithm 2: groups, their gradients, their probabilities."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_project import load_example
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam

from gradsieve import GradsieveError, GroupDDS, GroupScorer
from gradsieve.gradients import GradientStore
from gradsieve.resample import group_log_probabilities, group_objective


def availability(items: int, groups: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.rand(items, groups, generator=generator) < 0.5
    rows[torch.arange(items), torch.randint(groups, (items,), generator=generator)] = True
    return rows


class Table(nn.Module):
    """One logit for each group, whatever the item."""

    def __init__(self, groups: int):
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(groups))

    def forward(self, available: Tensor) -> Tensor:
        return self.logits.expand(len(available), -1)


@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 99))
def test_probabilities_are_a_softmax_over_what_is_available(items: int, groups: int, seed: int) -> None:
    rows = availability(items, groups, seed)
    logits = torch.randn(items, groups)
    p = group_log_probabilities(logits, rows).exp()
    for j in range(items):
        slow = logits[j].exp() * rows[j]
        torch.testing.assert_close(p[j], slow / slow.sum())


@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 99))
def test_the_objectives_equal_the_sums_as_printed(items: int, groups: int, seed: int) -> None:
    rows, rewards = availability(items, groups, seed), torch.randn(groups).double()
    logits = torch.randn(items, groups, dtype=torch.float64, requires_grad=True)
    for form in ("algorithm2", "expectation"):
        fast = group_objective(group_log_probabilities(logits, rows), rewards, form)
        (found,) = torch.autograd.grad(fast, logits)
        expected = torch.zeros_like(logits)
        for j in range(items):
            have = rows[j].nonzero().flatten().tolist()
            for i in have:
                log_p = logits[j, i] - torch.logsumexp(logits[j, have], 0)
                weight = log_p.exp().item() if form == "expectation" else 1.0
                expected += weight * rewards[i] * torch.autograd.grad(log_p, logits)[0] / items
        torch.testing.assert_close(found, expected)


def test_as_printed_it_comes_to_rest_where_p_is_proportional_to_the_rewards() -> None:
    rewards = torch.tensor([1.0, 0.5, 0.25, -0.2]).double()
    for form, positive in (("algorithm2", rewards[:3]), ("expectation", None)):
        r = rewards if positive is None else positive
        logits = torch.zeros(1, len(r), dtype=torch.float64, requires_grad=True)
        optimizer = Adam([logits], lr=0.02)
        for _ in range(3000):
            optimizer.zero_grad()
            log_prob = group_log_probabilities(logits, torch.ones(1, len(r)))
            (-group_objective(log_prob, r, form)).backward()
            optimizer.step()
        p = torch.softmax(logits.detach(), 1)[0]
        best = r / r.sum() if form == "algorithm2" else torch.eye(4).double()[0]
        torch.testing.assert_close(p, best, atol=0.01, rtol=0)


class TestGradients:
    @given(st.integers(1, 4), st.integers(1, 30), st.floats(0, 1), st.floats(0.1, 2), st.integers(0, 99))
    def test_sums_decay_and_rewards_are_cosines(self, groups: int, size: int, a1: float, a2: float, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        store = GradientStore(groups, decay=(a1, a2))
        slow = torch.zeros(groups, 2 * size)
        for _ in range(8):
            group = int(torch.randint(groups, (), generator=generator))
            parts = [torch.randn(size, generator=generator), torch.randn(1, size, generator=generator)]
            store.add(group, {"a": parts[0], "b": parts[1]})
            slow[group] = a1 * slow[group] + a2 * torch.cat([p.flatten() for p in parts])
        assert store.vectors is not None
        torch.testing.assert_close(store.vectors, slow)
        torch.testing.assert_close(store.rewards(0, cosine=False), slow @ slow[0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(store.rewards(0), F.cosine_similarity(slow, slow[:1], dim=1), atol=1e-5, rtol=1e-4)

    @pytest.mark.parametrize(
        "options", [{"dtype": torch.bfloat16}, {"projection": 4096}, {"projection": 4096, "dtype": torch.bfloat16}]
    )
    def test_smaller_stores_keep_the_cosines(self, options: dict[str, Any]) -> None:
        torch.manual_seed(1)
        whole, small = GradientStore(5), GradientStore(5, **options)
        shared = torch.randn(50_000)
        for step in range(40):
            group = step % 5
            gradient = [0.5 * group * shared + torch.randn(50_000)]
            whole.add(group, gradient)
            small.add(group, gradient)
        error = (whole.rewards(4) - small.rewards(4)).abs().max().item()
        assert error < (4 / 4096**0.5 if "projection" in options else 0.01)
        assert small.vectors is not None
        assert whole.vectors is not None
        assert small.vectors.nbytes < whole.vectors.nbytes

    def test_errors(self) -> None:
        store = GradientStore(2)
        store.add(0, [torch.ones(3)])
        with pytest.raises(GradsieveError, match="4 numbers, but 3 before"):
            store.add(1, [torch.ones(4)])
        with pytest.raises(GradsieveError, match="no gradients"):
            store.add(1, [])
        with pytest.raises(GradsieveError, match="float32 or bfloat16"):
            GradientStore(2, dtype=torch.float16)
        with pytest.raises(GradsieveError, match="projection"):
            GradientStore(2, projection=0)

    def test_a_group_that_was_never_observed_has_no_reward(self) -> None:
        store = GradientStore(3)
        assert store.rewards(0).tolist() == [0, 0, 0]
        store.add(0, [torch.ones(3)])
        assert store.rewards(0).tolist() == pytest.approx([1, 0, 0])

    @pytest.mark.parametrize("options", [{}, {"projection": 4}])
    def test_a_loaded_store_follows_the_gradients_to_their_device(self, options: dict[str, Any]) -> None:
        store, loaded = GradientStore(2, **options), GradientStore(2, **options)
        store.add(0, [torch.ones(6)])
        for other in (loaded, store):
            other.load_state_dict(store.state_dict())
            other.add(0, [torch.ones(6, device="meta")])
            assert other.vectors is not None
            assert other.vectors.device.type == "meta"

    @pytest.mark.parametrize("options", [{}, {"projection": 64}])
    def test_sparse_gradients_count_as_dense_ones(self, options: dict[str, Any]) -> None:
        layer = nn.Embedding(5, 3, sparse=True)
        layer(torch.tensor([1, 1, 4])).sum().backward()
        assert layer.weight.grad is not None
        sparse, dense = GradientStore(1, **options), GradientStore(1, **options)
        sparse.add(0, [layer.weight.grad])
        dense.add(0, [layer.weight.grad.to_dense()])
        torch.testing.assert_close(sparse.vectors, dense.vectors)


def test_draws_follow_the_probabilities_and_what_is_available() -> None:
    dds = GroupDDS(None, 4, 0)
    rows = availability(3, 4, 1).repeat(4000, 1)
    groups = dds.draw(rows)
    assert rows.gather(1, groups.unsqueeze(1)).all()
    for kind in range(3):
        seen = torch.bincount(groups[kind::3], minlength=4) / 4000
        torch.testing.assert_close(seen, dds.probabilities(rows[kind]), atol=0.03, rtol=0)
    assert dds.draw(rows[0]).shape == ()
    assert dds.probabilities(rows[0]).shape == (4,)


def feed(dds: GroupDDS, steps: int, generator: torch.Generator) -> list[Any]:
    """Group 1 agrees with the target, group 0; group 2 disagrees."""
    shared, records = torch.ones(20), []
    for _ in range(steps):
        groups = dds.draw(torch.ones(8, 3))
        for group in groups.unique().tolist():
            sign = -1 if group == 2 else 1
            dds.observe(group, [sign * shared + 0.3 * torch.randn(20, generator=generator)])
        records.append(dds.step())
    return records


def make(**options: Any) -> GroupDDS:
    scorer = GroupScorer(3, generator=torch.Generator().manual_seed(0))
    options = {
        "items_between": 16,
        "updates": 3,
        "batch_size": 8,
        "generator": torch.Generator().manual_seed(1),
    } | options
    return GroupDDS(scorer, 3, 0, scorer_optimizer=Adam(scorer.parameters(), lr=0.01), **options)


@pytest.mark.parametrize(
    "options", [{}, {"projection": 16}, {"store_dtype": torch.bfloat16}, {"psi_gradient": "expectation"}]
)
def test_harmful_groups_are_driven_out(options: dict[str, Any]) -> None:
    dds = make(**options)
    records = feed(dds, 200, torch.Generator().manual_seed(2))
    updates = [record for record in records if record is not None]
    assert len(updates) == 100
    last = updates[-1]
    assert last.probabilities[2] < 0.02
    assert last.rewards[1] > 0.5 > last.rewards[2]
    assert sum(int(record.drawn.sum()) for record in updates) == 200 * 8
    assert '"skipped": null' in last.to_json()


def test_a_resumed_run_goes_on_bit_for_bit() -> None:
    whole = make()
    feed(whole, 30, torch.Generator().manual_seed(3))
    first, noise = make(), torch.Generator().manual_seed(3)
    feed(first, 13, noise)
    second = make()
    second.load_state_dict(first.state_dict())
    feed(second, 17, noise)
    rows = availability(5, 3, 0)
    assert torch.equal(whole.probabilities(rows), second.probabilities(rows))
    assert torch.equal(whole.draw(rows), second.draw(rows))


def test_what_is_not_finite_is_held_back() -> None:
    dds = make()
    before = dds.probabilities(torch.ones(3))
    dds.draw(torch.ones(16, 3))
    dds.observe(0, [torch.ones(20)])
    dds.observe(1, [torch.full((20,), torch.nan)])
    record = dds.step()
    assert record is not None
    assert "non-finite" in record.to_dict()["skipped"]
    assert record.to_dict()["rewards"][1] is None
    assert dds.skipped == 1
    assert torch.equal(dds.probabilities(torch.ones(3)), before)


def test_a_prior_is_learned_by_imitation() -> None:
    dds = GroupDDS(None, 4, 0)
    rows = availability(2000, 4, 5)

    def target(available: Tensor) -> Tensor:
        """The first group wherever it is available, else all alike."""
        alike = available / available.sum(1, keepdim=True)
        return torch.where(available[:, :1].bool(), torch.eye(4)[0], alike)

    start = F.mse_loss(dds.probabilities(rows), target(rows))
    dds.imitate(target, rows)
    assert F.mse_loss(dds.probabilities(rows), target(rows)) < start / 10


def test_the_groups_scorer_is_the_authors() -> None:
    scorer = GroupScorer(8)
    assert [tuple(p.shape) for p in scorer.parameters()] == [(32, 8), (8, 32)]
    assert max(p.abs().max().item() for p in scorer.parameters()) <= 0.1
    torch.testing.assert_close(scorer(torch.ones(1, 8)), scorer(torch.full((1, 8), 3.0)))


def test_the_global_random_state_is_left_alone() -> None:
    state = torch.get_rng_state()
    dds = GroupDDS(None, 3, 0, items_between=8)
    feed(dds, 5, torch.Generator().manual_seed(0))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_scorer_without_parameters_to_learn() -> None:
    table = Table(3)
    optimizer = SGD(table.parameters(), lr=0.1)
    table.logits.requires_grad_(False)
    dds = GroupDDS(table, 3, 0, scorer_optimizer=optimizer, items_between=8)
    assert feed(dds, 1, torch.Generator().manual_seed(0))[0] is not None


def test_a_scorer_without_any_parameters() -> None:
    class Even(nn.Module):
        def forward(self, available: Tensor) -> Tensor:
            return torch.zeros_like(available)

    dds, other = GroupDDS(Even(), 3, 0, items_between=8), GroupDDS(Even(), 3, 0, items_between=8)
    record = feed(dds, 1, torch.Generator().manual_seed(0))[0]
    torch.testing.assert_close(record.probabilities, torch.full((3,), 1 / 3))
    other.load_state_dict(dds.state_dict())
    with pytest.raises(GradsieveError, match="no parameters to imitate"):
        dds.imitate(lambda rows: rows.float(), torch.ones(2, 3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_groups": 0}, "num_groups"),
        ({"target_group": 3}, "target_group must lie in 0 to 2"),
        ({"items_between": 0}, "items_between"),
        ({"updates": -1}, "updates"),
        ({"batch_size": 0}, "batch_size"),
        ({"psi_gradient": "other"}, "psi_gradient"),
    ],
)
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(GradsieveError, match=message):
        GroupDDS(None, **{"num_groups": 3, "target_group": 0, **options})


def test_bad_items_and_groups() -> None:
    dds = GroupDDS(None, 3, 0)
    with pytest.raises(GradsieveError, match="available in no group"):
        dds.draw(torch.tensor([[1, 0, 0], [0, 0, 0]]))
    with pytest.raises(GradsieveError, match=r"must end in 3 groups, not have shape \(2, 4\)"):
        dds.draw(torch.ones(2, 4))
    with pytest.raises(GradsieveError, match="group must lie in 0 to 2, not 3"):
        dds.observe(3, [torch.ones(2)])


def test_the_example_finds_the_harmful_source() -> None:
    example = load_example("domain_mixing")
    plain, _ = example.train(select=False)
    accuracy, shares = example.train(select=True)
    assert shares[2] < 0.02
    assert accuracy > plain + 10
