"""The baselines: each against a slow version of its paper's rule, and all methods against one contract."""

import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_reweight import NoSynchronisation
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import SGD, Adam, Optimizer
from torch.utils.data import DataLoader, TensorDataset
from zoo import KINDS, Batch, cross_entropy, differences, fingerprint, make, mlp

from gradsieve import DDS, GradsieveError, SignalScorer, StepRecord, like
from gradsieve.baselines import SPCL, BatchWeight, MentorNet, Uniform
from gradsieve.baselines.base import quantile
from gradsieve.baselines.batchweight import rectified_weights
from gradsieve.baselines.mentornet import Mentor, half_wrong, mentor_weights, next_level
from gradsieve.baselines.spcl import pace, self_paced_weights
from gradsieve.parameters import LossFn, untouched
from gradsieve.randomness import RandomStream, replayed

CLASSES, STEPS = 3, 24
CPU = torch.device("cpu")

METHODS: dict[str, Callable[[nn.Module, Optimizer, LossFn, Any], Any]] = {
    "uniform": lambda model, optimizer, loss_fn, dev: Uniform(model, loss_fn),
    "spcl": lambda model, optimizer, loss_fn, dev: SPCL(model, loss_fn, full_at=STEPS),
    "batchweight": lambda model, optimizer, loss_fn, dev: BatchWeight(model, loss_fn, dev),
    "mentornet": lambda model, optimizer, loss_fn, dev: MentorNet(model, loss_fn, dev, CLASSES, total_steps=STEPS),
    "dds": lambda model, optimizer, loss_fn, dev: DDS(model, SignalScorer(), loss_fn, optimizer, dev),
    "dds-like": lambda model, optimizer, loss_fn, dev: DDS(model, like(model), loss_fn, optimizer, dev),
}
"""One table of methods for the whole contract."""

WEIGHING = [name for name in METHODS if name != "uniform"]


def train_step(method: Any, optimizer: Optimizer, batch: Any, *, autocast: bool = False) -> StepRecord | None:
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = method.loss(batch)
    loss.backward()
    optimizer.step()
    return method.step()


def separable(rows: int, seed: int) -> Batch:
    """Three classes around three corners, hardly overlapping."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (rows,), generator=generator)
    x = 2 * nn.functional.one_hot(y, 6).float() + 0.4 * torch.randn(rows, 6, generator=generator)
    return x, y


def toy_run(name: str, seed: int) -> tuple[nn.Module, Optimizer, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, CLASSES))
    optimizer = Adam(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(*separable(20, seed=99)), 6, shuffle=True, drop_last=True)
    return model, optimizer, METHODS[name](model, optimizer, cross_entropy, loader)


def everything(model: nn.Module, optimizer: Optimizer, method: Any) -> list[Tensor]:
    """All tensors of a run's state."""
    state = [model.state_dict(), optimizer.state_dict(), method.state_dict(), torch.get_rng_state()]
    return [leaf for leaf in torch.utils._pytree.tree_leaves(state) if isinstance(leaf, Tensor)]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) > 0 and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# The contract


@pytest.mark.parametrize("name", METHODS)
def test_it_trains(name: str) -> None:
    model, optimizer, method = toy_run(name, seed=0)
    data = separable(64, seed=1)
    before = cross_entropy(model.eval(), data).mean().item()
    model.train()
    for t in range(2 * STEPS):
        train_step(method, optimizer, separable(16, seed=2 + t))
    assert cross_entropy(model.eval(), data).mean().item() < 0.6 * before


