"""Algorithm 1: DDS against autograd through the unrolled step, and everything that it promises to leave alone."""

import copy
import io
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset
from zoo import KINDS, Batch, cross_entropy, differences, fingerprint, make, mlp

from gradsieve import DDS, ConvScorer, GradsieveError, MLPScorer, SignalScorer, StepRecord
from gradsieve.dev import DevBatches
from gradsieve.optimizers import adam_derivative
from gradsieve.randomness import RandomStream
from gradsieve.scorer import climb, outlook, price_of_uneven_weights, psi_objective


class Constant(nn.Module):
    """A scorer without an opinion."""

    def forward(self, batch: Batch) -> Tensor:
        return torch.full((len(batch[1]),), 0.7, dtype=batch[0].dtype)


class LinearScorer(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.layer = nn.Linear(size, 1).double()

    def forward(self, batch: Batch) -> Tensor:
        return self.layer(batch[0]).squeeze(1)


def train_step(dds: DDS, optimizer: Optimizer, batch: Any, *, autocast: bool = False) -> StepRecord | None:
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = dds.loss(batch)
    loss.backward()
    optimizer.step()
    return dds.step()


def batches(count: int, rows: int = 8, size: int = 6, dtype: torch.dtype = torch.float64) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(rows, size, generator=generator).to(dtype),
            torch.randint(3, (rows,), generator=generator),
        )
        for _ in range(count)
    ]


OPTIMIZERS: dict[str, Callable[[list[Tensor]], Optimizer]] = {
    "sgd": lambda p: SGD(p, lr=0.1),
    "sgd-decay": lambda p: SGD(p, lr=0.1, weight_decay=0.01),
    "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "nesterov": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: Adam(p, lr=0.01, betas=(0.0, 0.99), eps=1e-4),
    "adamw": lambda p: AdamW(p, lr=0.01, betas=(0.0, 0.99), eps=1e-4, weight_decay=0.1),
    "adam-decay": lambda p: Adam(p, lr=0.01, betas=(0.0, 0.99), eps=1e-4, weight_decay=0.05),
}


def unrolled(name: str, optimizer: Optimizer, p: Tensor, theta: Tensor, x: Tensor) -> Tensor:
    """theta_t as a differentiable function of the gradient x, from the optimizer's state before the step."""
    group, state = optimizer.param_groups[0], optimizer.state[p]
    lr, decay = group["lr"], group["weight_decay"]
    if name.startswith("adam"):
        if name == "adam-decay":
            x = x + decay * theta
        t = float(state["step"]) + 1
        v = group["betas"][1] * state["exp_avg_sq"].clone() + (1 - group["betas"][1]) * x**2
        g = lr * (1 - group["betas"][1] ** t) ** 0.5 * x / (v + group["eps"]) ** 0.5  # Eq. 17
        return theta - g - (lr * decay * theta if name == "adamw" else 0)
    x = x + decay * theta
    if group["momentum"]:
        buffer = group["momentum"] * state["momentum_buffer"].clone() + x
        x = x + group["momentum"] * buffer if group["nesterov"] else buffer
    return theta - lr * x


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("mix", "bound", "caution"), [(0.0, 2.0, 0.0), (0.3, None, 0.0), (0.1, 2.0, 4.0)])
def test_psi_gradient_is_the_derivative_of_the_dev_loss(
    name: str, mix: float, bound: float | None, caution: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    scorer = LinearScorer(6)
    dev, first, second = batches(3)
    dds = DDS(
        model,
        scorer,
        cross_entropy,
        optimizer,
        [dev],
        scorer_optimizer=SGD(scorer.parameters(), lr=0.5),
        reward="jvp",
        max_logit=bound,
        uniform_mix=mix,
        caution=caution,
    )
    train_step(dds, optimizer, first)  # gives the optimizer a past

    theta = {n: p.detach().clone() for n, p in model.named_parameters()}
    psi = {n: p.detach().clone().requires_grad_() for n, p in scorer.named_parameters()}
    scores = functional_call(scorer, psi, (second,))
    p = torch.softmax(scores if bound is None else bound * torch.tanh(scores / bound), 0)
    weights = (1 - mix) * p + mix / len(p)
    leaves = {n: v.clone().requires_grad_() for n, v in theta.items()}
    losses = F.cross_entropy(functional_call(model, leaves, (second[0],)), second[1], reduction="none")
    found = torch.autograd.grad((weights * losses).sum(), list(leaves.values()), create_graph=True)
    after = {
        n: unrolled(name, optimizer, q, theta[n], x) for (n, q), x in zip(model.named_parameters(), found, strict=True)
    }
    # Adam's torch step differs from the paper's by where epsilon stands; the dev gradient is taken at torch's theta_t.
    optimizer.zero_grad()
    dds.loss(second).backward()
    optimizer.step()
    at = {n: q.detach().clone().requires_grad_() for n, q in model.named_parameters()}
    dev_loss = F.cross_entropy(functional_call(model, at, (dev[0],)), dev[1])
    d_theta = torch.autograd.grad(dev_loss, list(at.values()))
    surrogate = sum((d * a).sum() for d, a in zip(d_theta, after.values(), strict=True))
    seen: list[Tensor] = []
    step = dds.scorer_optimizer.step  # type: ignore[union-attr]
    monkeypatch.setattr(
        dds.scorer_optimizer, "step", lambda: (seen.extend(q.grad.clone() for q in scorer.parameters()), step())
    )
    record = dds.step()
    assert record is not None
    assert record.skipped is None
    price = caution * 0.03 * (dds.learner.outlook / 0.03).exp().log1p() * record.rewards.std(correction=0)
    uneven = len(p) * weights.square().sum() - 1
    expected = torch.autograd.grad(surrogate + price * uneven, list(psi.values()))
    wanted, got = torch.cat([e.flatten() for e in expected]), torch.cat([s.flatten() for s in seen])
    assert float((wanted - got).norm() / wanted.norm()) < 1e-6


def test_with_caution_the_best_weights_are_linear_in_the_rewards() -> None:
    rewards = torch.randn(12).double()
    price = 2.0 * rewards.std(correction=0)
    scores = torch.zeros(12, dtype=torch.float64, requires_grad=True)
    optimizer = Adam([scores], lr=0.01)
    for _ in range(3000):
        optimizer.zero_grad()
        (-psi_objective(scores, torch.softmax(scores, 0), rewards, "expectation", price)).backward()
        optimizer.step()
    best = 1 + (rewards - rewards.mean()) / (2 * price)
    torch.testing.assert_close(12 * torch.softmax(scores.detach(), 0), best, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("mean", "expected"), [(0.3, 0.3), (0.0, 0.03 * math.log(2)), (-0.3, 0.0), (50.0, 1.0)])
def test_uneven_weights_cost_as_much_as_plain_training_brings(mean: float, expected: float) -> None:
    rewards = torch.randn(64)
    rewards = 2 * ((rewards - rewards.mean()) / rewards.std(correction=0) + mean)
    seen = torch.tensor(0.1)
    for _ in range(1000):
        seen = outlook(seen, rewards)
    assert float(price_of_uneven_weights(8.0, seen, rewards)) == pytest.approx(8 * expected * 2, rel=1e-3, abs=1e-3)
    assert float(price_of_uneven_weights(0.0, seen, rewards)) == 0


@pytest.mark.parametrize(("steps", "rate"), [(1, 0.01), (4, 1 - 0.99**4), (16, 1 / 16), (10_000, 1 / 16)])
def test_the_outlook_follows_time_but_no_single_measurement(steps: int, rate: float) -> None:
    rewards = torch.tensor([1.0, 3.0])  # mean 2, deviation 1: 1 after clipping
    assert float(outlook(torch.tensor(0.0), rewards, steps)) == pytest.approx(rate)


def test_equal_rewards_leave_the_outlook_finite() -> None:
    assert 0 < float(outlook(torch.tensor(0.1), torch.ones(4))) < 1
    assert float(outlook(torch.tensor(0.1), torch.zeros(1))) == pytest.approx(0.099)


def test_a_scorer_learns_the_same_from_channels_last_images() -> None:
    """Gradients may be laid out otherwise than their parameters; a fused optimizer must not notice."""
    found = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        scorer = ConvScorer(3)
        nn.init.normal_(scorer.body[-1].weight)  # type: ignore[arg-type,index,union-attr]
        optimizer = Adam(scorer.parameters(), lr=0.01, fused=True)
        for _ in range(3):
            images = torch.randn(8, 3, 16, 16).contiguous(memory_format=memory_format)
            climb(optimizer, (scorer((images, None)) * torch.randn(8)).sum(), torch.tensor(True))
        found.append(torch.cat([p.detach().flatten() for p in scorer.parameters()]))
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-4)


