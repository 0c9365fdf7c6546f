"""Micro-batches and processes: together they do what one process does with the joint batch."""

import copy
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from gradsieve import DDS, GradsieveError, GroupDDS
from gradsieve.baselines import SPCL, BatchWeight, MentorNet
from gradsieve.joint import Joint
from gradsieve.networks import MLPScorer, SignalScorer
from gradsieve.parallel import ALONE, Sizes, World, shard_of, sharded_like, unwrapped
from gradsieve.scorer import example_weights

SIZE = 2
STEPS = 20
BATCH, DEV = 16, 8


def losses_of(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def data(count: int, size: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    chance = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(size, 6, generator=chance, dtype=torch.float64),
            torch.randint(3, (size,), generator=chance),
        )
        for _ in range(count)
    ]


def part(batch: tuple[Tensor, Tensor], number: int, of: int) -> tuple[Tensor, Tensor]:
    """Equal slices, in order."""
    return batch[0].chunk(of)[number], batch[1].chunk(of)[number]


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def scorers() -> dict[str, Callable[[], nn.Module]]:
    def reading() -> nn.Module:
        torch.manual_seed(2)
        scorer = MLPScorer(6, 3, hidden=8).double()
        for p in scorer.parameters():
            nn.init.normal_(p, std=0.3)
        return scorer

    return {"reading": reading, "signals": lambda: SignalScorer().double()}


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-6),
}


def wrapped(model: nn.Module, how: str) -> nn.Module:
    if how == "ddp":
        return DistributedDataParallel(model)
    if how in ("fsdp", "fsdp, root only"):
        from torch.distributed.fsdp import fully_shard

        for layer in model:  # type: ignore[attr-defined]
            if isinstance(layer, nn.Linear) and how == "fsdp":
                fully_shard(layer)
        fully_shard(model)
    return model


def numbers(model: nn.Module) -> dict[str, Tensor]:
    """All parameters, whole."""
    named = {name.removeprefix("module."): p for name, p in model.named_parameters()}
    return {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for n, p in named.items()}


def everyone(value: Tensor, how: str) -> Tensor:
    if how == "alone":
        return value
    found = [torch.empty_like(value) for _ in range(SIZE)]
    dist.all_gather(found, value)
    return torch.cat(found)


def trained(
    how: str, *, scorer: str, optimizer: str, micro: int = 1, clip: bool = False, **options: Any
) -> dict[str, Any]:
    """DDS after some steps on the joint batch: alone all of it, else this process's half in `micro` parts."""
    rank, size = (0, 1) if how == "alone" else (dist.get_rank(), SIZE)
    model = wrapped(network(), how)
    its = OPTIMIZERS[optimizer](model.parameters())
    dev = [part(batch, rank, size) for batch in data(3, DEV, seed=1)]
    dds = DDS(model, scorers()[scorer](), losses_of, its, dev, seed=0, **options)
    rewards, weights = torch.zeros(0), torch.zeros(0)
    for batch in data(STEPS, BATCH, seed=0):
        its.zero_grad()
        for number in range(micro):
            dds.loss(part(part(batch, number, micro), rank, size)).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        its.step()
        record = dds.step()
        assert record is None or record.skipped is None
        if record is not None:
            assert record.rewards is not None
            rewards, weights = record.rewards, record.weights
    return {
        "model": numbers(model),
        "scorer": {n: p.detach().clone() for n, p in dds.scorer.named_parameters()},
        "rewards": everyone(rewards, how),
        "weights": everyone(weights, how),
    }


CASES: dict[str, dict[str, Any]] = {
    "reading, sgd": {"scorer": "reading", "optimizer": "sgd"},
    "reading, adam": {"scorer": "reading", "optimizer": "adam"},
    "signals": {"scorer": "signals", "optimizer": "adam"},
    "last layer": {"scorer": "signals", "optimizer": "sgd", "alignment": "last_layer"},
    "replay": {"scorer": "signals", "optimizer": "sgd", "update_every": 3, "replay": 4},
    "clipped": {"scorer": "reading", "optimizer": "sgd", "clip": True},
    "uniform mix": {"scorer": "reading", "optimizer": "sgd", "uniform_mix": 0.2},
    "algorithm 1": {"scorer": "reading", "optimizer": "sgd", "psi_gradient": "algorithm1", "caution": 0.0},
}