@pytest.mark.parametrize("name", METHODS)
def test_it_is_deterministic_and_counts_its_steps(name: str) -> None:
    runs = []
    for _ in range(2):
        run = toy_run(name, seed=3)
        records = [train_step(run[2], run[1], separable(8, seed=t)) for t in range(6)]
        assert [r.step for r in records if r is not None] == ([] if name == "uniform" else [1, 2, 3, 4, 5, 6])
        runs.append(everything(*run))
    assert same(*runs)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("stop", [0, 10])
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(name: str, stop: int) -> None:
    data = [separable(8, seed=t) for t in range(STEPS)]
    _, optimizer, method = run = toy_run(name, seed=1)
    for batch in data[:stop]:
        train_step(method, optimizer, batch)
    file = io.BytesIO()
    torch.save([*(owner.state_dict() for owner in run), torch.get_rng_state()], file)
    for batch in data[stop:]:
        train_step(method, optimizer, batch)
    expected = everything(*run)

    other = toy_run(name, seed=2)
    file.seek(0)
    saved = torch.load(file)  # which refuses anything but plain data and tensors
    for owner, state in zip(other, saved, strict=False):
        owner.load_state_dict(state)
    torch.set_rng_state(saved[3])
    for batch in data[stop:]:
        train_step(other[2], other[1], batch)
    assert same(expected, everything(*other))


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("kind", ["cnn-train", "transformer", "lstm"])
def test_loss_and_step_leave_everything_alone(name: str, kind: str) -> None:
    """`loss()` may change what a plain forward changes, and nothing else; making a method and `step()` nothing."""
    model, batch = make(kind, 6, 3, CLASSES)
    _, dev = make(kind, 6, 3, CLASSES)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(TensorDataset(*dev), 2, shuffle=True)
    before = fingerprint(model)
    method = METHODS[name](model, optimizer, cross_entropy, loader)
    # dds: the table's own SignalScorer() and like() draw their initial weights.
    assert differences(before, fingerprint(model)) == (["random state"] if name.startswith("dds") else [])
    for _ in range(6):  # past MentorNet's burn-in
        train_step(method, optimizer, batch)

    saved = {n: v.clone() for n, v in model.state_dict().items()}
    state = torch.get_rng_state()
    cross_entropy(model, batch)
    plain = fingerprint(model)
    model.load_state_dict(saved)
    torch.set_rng_state(state)
    loss = method.loss(batch)
    assert differences(plain, fingerprint(model)) == []

    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    before = fingerprint(model)
    method.step()
    assert differences(before, fingerprint(model)) == []


@pytest.mark.parametrize("name", METHODS)
def test_it_never_waits_for_the_device(name: str) -> None:
    model, batch = make("cnn-train", 6, 2, CLASSES, dtype=torch.float32)
    optimizer = SGD(model.parameters(), lr=0.1)
    method = METHODS[name](model, optimizer, cross_entropy, [batch])
    for _ in range(6):  # past MentorNet's burn-in
        train_step(method, optimizer, batch)
    optimizer.zero_grad()
    with NoSynchronisation():
        method.loss(batch).backward()
    optimizer.step()
    with NoSynchronisation():
        method.step()


@pytest.mark.parametrize("name", WEIGHING)
def test_the_loss_is_the_weighted_sum_and_the_weights_sum_to_one(name: str) -> None:
    model, optimizer, method = toy_run(name, seed=4)
    sums = []
    for t in range(STEPS):
        batch = separable(8, seed=t)
        saved, state = {n: v.clone() for n, v in model.state_dict().items()}, torch.get_rng_state()
        losses = cross_entropy(model, batch).detach()
        model.load_state_dict(saved)
        torch.set_rng_state(state)
        optimizer.zero_grad()
        loss = method.loss(batch)
        loss.backward()
        optimizer.step()
        record = method.step()
        assert record is not None
        assert record.skipped is None
        torch.testing.assert_close(loss.detach(), (record.weights * losses).sum())
        assert not record.weights.requires_grad
        assert 0 <= float(record.effective_sample_size) <= 8 + 1e-4
        assert record.to_dict().keys() == {
            "step",
            "update_every",
            "trust",
            "overhead",
            "reward_mean",
            "reward_std",
            "weight_min",
            "weight_max",
            "effective_sample_size",
            "dev_loss",
            "skipped",
        }
        sums.append(float(record.weights.sum()))
    assert all(s == pytest.approx(1) or (s == 0 and name == "batchweight") for s in sums)