def test_adams_derivative_is_the_papers() -> None:
    x = torch.linspace(-2, 2, 9, dtype=torch.float64, requires_grad=True)
    before, beta2, eps, lr, t = torch.rand(9).double(), 0.99, 1e-3, 0.1, 7
    g = lr * (1 - beta2**t) ** 0.5 * x / (beta2 * before + (1 - beta2) * x**2 + eps).sqrt()
    (expected,) = torch.autograd.grad(g.sum(), x)
    v_t = beta2 * before + (1 - beta2) * x.detach() ** 2
    torch.testing.assert_close(adam_derivative(x.detach(), v_t, t, lr, beta2, eps), expected)


@pytest.mark.parametrize("form", ["expectation", "algorithm1"])
def test_both_psi_gradients_agree_while_p_is_uniform_and_part_afterwards(form: str) -> None:
    from gradsieve.scorer import example_weights, psi_objective

    rewards = torch.randn(5).double()
    for scores, same in ((torch.zeros(5), True), (torch.randn(5), False)):
        s = scores.double().requires_grad_()
        (found,) = torch.autograd.grad(psi_objective(s, example_weights(s), rewards, form), s)
        p = torch.softmax(s.detach(), 0)
        expected = p * (rewards - (p * rewards).sum())  # Eq. 6: sum_i p_i r_i grad log p_i
        printed = rewards / 5 - p * rewards.mean()  # Algorithm 1: 1/B sum_i r_i grad log p_i
        torch.testing.assert_close(found, expected if form == "expectation" else printed)
        assert torch.allclose(expected, printed) == same