def mixed(how: str) -> dict[str, Any]:
    """Algorithm 2 on three sources; each process has its half of every batch."""
    rank, size = (0, 1) if how == "alone" else (dist.get_rank(), SIZE)
    model = wrapped(network(), how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dds = GroupDDS(
        None,
        3,
        0,
        model=model,
        items_between=2,
        updates=2,
        scorer_optimizer=None,
        generator=torch.Generator().manual_seed(0),
    )
    records = []
    for step in range(STEPS):
        group = int(dds.draw(torch.ones(3)))
        batch = data(1, BATCH, seed=100 * group + step)[0]
        optimizer.zero_grad()
        losses_of(model, part(batch, rank, size)).mean().backward()
        dds.observe(group, {n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        record = dds.step()
        if record is not None:
            records.append(record.rewards)
    return {
        "model": numbers(model),
        "scorer": {n: p.detach().clone() for n, p in dds.scorer.named_parameters()},
        "rewards": torch.stack(records),
    }


@contextmanager
def process_group(rank: int, folder: Path) -> Iterator[None]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=SIZE)
    try:
        yield
    finally:
        dist.destroy_process_group()


def work(rank: int, folder: Path) -> None:
    """All that needs several processes, in one go: starting them takes seconds."""
    torch.manual_seed(rank)  # ranks that are seeded differently must agree all the same
    with process_group(rank, folder):
        found: dict[str, Any] = {}
        for how in ("ddp", "fsdp"):
            for name, settings in CASES.items():
                found[f"{how}, {name}"] = trained(how, **settings)
            found[f"{how}, micro-batches"] = trained(how, **CASES["reading, adam"], micro=2)
            found[f"{how}, groups"] = mixed(how)
            found[f"{how}, budget"] = budgeted(how)
            found[f"{how}, resumed"] = resumed(how)
        found["root only"] = trained("fsdp, root only", **CASES["signals"], micro=1)
        found["baselines"] = {name: weighed("ddp", name) for name in BASELINES}
        found["ragged"] = ragged()
        found["refusals"] = refusals()
        compiled = torch.compile(wrapped(network(), "ddp"), backend="eager")
        found["compiled"] = World(compiled).size, type(unwrapped(compiled)) is type(network())
        torch.save(found, folder / f"found-{rank}.pt")


BASELINES: dict[str, Callable[[nn.Module, Any], Any]] = {
    "spcl": lambda model, dev: SPCL(model, losses_of, full_at=STEPS),
    "batchweight": lambda model, dev: BatchWeight(model, losses_of, dev, seed=0),
    "mentornet": lambda model, dev: MentorNet(model, losses_of, dev, 3, total_steps=STEPS, burn_in=0.0, seed=0),
}


def weighed(how: str, name: str) -> dict[str, Any]:
    """A baseline on the joint batch."""
    rank, size = (0, 1) if how == "alone" else (dist.get_rank(), SIZE)
    model = wrapped(network(), how)
    its = OPTIMIZERS["sgd"](model.parameters())
    way = BASELINES[name](model, [part(batch, rank, size) for batch in data(3, DEV, seed=1)])
    for batch in data(STEPS, BATCH, seed=0):
        its.zero_grad()
        way.loss(part(batch, rank, size)).backward()
        its.step()
        record = way.step()
    return {"model": numbers(model), "weights": everyone(record.weights, how)}


def budgeted(how: str) -> int:
    """Processes whose clocks differ must still measure at the same steps: else they wait for each other for ever."""
    model = wrapped(network(), how)
    its = OPTIMIZERS["sgd"](model.parameters())
    dds = DDS(model, SignalScorer().double(), losses_of, its, data(3, DEV, 1), seed=0, overhead=0.3)
    assert dds.budget is not None
    dds.budget._choice = 3 + dist.get_rank()
    for batch in data(70, BATCH, seed=0):
        its.zero_grad()
        dds.loss(batch).backward()
        its.step()
        dds.step()
    return dds.update_every


def resumed(how: str) -> bool:
    """Saved in the middle and loaded into new objects, it goes on to the same end."""

    def begin() -> tuple[nn.Module, torch.optim.Optimizer, DDS]:
        model = wrapped(network(), how)
        its = OPTIMIZERS["adam"](model.parameters())
        dev = [part(batch, dist.get_rank(), SIZE) for batch in data(3, DEV, seed=1)]
        return model, its, DDS(model, SignalScorer().double(), losses_of, its, dev, seed=0, replay=2)

    def go_on(model: nn.Module, its: torch.optim.Optimizer, dds: DDS, batches: list[Any]) -> None:
        for batch in batches:
            its.zero_grad()
            dds.loss(part(batch, dist.get_rank(), SIZE)).backward()
            its.step()
            dds.step()

    batches = data(10, BATCH, seed=0)
    first = begin()
    go_on(*first, batches[:5])
    saved = copy.deepcopy([thing.state_dict() for thing in first])
    go_on(*first, batches[5:])
    second = begin()
    for thing, state in zip(second, saved, strict=True):
        thing.load_state_dict(state)
    go_on(*second, batches[5:])
    expected, got = numbers(first[0]), numbers(second[0])
    return all(torch.equal(got[name], value) for name, value in expected.items())


def ragged() -> dict[str, Any]:
    """Batches of different sizes: one process has twelve examples, the other four."""
    rank = dist.get_rank()
    model = wrapped(network(), "ddp")
    its = OPTIMIZERS["sgd"](model.parameters())
    cut = slice(0, 12) if rank == 0 else slice(12, 16)
    dev_cut = slice(0, 5) if rank == 0 else slice(5, 8)
    dev = [(x[dev_cut], y[dev_cut]) for x, y in data(3, DEV, seed=1)]
    dds = DDS(model, SignalScorer().double(), losses_of, its, dev, seed=0)
    for x, y in data(STEPS, BATCH, seed=0):
        its.zero_grad()
        dds.loss((x[cut], y[cut])).backward()
        its.step()
        dds.step()
    return {"model": numbers(model), "scorer": {n: p.detach().clone() for n, p in dds.scorer.named_parameters()}}


def refusals() -> dict[str, str]:
    found = {}

    def refused(name: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except GradsieveError as error:
            found[name] = str(error)

    model = wrapped(network(), "fsdp")
    its = OPTIMIZERS["sgd"](model.parameters())
    refused("jvp", lambda: DDS(model, None, losses_of, its, data(1, 4, 0), reward="jvp"))
    dds = DDS(model, MLPScorer(6, 3).double(), losses_of, its, data(1, 4, 0))
    model.set_requires_gradient_sync(False)  # type: ignore[operator]
    dds.loss(data(1, 4, 0)[0]).backward()
    refused("unsynchronised", lambda: dds.loss(data(1, 4, 0)[0]))
    from torch.distributed.fsdp import fully_shard

    half = network()
    fully_shard(half[0])  # type: ignore[index]
    refused("half", lambda: World(half))
    return found


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each process found."""
    if not dist.is_available():
        pytest.skip("this build of torch has no torch.distributed")
    folder = tmp_path_factory.mktemp("together")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.multiprocessing.spawn(work, (folder,), nprocs=SIZE)
    return [torch.load(folder / f"found-{rank}.pt") for rank in range(SIZE)]


def assert_alike(found: dict[str, Any], expected: dict[str, Any], atol: float = 1e-9) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, dict):
            assert_alike(found[name], value, atol)
        else:
            torch.testing.assert_close(found[name], value, rtol=1e-6, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


class TestTogether:
    @pytest.mark.parametrize("how", ["ddp", "fsdp"])
    @pytest.mark.parametrize("case", CASES)
    def test_two_processes_do_what_one_does(self, how: str, case: str, together: list[dict[str, Any]]) -> None:
        expected = trained("alone", **CASES[case])
        for found in together:
            assert_alike(found[f"{how}, {case}"], expected)

    @pytest.mark.parametrize("how", ["ddp", "fsdp"])
    def test_with_micro_batches_too(self, how: str, together: list[dict[str, Any]]) -> None:
        expected = trained("alone", **CASES["reading, adam"], micro=2)
        for found in together:
            its = found[f"{how}, micro-batches"]
            for name in ("model", "scorer"):
                assert_alike(its[name], expected[name])

    def test_a_root_that_keeps_its_parameters_whole(self, together: list[dict[str, Any]]) -> None:
        for found in together:
            assert_alike(found["root only"], trained("alone", **CASES["signals"]))

    @pytest.mark.parametrize("how", ["ddp", "fsdp"])
    def test_groups(self, how: str, together: list[dict[str, Any]]) -> None:
        expected = mixed("alone")
        for found in together:
            assert_alike(found[f"{how}, groups"], expected, atol=1e-6)  # gradients are stored in float32

    @pytest.mark.parametrize("name", ["spcl", "batchweight"])
    def test_baselines_weigh_the_joint_batch(self, name: str, together: list[dict[str, Any]]) -> None:
        expected = weighed("alone", name)
        for found in together:
            assert_alike(found["baselines"][name], expected)

    def test_a_mentor_is_the_same_everywhere(self, together: list[dict[str, Any]]) -> None:
        """Which labels it is shown wrong is drawn by each process for itself."""
        assert_alike(together[0]["baselines"]["mentornet"], together[1]["baselines"]["mentornet"])
        assert float(together[0]["baselines"]["mentornet"]["weights"].sum()) == pytest.approx(1)

    def test_processes_may_have_batches_of_different_sizes(self, together: list[dict[str, Any]]) -> None:
        expected = trained("alone", scorer="signals", optimizer="sgd")
        for found in together:
            assert_alike(found["ragged"], {name: expected[name] for name in ("model", "scorer")})

    @pytest.mark.parametrize("how", ["ddp", "fsdp"])
    def test_a_budget_is_the_same_for_all(self, how: str, together: list[dict[str, Any]]) -> None:
        assert together[0][f"{how}, budget"] == together[1][f"{how}, budget"]

    @pytest.mark.parametrize("how", ["ddp", "fsdp"])
    def test_resumed_they_go_on_alike(self, how: str, together: list[dict[str, Any]]) -> None:
        assert all(found[f"{how}, resumed"] for found in together)

    def test_a_compiled_model_is_parallel_too(self, together: list[dict[str, Any]]) -> None:
        assert [found["compiled"] for found in together] == [(SIZE, True)] * SIZE

    def test_what_cannot_be_had_is_refused(self, together: list[dict[str, Any]]) -> None:
        refused = together[0]["refusals"]
        assert "takes 'finite_difference'" in refused["jvp"]
        assert "Leave synchronisation on" in refused["unsynchronised"]
        assert "Call fully_shard(model) on the root too" in refused["half"]


class TestMicroBatches:
    @pytest.mark.parametrize("case", ["reading, sgd", "reading, adam", "clipped", "algorithm 1"])
    @pytest.mark.parametrize("micro", [2, 4])
    def test_several_do_what_one_large_batch_does(self, case: str, micro: int) -> None:
        assert_alike(trained("alone", **CASES[case], micro=micro), trained("alone", **CASES[case]))

    def test_replayed_lessons_are_micro_batches(self) -> None:
        found = trained("alone", **CASES["replay"], micro=2)
        assert all(value.isfinite().all() for value in found["scorer"].values())

    def test_uniform_mix_is_refused(self) -> None:
        with pytest.raises(GradsieveError, match="uniform_mix cannot be had with gradient accumulation"):
            trained("alone", **CASES["uniform mix"], micro=2)

    def test_a_batch_that_was_given_up_does_not_count(self) -> None:
        """zero_grad() or no backward at all: the next loss() begins anew."""
        model = network()
        its = OPTIMIZERS["sgd"](model.parameters())
        dds = DDS(model, scorers()["reading"](), losses_of, its, data(1, DEV, 1), seed=0)
        first, second = data(2, BATCH, seed=0)
        dds.loss(first).backward()
        its.zero_grad()
        loss = dds.loss(second)
        weights = example_weights(
            dds.learner.score(second, {}, loss.new_empty(BATCH), ALONE.sizes(BATCH), learning=False).logits
        )
        torch.testing.assert_close(loss, (weights * losses_of(model, second)).sum())

    def test_a_scaler_may_scale(self) -> None:
        """GradScaler: losses times 1024, gradients divided again before the step."""
        found = []
        for enabled in (False, True):
            model = network()
            its = OPTIMIZERS["sgd"](model.parameters())
            dds = DDS(model, scorers()["reading"](), losses_of, its, data(2, DEV, 1), seed=0)
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2, enabled=enabled)
            for batch in data(6, BATCH, seed=0):
                its.zero_grad()
                for number in range(2):
                    scaler.scale(dds.loss(part(batch, number, 2))).backward()
                scaler.unscale_(its)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                scaler.step(its)
                scaler.update()
                dds.step()
            found.append(numbers(model))
            found.append(numbers(dds.scorer))
        assert_alike(found[0], found[2])
        assert_alike(found[1], found[3])

    def test_float16_with_a_scaler_that_skips(self) -> None:
        """The first scale overflows float16: theta and psi stay where they are, then both learn."""
        model = network().float()
        its = torch.optim.SGD(model.parameters(), lr=0.1)
        dev = [tuple(t.float() if t.is_floating_point() else t for t in batch) for batch in data(2, DEV, 1)]
        dds = DDS(model, scorers()["reading"]().float(), losses_of, its, dev, seed=0)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
        before = numbers(model), numbers(dds.scorer)

        def step(batch: Any) -> None:
            its.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = dds.loss(batch)
            scaler.scale(loss).backward()
            scaler.step(its)
            scaler.update()
            dds.step()

        x, y = data(1, BATCH, seed=0)[0]
        with pytest.warns(UserWarning, match="has not run since"):
            step((x.float(), y))
        assert_alike(before[0], numbers(model))
        assert_alike(before[1], numbers(dds.scorer))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # until the scale has come down
            for _ in range(20):
                step((x.float(), y))
        assert scaler.get_scale() < 2.0**24
        assert not all(torch.equal(a, b) for a, b in zip(before[0].values(), numbers(model).values(), strict=True))
        assert not all(torch.equal(a, b) for a, b in zip(before[1].values(), numbers(dds.scorer).values(), strict=True))


class TestJoint:
    @given(st.lists(st.integers(1, 7), min_size=1, max_size=4), st.integers(0, 100), st.sampled_from([0.0, 0.3, 1.0]))
    def test_factors_make_up_for_what_was_not_known(self, sizes: list[int], seed: int, trust: float) -> None:
        chance = torch.Generator().manual_seed(seed)
        joint, so_far = Joint(ALONE, trust=trust), []
        parts = [3 * torch.randn(size, generator=chance, dtype=torch.float64) for size in sizes]
        for logits in parts:
            factor = joint.join(logits, ALONE.sizes(len(logits)))
            so_far = [weights * factor for weights in so_far if factor is not None] + [joint.own_weights()[-1]]
        expected = torch.softmax(trust * torch.cat(parts), 0)
        torch.testing.assert_close(torch.cat(so_far), expected)
        torch.testing.assert_close(torch.cat(joint.own_weights()), expected)
        torch.testing.assert_close(joint.logits(), torch.cat(parts))

    def test_places(self) -> None:
        assert Sizes((3, 4, 5), 1).place == slice(3, 7)
        assert Sizes((3, 4, 5), 2).total == 12


def test_a_model_that_is_not_parallel_is_alone() -> None:
    world = World(network())
    value = torch.randn(4)
    assert (world.size, world.rank, world.sharded) == (1, 0, False)
    assert world.sizes(4) == Sizes((4,), 0)
    assert world.told(7) == 7
    assert torch.equal(world.summed(value), value)
    assert shard_of(value, value) is value
    assert sharded_like(value, value) is value