@pytest.mark.parametrize("name", WEIGHING)
def test_step_needs_loss_and_loss_needs_gradients(name: str) -> None:
    _, optimizer, method = toy_run(name, seed=5)
    batch = separable(8, seed=0)
    with pytest.raises(GradsieveError, match=r"loss\(\) first"):
        method.step()
    train_step(method, optimizer, batch)
    with pytest.raises(GradsieveError, match=r"loss\(\) first"):
        method.step()
    with torch.no_grad(), pytest.raises(GradsieveError, match="no_grad"):
        method.loss(batch)
    method.loss_fn = lambda model, batch: cross_entropy(model, batch).detach()
    with pytest.raises(GradsieveError, match="carry no gradient"):
        method.loss(batch)
    method.loss_fn = lambda model, batch: cross_entropy(model, batch).mean()
    with pytest.raises(GradsieveError, match="reduction='none'"):
        method.loss(batch)


@pytest.mark.parametrize("name", METHODS)
def test_it_trains_under_autocast(name: str) -> None:
    model, optimizer, method = toy_run(name, seed=6)
    x, y = separable(8, seed=0)
    for t in range(8):
        record = train_step(method, optimizer, (x.bfloat16() if t % 2 else x, y), autocast=True)
        assert record is None or record.skipped is None
    assert all(p.grad is not None and p.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("name", ["spcl", "batchweight", "mentornet"])
def test_non_finite_losses_weigh_uniformly_and_are_recorded(name: str) -> None:
    _, optimizer, method = toy_run(name, seed=7)
    for t in range(6):
        train_step(method, optimizer, separable(8, seed=t))
    plain = method.loss_fn
    method.loss_fn = lambda model, batch: torch.cat([plain(model, batch)[:1] - math.inf, plain(model, batch)[1:]])
    method.loss(separable(8, seed=9))
    record = method.step()
    assert torch.equal(record.weights, torch.full((8,), 1 / 8))
    assert "non-finite loss" in record.skipped
    method.loss_fn = plain
    assert train_step(method, optimizer, separable(8, seed=10)).skipped is None  # type: ignore[union-attr]


# SPCL


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=12), st.floats(0.01, 1))
def test_self_paced_weights_pick_the_easiest(values: list[int], share: float) -> None:
    """Ties and all: those that the last one admitted does not beat."""
    losses = torch.tensor(values, dtype=torch.float64)
    last = sorted(values)[max(1, math.ceil(share * len(values) - 1e-9)) - 1]
    v = [float(value <= last) for value in values]
    torch.testing.assert_close(self_paced_weights(losses, share), torch.tensor(v).double() / sum(v))
    assert sum(v) >= share * len(values) - 1e-6


def test_the_pace_is_linear_and_the_quantile_is_not_fooled_by_rounding() -> None:
    assert [pace(t, 4, 0.5) for t in range(6)] == [0.5, 0.625, 0.75, 0.875, 1, 1]
    assert pace(7, 7, 0.3) == 1
    assert float(quantile(torch.arange(25.0), 0.56)) == 13  # 0.56 * 25 is a little above 14
    assert float(quantile(torch.arange(20.0), 0.0)) == 0


def test_spcl_becomes_uniform() -> None:
    model, data = mlp(), [separable(8, seed=t) for t in range(12)]
    optimizer = SGD(model.parameters(), lr=0.1)
    method = SPCL(model, cross_entropy, full_at=8, start=0.25)
    records = [train_step(method, optimizer, batch) for batch in data]
    used = [int((r.weights > 0).sum()) for r in records if r is not None]
    assert used[0] == 2
    assert used == sorted(used)
    assert used[7] == 8  # 7/8 of the way from 2 to 8, rounded up
    for record in records[8:]:
        assert record is not None
        assert torch.equal(record.weights, torch.full((8,), 1 / 8))
        assert record.rewards is None
        assert record.to_dict()["reward_mean"] is record.to_dict()["dev_loss"] is None