@pytest.mark.parametrize("kind", ["mlp", "cnn-train", "lstm"])
def test_a_constant_scorer_reproduces_plain_training(kind: str) -> None:
    def run(use_dds: bool) -> nn.Module:
        torch.manual_seed(3)
        model, _ = make(kind, 8, 4, 3)
        data = [make(kind, 8, 4, 3)[1] for _ in range(5)]
        optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
        dev = DataLoader(TensorDataset(*data[0]), 3, shuffle=True)
        dds = DDS(model, Constant(), cross_entropy, optimizer, dev)
        for t in range(50):
            batch = data[t % 5]
            if use_dds:
                record = train_step(dds, optimizer, batch)
                assert record is not None
                assert torch.equal(record.weights, torch.full_like(record.weights, 1 / len(batch[1])))
            else:
                optimizer.zero_grad()
                cross_entropy(model, batch).mean().backward()
                optimizer.step()
        return model

    for (name, a), b in zip(run(True).state_dict().items(), run(False).state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reward", ["finite_difference", "jvp"])
@pytest.mark.parametrize("dev_mode", ["eval", "train"])
def test_loss_and_step_leave_everything_alone(kind: str, reward: str, dev_mode: str) -> None:
    """`loss()` may change what a plain forward changes, and nothing else; `step()` nothing at all."""
    model, batch = make(kind, 6, 3, 3)
    _, dev = make(kind, 6, 3, 3)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(TensorDataset(*dev), 2, shuffle=True)
    dds = DDS(model, SignalScorer(), cross_entropy, optimizer, loader, reward=reward, dev_mode=dev_mode)
    train_step(dds, optimizer, batch)

    saved = {n: v.clone() for n, v in model.state_dict().items()}
    state = torch.get_rng_state()
    losses = cross_entropy(model, batch)
    plain = fingerprint(model)
    model.load_state_dict(saved)
    torch.set_rng_state(state)
    loss = dds.loss(batch)
    assert differences(plain, fingerprint(model)) == []
    assert loss.item() != pytest.approx(losses.mean().item(), rel=1e-12)  # the scorer has begun to weigh

    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    before = fingerprint(model)
    assert dds.step() is not None
    assert differences(before, fingerprint(model)) == []


def make_run(scorer: str, seed: int) -> tuple[nn.Module, Optimizer, DDS]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))
    optimizer = Adam(model.parameters(), lr=0.01)
    net = {"signal": SignalScorer, "mlp": lambda: MLPScorer(6, 3)}[scorer]()
    dev = TensorDataset(*batches(1, rows=20, dtype=torch.float32)[0])
    loader = DataLoader(dev, 3, shuffle=True, generator=torch.Generator().manual_seed(5) if scorer == "mlp" else None)
    return model, optimizer, DDS(model, net, cross_entropy, optimizer, loader, update_every=2, dev_mode="train")


@pytest.mark.parametrize("scorer", ["signal", "mlp"])
@pytest.mark.parametrize("stop", [0, 7, 10])
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(scorer: str, stop: int) -> None:
    data = batches(25, dtype=torch.float32)
    model, optimizer, dds = make_run(scorer, seed=1)
    for batch in data[:stop]:
        train_step(dds, optimizer, batch)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), dds.state_dict(), torch.get_rng_state()], file)
    for batch in data[stop:]:
        train_step(dds, optimizer, batch)

    other, other_optimizer, other_dds = make_run(scorer, seed=2)
    file.seek(0)
    for owner, state in zip((other, other_optimizer, other_dds), saved := torch.load(file), strict=False):
        owner.load_state_dict(state)
    torch.set_rng_state(saved[3])
    for batch in data[stop:]:
        train_step(other_dds, other_optimizer, batch)
    for a, b in ((model, other), (dds.scorer, other_dds.scorer)):
        for (name, x), y in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
            assert torch.equal(x, y), name
    assert other_dds.steps == dds.steps == 25


def test_update_every_updates_at_every_kth_step() -> None:
    model, optimizer = mlp(), None
    optimizer = SGD(model.parameters(), lr=0.1)
    dds = DDS(model, None, cross_entropy, optimizer, batches(1, dtype=torch.float32), update_every=3)
    records = [train_step(dds, optimizer, b) for b in batches(7, dtype=torch.float32)]
    assert [t for t, r in enumerate(records, 1) if r is not None] == [3, 6]
    assert [r.step for r in records if r is not None] == [3, 6]


def test_memory_does_not_grow_with_steps() -> None:
    """Counts all live tensors, whoever holds them."""
    import gc

    _, optimizer, dds = make_run("signal", seed=0)
    counts = []
    for t, batch in enumerate(batches(300, dtype=torch.float32), 1):
        train_step(dds, optimizer, batch)
        if t in (30, 300):
            gc.collect()
            counts.append(sum(o.nbytes for o in gc.get_objects() if type(o) in (Tensor, nn.Parameter)))
    assert counts[1] <= counts[0] * 1.05


class NoSynchronisation(TorchDispatchMode):
    """Forbids the operators beneath ``.item()``, ``bool(tensor)`` and boolean indexing, which wait for a device."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ not in self.FORBIDDEN, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("reward", ["finite_difference", "jvp"])
@pytest.mark.parametrize("optimizer_type", [SGD, Adam])
def test_a_step_never_waits_for_the_device(reward: str, optimizer_type: type[Optimizer]) -> None:
    model, batch = make("cnn-train", 6, 2, 3, dtype=torch.float32)
    optimizer = optimizer_type(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    dds = DDS(model, None, cross_entropy, optimizer, [batch], reward=reward)
    train_step(dds, optimizer, batch)
    optimizer.zero_grad()
    with NoSynchronisation():
        loss = dds.loss(batch)
        loss.backward()
    optimizer.step()
    with NoSynchronisation():
        record = dds.step()
    assert record is not None
    with pytest.raises(AssertionError, match="waits"), NoSynchronisation():
        _ = record.skipped


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_step_never_waits_for_cuda() -> None:
    model, batch = make("cnn-train", 6, 2, 3, dtype=torch.float32)
    model, batch = model.cuda(), (batch[0].cuda(), batch[1].cuda())
    optimizer = SGD(model.parameters(), lr=0.1)
    dds = DDS(model, None, cross_entropy, optimizer, [batch])
    train_step(dds, optimizer, batch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        train_step(dds, optimizer, batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def poisoned(where: str) -> tuple[nn.Module, Optimizer, DDS, list[Batch]]:
    model = mlp().eval()
    optimizer = SGD(model.parameters(), lr=0.1)
    data = batches(3, dtype=torch.float32)
    train, dev = [data[0]] * 3, (data[1][0].clone(), data[1][1])
    scorer: nn.Module = MLPScorer(6)
    if where == "dev gradient":
        dev[0][0, 0] = torch.nan
    if where == "score":
        nn.init.constant_(scorer.body[-1].bias, torch.nan)  # type: ignore[union-attr, index]

    def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
        losses = cross_entropy(model, batch)
        if where == "reward" and not torch.is_grad_enabled():  # only the perturbed forward of the reward pass
            losses = losses * torch.inf
        if where == "loss":
            losses = torch.cat([losses[:1] + torch.inf, losses[1:]]) if batch is not dev else losses
        return losses

    return model, optimizer, DDS(model, scorer, loss_fn, optimizer, [dev]), train


@pytest.mark.parametrize("where", ["loss", "score", "dev gradient", "reward"])
def test_non_finite_numbers_never_reach_the_scorer(where: str) -> None:
    model, optimizer, dds, train = poisoned(where)
    psi = {n: p.clone() for n, p in dds.scorer.state_dict().items()}
    for t, batch in enumerate(train, 1):
        optimizer.zero_grad()
        loss = dds.loss(batch)
        if where != "loss":
            assert bool(loss.isfinite()), "training goes on"
            loss.backward()
        optimizer.step()
        before = fingerprint(model)
        record = dds.step()
        assert differences(before, fingerprint(model)) == []
        assert record is not None
        assert f"non-finite {where}" in str(record.skipped)
        assert where in record.to_json()
        assert dds.skipped == t
    for name, p in dds.scorer.state_dict().items():
        assert torch.equal(p, psi[name]) or where == "score"
    if where == "score":
        torch.testing.assert_close(record.weights, torch.full((8,), 1 / 8))
        assert all(
            torch.equal(a, b) for a, b in zip(dds.scorer.parameters(), psi.values(), strict=True) if b.isfinite().all()
        )


def test_a_scorer_optimizer_that_cannot_decide_on_the_device_skips_too() -> None:
    model = mlp().eval()
    optimizer, scorer = SGD(model.parameters(), lr=0.1), MLPScorer(6)
    (bad, good) = batches(2, dtype=torch.float32)
    bad[0][0, 0] = torch.nan
    inner = SGD(scorer.parameters(), lr=0.1)
    dds = DDS(model, scorer, cross_entropy, optimizer, [bad], scorer_optimizer=inner)
    before = [p.clone() for p in scorer.parameters()]
    record = train_step(dds, optimizer, good)
    assert record is not None
    assert record.skipped == "non-finite dev gradient, reward"
    assert all(torch.equal(a, b) for a, b in zip(before, scorer.parameters(), strict=True))


def test_a_step_that_the_optimizer_skipped_is_recorded_and_warned_of_once() -> None:
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    (batch,) = batches(1, dtype=torch.float32)
    dds = DDS(model, None, cross_entropy, optimizer, [batch])
    dds.loss(batch).backward()
    with pytest.warns(UserWarning, match="optimizer.step\\(\\) has not run"):
        record = dds.step()
    assert record is not None
    assert record.skipped == "the optimizer did not step"
    dds.loss(batch)
    dds.step()
    assert dds.skipped == 2
    assert train_step(dds, optimizer, batch).skipped is None  # type: ignore[union-attr]


def test_gradients_may_be_dropped_before_step() -> None:
    """``optimizer.zero_grad()`` right after ``optimizer.step()`` changes nothing."""

    def run(early: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = mlp().eval()
        optimizer = Adam(model.parameters(), lr=0.01)
        dds = DDS(model, MLPScorer(6), cross_entropy, optimizer, batches(1, dtype=torch.float32))
        for batch in batches(5, dtype=torch.float32):
            dds.loss(batch).backward()
            optimizer.step()
            if early:
                optimizer.zero_grad()
            dds.step()
            optimizer.zero_grad()
        return [p.detach() for p in dds.scorer.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(run(True), run(False), strict=True))


def test_frozen_unused_and_unheld_parameters() -> None:
    """Frozen, without gradient, in another optimizer: none of them enters the direction."""
    model = nn.ModuleDict({n: nn.Linear(6, 3) for n in ("used", "frozen", "unused", "elsewhere")})
    model["frozen"].requires_grad_(False)

    def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
        x = batch[0]
        logits = model["used"](x) + model["frozen"](x) + model["elsewhere"](x)  # type: ignore[index]
        return F.cross_entropy(logits, batch[1], reduction="none")

    held = [*model["used"].parameters(), *model["frozen"].parameters(), *model["unused"].parameters()]
    for optimizer in (SGD(held, lr=0.1), Adam(held, lr=0.1)):
        dds = DDS(model, None, loss_fn, optimizer, batches(1, dtype=torch.float32))
        for batch in batches(3, dtype=torch.float32):
            record = train_step(dds, optimizer, batch)
        assert record is not None
        assert record.skipped is None
        assert set(dds.state_dict()["direction"]) == {"used.weight", "used.bias"}


def test_parameter_groups_scale_their_own_part() -> None:
    model, (dev, batch) = mlp().eval().double(), batches(2)
    groups = [{"params": list(model[0].parameters()), "lr": 0.5}, {"params": list(model[3].parameters()), "lr": 0.0}]
    optimizer = SGD(groups, lr=0.1)
    dds = DDS(model, None, cross_entropy, optimizer, [dev], reward="jvp")
    train_step(dds, optimizer, batch)
    v = dds.state_dict()["direction"]
    assert all(float(v[n].norm()) == 0 for n in ("3.weight", "3.bias"))
    model.zero_grad()
    cross_entropy(model, dev).mean().backward()
    torch.testing.assert_close(v["0.weight"], 0.5 * model[0].weight.grad)


def test_other_optimizers_warn_once_and_use_the_plain_gradient() -> None:
    model = mlp()
    optimizer = RMSprop(model.parameters())
    data = batches(1, dtype=torch.float32)
    with pytest.warns(UserWarning, match="does not know.*RMSprop"):
        dds = DDS(model, None, cross_entropy, optimizer, data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert train_step(dds, optimizer, data[0]) is not None
        DDS(model, None, cross_entropy, optimizer, data, optimizer_aware=False)


def test_signals_are_computed_only_for_those_who_ask() -> None:
    model, (batch,) = mlp().eval(), batches(1, dtype=torch.float32)
    optimizer = SGD(model.parameters(), lr=0.1)
    calls = 0

    def counted(model: nn.Module, batch: Batch) -> Tensor:
        nonlocal calls
        calls += 1
        return cross_entropy(model, batch)

    class LossOnly(nn.Module):
        signals = ("loss",)

        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, batch: Batch, *, loss: Tensor) -> Tensor:
            assert not loss.requires_grad
            return self.scale * loss

    for scorer, expected in ((MLPScorer(6), 3), (LossOnly(), 3), (SignalScorer(), 4)):
        dds = DDS(model, scorer, counted, optimizer, [batch])
        train_step(dds, optimizer, batch)
        calls = 0
        train_step(dds, optimizer, batch)
        assert calls == expected, type(scorer).__name__  # training, dev, reward (and alignment)


def test_the_alignment_signal_is_the_agreement_with_the_previous_dev_gradient() -> None:
    model, (dev, batch) = mlp().eval().double(), batches(2)
    optimizer = SGD(model.parameters(), lr=0.1)
    seen: list[Tensor] = []

    class Spy(nn.Module):
        signals = ("alignment",)

        def forward(self, batch: Batch, *, alignment: Tensor) -> Tensor:
            seen.append(alignment)
            return torch.zeros_like(alignment)

    dds = DDS(model, Spy(), cross_entropy, optimizer, [dev], reward="jvp")
    train_step(dds, optimizer, batch)
    parameters = list(model.parameters())
    gradient = torch.autograd.grad(cross_entropy(model, dev).mean(), parameters)
    expected = torch.stack(
        [
            sum((0.1 * d * g).sum() for d, g in zip(gradient, found, strict=True))
            for found in (torch.autograd.grad(cross_entropy(model, batch)[i], parameters) for i in range(8))
        ]
    )
    dds.loss(batch)
    assert torch.equal(seen[0], torch.zeros(8).double())
    torch.testing.assert_close(seen[1], expected)


def test_rewards_under_autocast_are_those_of_full_precision() -> None:
    def run(autocast: bool) -> Tensor:
        torch.manual_seed(0)
        model, (dev, batch) = mlp(activation=nn.Tanh).eval(), batches(2, rows=32, dtype=torch.float32)
        optimizer = SGD(model.parameters(), lr=0.0)
        dds = DDS(model, MLPScorer(6), cross_entropy, optimizer, [dev], optimizer_aware=False)
        record = train_step(dds, optimizer, batch, autocast=autocast)
        assert record is not None
        assert record.skipped is None
        return record.rewards

    full, low = run(False), run(True)
    assert float((full - low).norm() / full.norm()) < 0.05


def endless() -> Iterator[Batch]:
    yield from batches(1)


def test_clear_errors() -> None:
    model, data = mlp(), batches(2, dtype=torch.float32)
    optimizer = SGD(model.parameters(), lr=0.1)

    def dds(scorer: nn.Module | None = None, loss_fn: Any = cross_entropy, dev: Any = data, **more: Any) -> DDS:
        return DDS(model, scorer, loss_fn, optimizer, dev, **more)

    with pytest.raises(GradsieveError, match=r"one loss per example, shape \(8,\).*shape \(\).*reduction='none'"):
        dds(loss_fn=lambda m, b: cross_entropy(m, b).mean()).loss(data[0])
    with pytest.raises(GradsieveError, match="16 losses"):
        dds(loss_fn=lambda m, b: cross_entropy(m, b).repeat(2)).loss(data[0])
    with pytest.raises(GradsieveError, match="not float"):
        dds(loss_fn=lambda m, b: cross_entropy(m, b).mean().item()).loss(data[0])
    with pytest.raises(GradsieveError, match="carry no gradient"):
        dds(loss_fn=lambda m, b: cross_entropy(m, b).detach()).loss(data[0])
    with pytest.raises(GradsieveError, match="under no_grad"), torch.no_grad():
        dds().loss(data[0])
    with pytest.raises(GradsieveError, match="dev_loader is empty"):
        dds(dev=[])
    unsized = dds(dev=type("Unsized", (), {"__iter__": lambda self: iter(())})())
    with pytest.raises(GradsieveError, match="dev_loader is empty"):
        train_step(unsized, optimizer, data[0])
    with pytest.raises(GradsieveError, match="only once"):
        dds(dev=endless())
    with pytest.raises(GradsieveError, match="re-iterable"):
        dds(dev=3)
    with pytest.raises(GradsieveError, match=r"shape \(8,\), but returned shape \(8, 1\).*squeeze"):
        dds(scorer=nn.Sequential(_First(), nn.Linear(6, 1))).loss(data[0])
    with pytest.raises(GradsieveError, match="loss\\(\\) first"):
        dds().step()
    for bad in (
        {"reward": "exact"},
        {"psi_gradient": "other"},
        {"dev_mode": "test"},
        {"update_every": 0},
        {"max_logit": 0.0},
        {"uniform_mix": 1.5},
        {"caution": -1.0},
        {"epsilon": 0.0},
        {"cosine": True},
    ):
        with pytest.raises(GradsieveError, match=next(iter(bad))):
            dds(**bad)
    with pytest.raises(GradsieveError, match="gibberish"):
        dds(scorer=type("Odd", (Constant,), {"signals": ("gibberish",)})())
    with pytest.raises(GradsieveError, match="no parameter that requires"):
        DDS(nn.Flatten(), None, cross_entropy, optimizer, data)
    with pytest.raises(GradsieveError, match="split="):
        ConvScorer()({"image": data[0][0]})


class _First(nn.Module):
    def forward(self, batch: Batch) -> Tensor:
        return batch[0]


def one_step_each(dds: DDS, optimizer: Optimizer, data: list[Batch]) -> list[StepRecord]:
    found = [train_step(dds, optimizer, batch) for batch in data]
    return [record for record in found if record is not None]


def test_negative_losses_do_not_stop_the_default_scorer() -> None:
    model, data = mlp(), batches(3, dtype=torch.float32)
    optimizer = SGD(model.parameters(), lr=0.01)
    dds = DDS(model, None, lambda m, b: cross_entropy(m, b) - 5, optimizer, data)
    assert [r.skipped for r in one_step_each(dds, optimizer, data)] == [None] * 3


def test_a_bad_dev_batch_costs_one_update_only() -> None:
    model, data = mlp(), batches(4, dtype=torch.float32)
    optimizer = SGD(model.parameters(), lr=0.01)
    poisoned_dev = [data[0], (data[1][0] * torch.nan, data[1][1]), data[2], data[3]]
    dds = DDS(model, None, cross_entropy, optimizer, poisoned_dev)
    skipped = [r.skipped for r in one_step_each(dds, optimizer, data)]
    assert skipped == [None, "non-finite dev gradient, reward", None, None]


def test_a_scorer_may_not_share_parameters_with_the_model() -> None:
    model, data = mlp(), batches(1, dtype=torch.float32)
    optimizer = SGD(model.parameters(), lr=0.01)
    scorer = nn.Sequential(_First(), model[0], nn.Linear(8, 1), nn.Flatten(0))
    with pytest.raises(GradsieveError, match="share parameters"):
        DDS(model, scorer, cross_entropy, optimizer, data)
    head = torch.optim.Adam(scorer[2].parameters(), fused=True)
    dds = DDS(model, scorer, cross_entropy, optimizer, data, scorer_optimizer=head)
    optimizer.zero_grad()
    dds.loss(data[0]).backward()


def test_a_scorer_optimizer_may_hold_frozen_parameters() -> None:
    model, data, scorer = mlp(), batches(2, dtype=torch.float32), MLPScorer(6)
    optimizer = SGD(model.parameters(), lr=0.1)
    scorer.body[1].weight.requires_grad_(False)  # type: ignore[index, union-attr]
    dds = DDS(model, scorer, cross_entropy, optimizer, data, scorer_optimizer=Adam(scorer.parameters()))
    assert one_step_each(dds, optimizer, data)[-1].skipped is None


def test_parameters_may_be_frozen_on_the_way() -> None:
    model, data = mlp(), batches(3, dtype=torch.float32)
    optimizer = SGD(model.parameters(), lr=0.1)
    dds = DDS(model, None, cross_entropy, optimizer, data)
    train_step(dds, optimizer, data[0])
    model[0].requires_grad_(False)
    assert one_step_each(dds, optimizer, data)[-1].skipped is None


def test_what_happens_between_optimizer_step_and_step_does_not_matter() -> None:
    """Gradients zeroed in place, learning rates changed: g' was taken as the optimizer stepped."""

    def run(meddle: bool) -> Tensor:
        torch.manual_seed(0)
        model, data = mlp().eval(), batches(2, dtype=torch.float32)
        optimizer = Adam(model.parameters(), lr=0.01)
        dds = DDS(model, MLPScorer(6), cross_entropy, optimizer, data)
        train_step(dds, optimizer, data[0])
        optimizer.zero_grad()
        dds.loss(data[1]).backward()
        optimizer.step()
        if meddle:
            optimizer.zero_grad(set_to_none=False)
            optimizer.param_groups[0]["lr"] = 7.0
        record = dds.step()
        assert record is not None
        return record.rewards

    assert torch.equal(run(True), run(False))