# BatchWeight


def ren_weights(model: nn.Module, batch: Batch, dev: Batch, seed: int) -> Tensor:
    """Algorithm 1 of Ren et al. to the letter: lines 4 to 11, by differentiating through the lookahead step."""
    theta = {n: p.detach().requires_grad_() for n, p in model.named_parameters()}

    def losses(values: dict[str, Tensor], batch: Batch) -> Tensor:
        return cross_entropy(lambda x: functional_call(model, values, (x,)), batch)  # type: ignore[arg-type]

    with untouched(model), sdpa_kernel(SDPBackend.MATH):  # the fused kernel has no second derivative
        with replayed(CPU, {"cpu": torch.get_rng_state()}):
            train = losses(theta, batch)
        eps = torch.zeros_like(train, requires_grad=True)
        gradient = torch.autograd.grad((eps * train).sum(), list(theta.values()), create_graph=True)
        ahead = {n: p - 0.1 * g for (n, p), g in zip(theta.items(), gradient, strict=True)}
        with replayed(CPU, RandomStream(CPU, seed).state):
            dev_loss = losses(ahead, dev).mean()
        (d_eps,) = torch.autograd.grad(dev_loss, eps)
    w = torch.clamp(-d_eps, min=0)
    return w / (w.sum() + float(w.sum() == 0))


@pytest.mark.parametrize("kind", KINDS)
@given(rows=st.integers(2, 7), size=st.integers(1, 4), classes=st.integers(2, 4), seed=st.integers(0, 2**31))
def test_batchweight_is_the_derivative_through_the_lookahead(
    kind: str, rows: int, size: int, classes: int, seed: int
) -> None:
    torch.manual_seed(seed)
    model, batch = make(kind, rows, size, classes)
    _, dev = make(kind, 5, size, classes)
    state = torch.get_rng_state()
    expected = ren_weights(model, batch, dev, seed)
    for reward, tolerance in (("jvp", 1e-9), ("finite_difference", 0.05)):
        torch.set_rng_state(state)
        with untouched(model):
            method = BatchWeight(model, cross_entropy, [dev], reward=reward, seed=seed)
            method.loss(batch)
        torch.testing.assert_close(method.step().weights, expected, rtol=0, atol=tolerance)


def test_nothing_positive_weighs_nothing() -> None:
    assert torch.equal(rectified_weights(torch.tensor([-1.0, 0.0])), torch.zeros(2))
    torch.testing.assert_close(rectified_weights(torch.tensor([-1.0, 1.0, 3.0])), torch.tensor([0, 0.25, 0.75]))

    model, (x, _) = nn.Sequential(nn.Linear(6, CLASSES)).double(), separable(1, seed=0)
    optimizer = SGD(model.parameters(), lr=0.1)
    nn.init.zeros_(model[0].weight)
    nn.init.zeros_(model[0].bias)
    one, other = ((x.double(), torch.tensor([label])) for label in (0, 1))  # whose gradients pull apart
    method = BatchWeight(model, cross_entropy, [one])
    before = fingerprint(model)
    record = train_step(method, optimizer, other)
    assert record is not None
    assert torch.equal(record.weights, torch.zeros(1).double())
    assert float(record.effective_sample_size) == 0
    assert record.skipped is None
    assert [n for n in differences(before, fingerprint(model)) if n.startswith("parameter")] == []


def test_batchweight_under_autocast_measures_in_full_precision() -> None:
    def run(autocast: bool) -> Tensor:
        torch.manual_seed(0)
        model = mlp(activation=nn.Tanh).eval()
        optimizer = SGD(model.parameters(), lr=0.1)
        method = BatchWeight(model, cross_entropy, [separable(32, seed=1)])
        record = train_step(method, optimizer, separable(32, seed=2), autocast=autocast)
        assert record is not None
        assert record.rewards is not None
        return record.rewards

    full, low = run(False), run(True)
    assert float((full - low).norm() / full.norm()) < 0.05