def test_the_reward_pass_starts_from_the_buffers_of_the_training_forward() -> None:
    """Spectral norm moves its buffers in every training forward; the reward must not see one more iteration."""
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 3))
    model, (batch,) = nn.Sequential(layer).double(), batches(1)
    optimizer = SGD(model.parameters(), lr=0.1)
    found = {}
    for reward in ("finite_difference", "per_example"):
        torch.manual_seed(0)
        twin = copy.deepcopy(model)
        optimizer = SGD(twin.parameters(), lr=0.1)
        dds = DDS(twin, MLPScorer(6).double(), cross_entropy, optimizer, [batch], reward=reward)
        record = train_step(dds, optimizer, batch)
        assert record is not None
        found[reward] = record.rewards
    torch.testing.assert_close(found["finite_difference"], found["per_example"], rtol=1e-2, atol=1e-4)


def test_autocast_inside_the_loss_is_refused_by_finite_differences_and_fine_for_jvp() -> None:
    model, (dev, batch) = mlp(activation=nn.Tanh).eval(), batches(2, dtype=torch.float32)
    optimizer = SGD(model.parameters(), lr=0.1)

    def inside(model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return cross_entropy(model, batch)

    with pytest.raises(GradsieveError, match=r"bfloat16.*around dds.loss\(\).*'jvp'"):
        train_step(DDS(model, None, inside, optimizer, [dev]), optimizer, batch)
    record = train_step(DDS(model, MLPScorer(6), inside, optimizer, [dev], reward="jvp"), optimizer, batch)
    assert record is not None
    assert float(record.rewards.abs().min()) > 0


def test_half_precision_inputs_under_autocast() -> None:
    model, (dev, batch) = mlp().eval(), batches(2, dtype=torch.bfloat16)
    optimizer = SGD(model.parameters(), lr=0.1)
    dds = DDS(model, None, cross_entropy, optimizer, [dev])
    for _ in range(2):
        record = train_step(dds, optimizer, batch, autocast=True)
    assert record is not None
    assert record.skipped is None


def test_batches_of_every_shape() -> None:
    """A list with one dict per example; time first; a loader over an unsized data set."""
    model = mlp().eval()
    optimizer = SGD(model.parameters(), lr=0.1)

    def of_dicts(model: nn.Module, batch: list[dict[str, Tensor]]) -> Tensor:
        return torch.stack([F.cross_entropy(model(e["x"]), e["y"]) for e in batch])

    dicts = [{"x": torch.randn(k + 2, 6), "y": torch.randint(3, (k + 2,))} for k in range(5)]
    assert train_step(DDS(model, None, of_dicts, optimizer, [dicts]), optimizer, dicts) is not None

    def time_first(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).mean(0)[:, 0]

    times = torch.randn(7, 5, 6)
    assert train_step(DDS(model, None, time_first, optimizer, [times]), optimizer, times) is not None

    class Stream(IterableDataset[Batch]):
        def __iter__(self) -> Iterator[Batch]:
            yield from zip(*batches(1, dtype=torch.float32)[0], strict=True)

    loader = DataLoader(Stream(), 4)
    dds = DDS(model, None, cross_entropy, optimizer, loader)
    assert len(one_step_each(dds, optimizer, batches(5, dtype=torch.float32))) == 5


def test_a_dev_batch_of_one_example_with_batchnorm_is_named() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    x, y = batches(1, dtype=torch.float32)[0]
    optimizer = SGD(model.parameters(), lr=0.1)
    with pytest.raises(GradsieveError, match=r"drop_last=True.*dev_mode='eval'"):
        train_step(DDS(model, None, cross_entropy, optimizer, [(x[:1], y[:1])]), optimizer, (x, y))
    dds = DDS(model, None, cross_entropy, optimizer, [(x[:1], y[:1])], dev_mode="eval")
    assert train_step(dds, optimizer, (x, y)) is not None


def test_sparse_embedding_gradients() -> None:
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Flatten(), nn.Linear(8, 3))
    batch = (torch.randint(10, (6, 2)), torch.randint(3, (6,)))
    optimizer = SGD(model.parameters(), lr=0.1)
    dds = DDS(model, None, cross_entropy, optimizer, [batch])
    assert one_step_each(dds, optimizer, [batch, batch])[-1].skipped is None


def test_a_state_of_another_loader_is_refused() -> None:
    model, data = mlp(), batches(1, dtype=torch.float32)
    optimizer = SGD(model.parameters(), lr=0.1)
    own = DataLoader(TensorDataset(*data[0]), 2, shuffle=True, generator=torch.Generator())
    dds, other = DDS(model, None, cross_entropy, optimizer, own), DDS(model, None, cross_entropy, optimizer, data)
    train_step(dds, optimizer, data[0])
    with pytest.raises(GradsieveError, match="1 generators of its own, this one with 0"):
        other.load_state_dict(dds.state_dict())


def test_a_distributed_sampler_shuffles_each_pass_of_dev_anew() -> None:
    """And a resumed one goes on as if it had not been stopped."""
    dev = TensorDataset(torch.arange(12))

    def batches() -> DevBatches:
        sampler = DistributedSampler(dev, num_replicas=2, rank=0)
        return DevBatches(DataLoader(dev, 3, sampler=sampler), RandomStream(torch.device("cpu"), 0))

    whole, first = batches(), batches()
    drawn = [whole.draw()[0].tolist() for _ in range(8)]
    assert sorted(drawn[0] + drawn[1]) != sorted(drawn[2] + drawn[3])
    for _ in range(3):
        first.draw()
    again = batches()
    again.load_state_dict(first.state_dict())
    assert [again.draw()[0].tolist() for _ in range(5)] == drawn[3:]