def test_batchweight_measures_from_the_buffers_of_the_training_forward() -> None:
    """Power iterations and the like move them in every forward; the reward must not see one more of these."""

    class Warming(nn.Linear):
        def __init__(self) -> None:
            super().__init__(6, CLASSES)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x) * (1 + 0.1 * self.calls.clone())

    found = []
    for reward in ("finite_difference", "per_example"):
        torch.manual_seed(0)
        model = Warming()
        method = BatchWeight(model, cross_entropy, [separable(8, seed=1)], reward=reward)
        method.loss(separable(8, seed=2))
        found.append(method.step().rewards)
    torch.testing.assert_close(*found, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("where", ["dev gradient", "reward"])
def test_batchweight_trains_on_uniformly_where_it_measures_nothing_finite(where: str) -> None:
    model, dev = mlp().eval(), separable(5, seed=1)
    optimizer = SGD(model.parameters(), lr=0.1)
    if where == "dev gradient":
        dev[0][0, 0] = torch.nan

    def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
        losses = cross_entropy(model, batch)
        if where == "reward" and not torch.is_grad_enabled():  # only the perturbed forward of the reward pass
            losses = torch.cat([losses[:1] - torch.inf, losses[1:]])  # a weight of zero, were it believed
        return losses

    record = train_step(BatchWeight(model, loss_fn, [dev]), optimizer, separable(8, seed=2))
    assert record is not None
    assert torch.equal(record.weights, torch.full((8,), 1 / 8))
    assert where in str(record.skipped)
    assert all(bool(p.isfinite().all()) for p in model.parameters())


# MentorNet


def test_mentornet_learns_to_tell_right_labels_from_wrong_ones() -> None:
    steps = 300
    model = mlp(hidden=16)
    optimizer = SGD(model.parameters(), lr=0.1)
    dev = DataLoader(TensorDataset(*separable(60, seed=1)), 20, shuffle=True)
    method = MentorNet(model, cross_entropy, dev, CLASSES, total_steps=steps)
    x, y = separable(600, seed=2)
    wrong = torch.rand(600) < 0.4
    y = torch.where(wrong, (y + torch.randint(1, CLASSES, (600,))) % CLASSES, y)
    seen: dict[bool, list[Tensor]] = {True: [], False: []}
    for t in range(steps):
        rows = torch.randint(600, (32,))
        record = train_step(method, optimizer, (x[rows], y[rows], rows))
        assert record is not None
        assert record.skipped is None
        if t < 0.2 * steps:
            assert torch.equal(record.weights, torch.full((32,), 1 / 32)), "burn-in"
        if t >= 0.8 * steps:
            for bad in (True, False):
                seen[bad].append(record.weights[wrong[rows] == bad])
    assert float(torch.cat(seen[True]).mean()) < 0.3 * float(torch.cat(seen[False]).mean())


@given(st.integers(2, 9), st.sampled_from([torch.int64, torch.int32, torch.uint8]))
def test_half_of_the_labels_become_wrong_ones_uniformly(classes: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    labels = torch.randint(classes, (4000,)).to(dtype)
    shown, right = half_wrong(labels, classes)
    assert shown.dtype == dtype
    assert torch.equal(shown == labels, right)
    assert 0.45 < float(right.float().mean()) < 0.55
    shift = (shown.long() - labels.long()) % classes
    counts = torch.bincount(shift[~right], minlength=classes)
    assert counts[0] == 0
    assert int(counts[1:].min()) > 0.7 * len(shift[~right]) / (classes - 1)


def test_the_mentors_weights_and_level() -> None:
    scores = torch.randn(7).double()
    v = torch.sigmoid(scores)
    torch.testing.assert_close(mentor_weights(scores), v / v.sum())
    assert float(mentor_weights(torch.tensor([-500.0, -500.0])).sum()) == 1
    losses = torch.arange(10.0)
    first = next_level(None, losses, 0.7)
    assert float(first) == 6
    torch.testing.assert_close(next_level(first, losses + 10, 0.7), torch.tensor(0.95 * 6 + 0.05 * 16))
    assert float(next_level(first, losses * torch.nan, 0.7)) == 6


def test_the_mentor_works_in_full_precision_and_leaves_nothing_in_autocasts_cache() -> None:
    model = nn.ModuleDict({"many": nn.Linear(6, CLASSES), "few": nn.Linear(6, CLASSES)})

    def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
        return cross_entropy(model["few" if len(batch[1]) == 5 else "many"], batch)  # type: ignore[index]

    batch, dev = separable(8, seed=0), separable(5, seed=1)
    method = MentorNet(model, loss_fn, [dev], CLASSES, total_steps=9, burn_in=0)
    with torch.autocast("cpu", torch.bfloat16):
        method.loss(batch)
        losses = loss_fn(model, batch).float()
        loss_fn(model, dev).mean().backward()
    assert model["few"].weight.grad is not None
    scores = method.scorer(losses, method.state_dict()["level"], batch[1], 0)
    torch.testing.assert_close(method.step().weights, mentor_weights(scores), rtol=1e-6, atol=0)


def test_a_bad_dev_batch_never_reaches_the_mentor() -> None:
    model, (x, y) = mlp(), separable(8, seed=0)
    optimizer = SGD(model.parameters(), lr=0.1)
    dev = [(x, y), (x * torch.nan, y), (x, y)]
    for make_optimizer in (None, lambda mentor: SGD(mentor.parameters(), lr=0.1)):
        method = MentorNet(model, cross_entropy, dev, CLASSES, total_steps=9, mentor_optimizer=make_optimizer)
        skipped, moved = [], []
        for _ in range(3):
            psi = [p.clone() for p in method.scorer.parameters()]
            record = train_step(method, optimizer, (x, y))
            assert record is not None
            skipped.append(record.skipped)
            moved.append(any(not torch.equal(a, b) for a, b in zip(psi, method.scorer.parameters(), strict=True)))
        assert skipped == [None, "non-finite dev loss", None]
        assert moved == [True, False, True]
        assert isinstance(method.scorer, Mentor)


def test_bad_arguments() -> None:
    model, (batch, dev) = mlp(), (separable(8, seed=0), [separable(8, seed=1)])
    makers: dict[str, tuple[Callable[..., Any], list[dict[str, Any]]]] = {
        "spcl": (
            lambda **kw: SPCL(model, cross_entropy, **{"full_at": 3, **kw}),
            [{"full_at": 0}, {"start": 0.0}, {"start": 2}],
        ),
        "batchweight": (
            lambda **kw: BatchWeight(model, cross_entropy, dev, **kw),
            [{"reward": "exact"}, {"dev_mode": "test"}, {"epsilon": 0.0}],
        ),
        "mentornet": (
            lambda **kw: MentorNet(model, cross_entropy, dev, **{"num_classes": 3, "total_steps": 9, **kw}),
            [{"num_classes": 1}, {"total_steps": 0}, {"percentile": 0}, {"burn_in": 1.5}],
        ),
    }
    for maker, bad in makers.values():
        for arguments in bad:
            with pytest.raises(GradsieveError, match=next(iter(arguments))):
                maker(**arguments)
    with pytest.raises(GradsieveError, match="no parameter that requires"):
        SPCL(nn.Flatten(), cross_entropy, full_at=3)
    with pytest.raises(GradsieveError, match="dev_loader is empty"):
        BatchWeight(model, cross_entropy, [])
    mentornet = MentorNet(model, lambda m, b: m(b["x"])[:, 0], dev, 3, total_steps=9)
    with pytest.raises(GradsieveError, match=r"\(input, label, ...\) batches.*dict"):
        mentornet.loss({"x": batch[0]})
    mentornet.loss_fn = lambda m, b: m(b[0])[:, 0]
    with pytest.raises(GradsieveError, match=r"float32 of shape \(8,\)"):
        mentornet.loss((batch[0], batch[1].float()))