def test_a_loader_with_a_state_in_name_only_is_resumed_by_counting() -> None:
    """As accelerate's DataLoaderShard."""

    class Shard(DataLoader[Any]):
        def state_dict(self) -> Any:
            return self.dl_state_dict  # type: ignore[attr-defined]

        def load_state_dict(self, state: Any) -> None:
            self.base_dataloader.load_state_dict(state)  # type: ignore[attr-defined]

    def batches() -> DevBatches:
        return DevBatches(Shard(TensorDataset(torch.arange(12)), 3, shuffle=True), RandomStream(torch.device("cpu"), 0))

    whole, first, again = batches(), batches(), batches()
    drawn = [whole.draw()[0].tolist() for _ in range(8)]
    for _ in range(3):
        first.draw()
    again.load_state_dict(first.state_dict())
    again.stream.state = first.stream.state
    assert [again.draw()[0].tolist() for _ in range(5)] == drawn[3:]
    with pytest.raises(GradsieveError, match="had a state of its own"):
        again.load_state_dict({"begun": True, "passes": 1, "loader": {}})


def test_a_look_at_the_model_between_the_steps_changes_nothing() -> None:
    """model.eval() and back is the user's business; rewards are those of the pass that trained."""
    found = []
    for looks in (False, True):
        torch.manual_seed(0)
        model, batch = make("cnn-train", 6, 4, 3)
        optimizer = SGD(model.parameters(), lr=0.1)
        dds = DDS(model, None, cross_entropy, optimizer, [batch], seed=0)
        dds.loss(batch).backward()
        optimizer.step()
        if looks:
            model.eval()
        record = dds.step()
        assert record is not None
        assert model.training is not looks
        found.append(record.rewards)
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def test_a_batch_that_was_dropped_before_its_backward_is_no_micro_batch() -> None:
    model, batch = make("mlp", 6, 4, 3)
    optimizer = SGD(model.parameters(), lr=0.1)
    dds = DDS(model, None, cross_entropy, optimizer, [batch], seed=0)
    for drop in (False, True, False):
        loss = dds.loss(batch)
        if drop:
            continue  # gradients of the step before are still there
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record = dds.step()
    assert record is not None
    assert record.weights.shape == (6,)
    assert float(record.weights.sum()) == pytest.approx(1)


def test_an_empty_batch_is_refused() -> None:
    model, (x, y) = make("mlp", 6, 4, 3)
    dds = DDS(model, None, cross_entropy, SGD(model.parameters(), lr=0.1), [(x, y)])
    with pytest.raises(GradsieveError, match="empty batch"):
        dds.loss((x[:0], y[:0]))


def test_an_average_of_dev_gradients_gets_over_a_bad_first_one() -> None:
    model, (x, y) = make("mlp", 6, 4, 3)
    optimizer = SGD(model.parameters(), lr=0.1)
    dds = DDS(model, None, cross_entropy, optimizer, [(x * torch.nan, y), (x, y), (x, y)], dev_average=0.9, seed=0)
    skipped = []
    for _ in range(3):
        optimizer.zero_grad()
        dds.loss((x, y)).backward()
        optimizer.step()
        record = dds.step()
        assert record is not None
        skipped.append(record.skipped is not None)
    assert skipped == [True, False, False]


def test_a_scorer_that_is_frozen_hears_no_more_lessons() -> None:
    model, batch = make("mlp", 6, 4, 3)
    optimizer = SGD(model.parameters(), lr=0.1)
    dds = DDS(model, None, cross_entropy, optimizer, [batch], replay=4, seed=0)
    for frozen in (False, True):
        dds.scorer.requires_grad_(not frozen)
        optimizer.zero_grad()
        dds.loss(batch).backward()
        optimizer.step()
        dds.step()
    assert dds.steps == 2


def test_parameters_may_be_frozen_between_the_steps() -> None:
    model, batch = make("mlp", 6, 4, 3)
    optimizer = SGD(model.parameters(), lr=0.1)
    dds = DDS(model, None, cross_entropy, optimizer, [batch], seed=0)
    dds.loss(batch).backward()
    optimizer.step()
    next(model.parameters()).requires_grad_(False)
    record = dds.step()
    assert record is not None
    assert record.skipped is None


def test_a_buffer_may_grow() -> None:
    class Growing(nn.Module):
        mask: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)
            self.register_buffer("mask", torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            self.mask = torch.ones(len(self.mask) + 3)
            return self.linear(x)

    model, batch = Growing(), (torch.randn(6, 4), torch.randint(3, (6,)))
    optimizer = SGD(model.parameters(), lr=0.1)
    dds = DDS(model, None, cross_entropy, optimizer, [batch], seed=0)
    for steps in range(1, 4):
        optimizer.zero_grad()
        dds.loss(batch).backward()
        optimizer.step()
        dds.step()
        assert len(model.mask) == 2 + 3 * steps


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_users_autocast_is_not_the_scorers(dtype: torch.dtype) -> None:
    seen = []

    class Spy(MLPScorer):
        def forward(self, batch: Any) -> Tensor:
            found = super().forward(batch)
            seen.append(self.body[1](batch[0].flatten(1)).dtype)
            return found

    model, (x, y) = mlp(), (torch.randn(6, 6), torch.randint(3, (6,)))
    dds = DDS(model, Spy(6), cross_entropy, SGD(model.parameters(), lr=0.1), [(x, y)])
    with torch.autocast("cpu", dtype):
        dds.loss((x.to(dtype), y))
    assert seen == [torch.float32]


def test_a_state_without_ring_or_budget_is_taken() -> None:
    model, batch = make("mlp", 6, 4, 3)
    plain = DDS(model, None, cross_entropy, SGD(model.parameters(), lr=0.1), [batch], seed=0)
    rich = DDS(model, None, cross_entropy, SGD(model.parameters(), lr=0.1), [batch], seed=0, overhead=0.1)
    rich.load_state_dict(plain.state_dict())
    assert rich.steps == 0
