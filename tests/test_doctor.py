"""The doctor: a healthy set-up is fine, every planted fault is found, and nothing of the user's changes."""

import copy
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from conftest import Ended
from test_image_sources import make_folder, make_shards, own_cache, table  # noqa: F401
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, Optimizer, RMSprop

from gradsieve import ConvScorer, GradsieveError, MLPScorer, SignalScorer, doctor, like
from gradsieve.checkup import BROKEN, DOUBTFUL, FINE, Diagnosis
from gradsieve.checkup.figures import correlation, cosine, rank_correlation, signal_to_noise

SIZE, CLASSES = 3, 3


def labelled(batch: zoo.Batch) -> zoo.Batch:
    """The same inputs, moved by their labels so that there is something to learn."""
    x, y = batch
    means = torch.randn(CLASSES, *x.shape[1:], generator=torch.Generator().manual_seed(5)).to(x)
    return x + means[y], y


def case(kind: str = "mlp", *, rows: int = 32, dev_rows: int = 64) -> tuple[nn.Module, zoo.Batch, zoo.Batch]:
    model, train = zoo.make(kind, rows, SIZE, CLASSES, dtype=torch.float32)
    _, dev = zoo.make(kind, dev_rows, SIZE, CLASSES, dtype=torch.float32)
    return model, labelled(train), labelled(dev)


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1, momentum=0.9)


def examine(
    loss_fn: Callable[[nn.Module, Any], Any] = zoo.cross_entropy,
    scorer: nn.Module | None = None,
    optimizer: Callable[[nn.Module], Optimizer] = sgd,
    kind: str = "mlp",
    change: Callable[[nn.Module], nn.Module] = lambda model: model,
    **settings: Any,
) -> Diagnosis:
    model, train, dev = case(kind)
    model = change(model)
    return doctor(model, scorer, loss_fn, optimizer(model), train, dev, settings=settings)


def verdicts(diagnosis: Diagnosis) -> dict[str, str]:
    return {finding.name: finding.verdict for finding in diagnosis if finding.verdict != FINE}


class TestHealthy:
    @pytest.mark.parametrize("seed", [0, 1, 2])
    @pytest.mark.parametrize("kind", [*zoo.KINDS, "wrn"])
    @pytest.mark.parametrize("make", [sgd, lambda model: Adam(model.parameters(), lr=1e-3)], ids=["sgd", "adam"])
    def test_all_is_fine(self, kind: str, make: Callable[[nn.Module], Optimizer], seed: int) -> None:
        torch.manual_seed(seed)
        found = examine(kind=kind, optimizer=make)
        assert verdicts(found) == {}, str(found)
        assert found.ok
        names = ["losses", "optimizer", "precision", "rewards", "randomness", "BatchNorm", "dev batch", "scorer"]
        assert [finding.name for finding in found] == [*names, "weights", "overlap", "cost"]
        assert "Nothing is doubtful" in str(found)
        assert found.plain_seconds
        assert found.dds_seconds

    @pytest.mark.parametrize(
        "settings",
        [
            {"reward": "jvp"},
            {"reward": "per_example"},
            {"dev_mode": "eval"},
            {"update_every": 50},
            {"overhead": 0.1},
            {"alignment": "last_layer"},
            {"replay": 8},
        ],
        ids=str,
    )
    def test_other_settings(self, settings: dict[str, Any]) -> None:
        found = examine(**settings)
        assert verdicts(found) == {}, str(found)
        name, value = next(iter(settings.items()))
        assert (f"{name}={value}" in found["cost"].seen) == (name in ("update_every", "overhead"))

    def test_every_scorer(self) -> None:
        model, train, dev = case("cnn-train")
        for scorer in (SignalScorer(), like(model), ConvScorer(SIZE, CLASSES), MLPScorer(SIZE * 25)):
            found = doctor(model, scorer, zoo.cross_entropy, sgd(model), train, dev)
            assert verdicts(found) == {}, str(found)

    def test_autocast(self) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            found = examine(kind="cnn-train")
        assert verdicts(found) == {}, str(found)
        assert "the forward pass in bfloat16, rewards in float32" in found["precision"].seen

    def test_an_optimizer_of_ones_own(self) -> None:
        class Own(Optimizer):
            def __init__(self, parameters: Any, lr: float):
                super().__init__(parameters, {"lr": lr})
                self.scale = 0.5

            @torch.no_grad()
            def step(self) -> None:  # type: ignore[override]
                for group in self.param_groups:
                    for p in group["params"]:
                        p -= self.scale * group["lr"] * p.grad

        assert verdicts(examine(optimizer=lambda m: Own(m.parameters(), 0.1), optimizer_aware=False)) == {}
        assert verdicts(examine(optimizer=lambda m: Own(m.parameters(), 0.1))) == {"optimizer": DOUBTFUL}

    def test_a_batch_that_is_a_dictionary(self) -> None:
        model, (x, y), (dev_x, dev_y) = case()

        def loss_fn(model: nn.Module, batch: dict[str, Any]) -> Tensor:
            return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")

        train, dev = {"x": x, "y": y, "names": ["a"] * 32}, {"x": dev_x, "y": dev_y, "names": ["b"] * 64}
        assert verdicts(doctor(model, None, loss_fn, sgd(model), train, dev)) == {}


class Detached(nn.Module):
    def __init__(self, body: nn.Module):
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).detach()


class Noisy(Detached):
    """Random numbers that torch does not know of."""

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x + 0.1 * torch.from_numpy(np.random.standard_normal(x.shape)).to(x))


class HalfInside(Detached):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.body(x)


class Bias(nn.Module):
    """The same score for every example, whatever it learns."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, batch: zoo.Batch) -> Tensor:
        return self.bias.expand(len(batch[1]))


class Silent(Bias):
    def forward(self, batch: zoo.Batch) -> Tensor:
        return (batch[0].flatten(1).sum(1) * self.bias).detach()


class Loud(nn.Module):
    """Scores that are far apart from the start."""

    def __init__(self, factor: float):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    def forward(self, batch: zoo.Batch) -> Tensor:
        return self.factor * batch[0].sum(1)


def mean_loss(model: nn.Module, batch: zoo.Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def half(model: nn.Module) -> nn.Module:
    return model.half()


def half_loss(model: nn.Module, batch: zoo.Batch) -> Tensor:
    return F.cross_entropy(model(batch[0].to(next(model.parameters()).dtype)), batch[1], reduction="none")


FAULTS = {
    "mean": ({"loss_fn": mean_loss}, "losses", BROKEN, "reduction='none'"),
    "repeated mean": ({"loss_fn": lambda m, b: mean_loss(m, b).expand(len(b[1]))}, "losses", BROKEN, "one number"),
    "no tensor": ({"loss_fn": lambda m, b: [0.0] * len(b[1])}, "losses", BROKEN, "not list"),
    "detached": ({"change": Detached}, "losses", BROKEN, "carry no gradient"),
    "no_grad": ({"loss_fn": torch.no_grad()(zoo.cross_entropy)}, "losses", BROKEN, "carry no gradient"),
    "not finite": ({"loss_fn": lambda m, b: zoo.cross_entropy(m, b) / 0}, "losses", BROKEN, "32 of 32"),
    "fails": ({"loss_fn": lambda m, b: m(b)}, "losses", BROKEN, "fails with TypeError"),
    "half": ({"change": half, "loss_fn": half_loss}, "precision", BROKEN, "rounded away"),
    "half inside": ({"change": HalfInside}, "rewards", BROKEN, "bfloat16"),
    "underflow": (
        {"change": half, "loss_fn": lambda m, b: 1e-7 * half_loss(m, b), "reward": "jvp"},
        "precision",
        BROKEN,
        "underflows to zero",
    ),
    "coarse": ({"loss_fn": lambda m, b: zoo.cross_entropy(m, b) + 1e6}, "rewards", BROKEN, "vanish"),
    "unknown optimizer": (
        {"optimizer": lambda m: RMSprop(m.parameters(), lr=1e-3)},
        "optimizer",
        DOUBTFUL,
        "g' of RMSprop",
    ),
    "amsgrad": ({"optimizer": lambda m: Adam(m.parameters(), amsgrad=True)}, "optimizer", DOUBTFUL, "amsgrad"),
    "foreign optimizer": ({"optimizer": lambda m: sgd(copy.deepcopy(m))}, "optimizer", BROKEN, "holds none"),
    "part of the model": ({"optimizer": lambda m: SGD(m[0].parameters(), 0.1)}, "optimizer", DOUBTFUL, "2 of 4"),
    "no learning rate": ({"optimizer": lambda m: SGD(m.parameters(), 0.0)}, "optimizer", BROKEN, "is 0"),
    "no parameters": ({"scorer": nn.Flatten()}, "scorer", BROKEN, "no parameter"),
    "constant": ({"scorer": Bias()}, "scorer", BROKEN, "is constant"),
    "silent": ({"scorer": Silent()}, "scorer", BROKEN, "carry no gradient"),
    "wrong shape": ({"scorer": MLPScorer(SIZE).body}, "scorer", BROKEN, "fails"),
    "saturated": ({"scorer": Loud(20.0)}, "scorer", DOUBTFUL, "beyond the bound"),
    "collapse": ({"scorer": Loud(1000.0), "max_logit": None}, "weights", BROKEN, "collapse"),
    "numpy's randomness": ({"change": Noisy}, "randomness", BROKEN, "differ by up to"),
    "coupled losses": (
        {"loss_fn": lambda m, b: zoo.cross_entropy(m, b) * (1 + b[0].mean())},
        "BatchNorm",
        DOUBTFUL,
        "half of the batch gone",
    ),
    "half detached": (
        {"loss_fn": lambda m, b: F.cross_entropy(m[3](m[:3](b[0]).detach()), b[1], reduction="none")},
        "losses",
        DOUBTFUL,
        "2 of 4 trainable tensors get none (0.weight, 0.bias)",
    ),
    "wrong setting": ({"epsilon": 0.0}, "set-up", BROKEN, "epsilon must be above 0"),
}


class TestFaults:
    @pytest.mark.parametrize("seed", [0, 1])
    @pytest.mark.parametrize("fault", FAULTS)
    def test_it_is_found(self, fault: str, seed: int) -> None:
        torch.manual_seed(seed)
        arguments, name, verdict, text = FAULTS[fault]
        found = examine(**copy.deepcopy(arguments))
        finding = found[name]
        assert finding.verdict == verdict, str(found)
        assert text in f"{finding.seen} {finding.advice}"
        assert finding.advice or verdict == BROKEN
        assert found.ok == (verdict != BROKEN), str(found)
        assert finding.verdict in str(found)

    def test_a_dev_batch_inside_the_training_batch(self) -> None:
        model, train, dev = case()
        inside = (torch.cat([train[0][:20], dev[0][:4]]), torch.cat([train[1][:20], dev[1][:4]]))
        found = doctor(model, None, zoo.cross_entropy, sgd(model), train, inside)
        assert "20 of 24 examples of the dev batch (83%)" in found["overlap"].seen
        assert verdicts(found) == {"overlap": BROKEN}
        mostly_new = (torch.cat([train[0][:2], dev[0]]), torch.cat([train[1][:2], dev[1]]))
        assert verdicts(doctor(model, None, zoo.cross_entropy, sgd(model), train, mostly_new)) == {"overlap": DOUBTFUL}

    def test_under_no_grad(self) -> None:
        with torch.no_grad():
            assert "no_grad" in examine()["losses"].seen

    def test_a_model_of_the_loss_functions_own(self) -> None:
        model, train, dev = case("cnn-train")
        before = zoo.fingerprint(model)
        found = doctor(model, None, lambda _, batch: zoo.cross_entropy(model, batch), sgd(model), train, dev)
        assert "must use the model that it is given" in found["losses"].advice
        assert zoo.differences(before, zoo.fingerprint(model)) == []

    def test_one_example(self) -> None:
        model, (x, y), dev = case()
        found = doctor(model, None, zoo.cross_entropy, sgd(model), (x[:1], y[:1]), dev)
        assert found["losses"].verdict == BROKEN
        assert "always 1" in found["losses"].seen

    def test_dev_batches_that_are_too_small(self) -> None:
        model, train, (x, y) = case()
        few = doctor(model, None, zoo.cross_entropy, sgd(model), train, (x[:2], y[:2]))
        assert "too few" in few["dev batch"].seen
        some = doctor(model, None, zoo.cross_entropy, sgd(model), train, (x[:8], y[:8]))
        assert some["dev batch"].verdict == FINE
        assert "reward-to-noise ratio" in some["dev batch"].seen

    def test_a_head_of_zeros_is_no_fault(self) -> None:
        def zeroed(model: nn.Module) -> nn.Module:
            nn.init.zeros_(model[3].weight)  # type: ignore[index]
            nn.init.zeros_(model[3].bias)  # type: ignore[index]
            return model

        assert verdicts(examine(change=zeroed)) == {}

    def test_batchnorm_of_few_examples_or_of_no_data_yet(self) -> None:
        model, (x, y), (dev_x, dev_y) = case("cnn-train")
        few = doctor(model, None, zoo.cross_entropy, sgd(model), (x, y), (dev_x[:4], dev_y[:4]))
        assert few["BatchNorm"].verdict == DOUBTFUL
        assert "Statistics of 4 examples" in few["BatchNorm"].seen
        model[1].running_var.fill_(1e4)  # type: ignore[index]
        model[1].running_mean.fill_(1e3)  # type: ignore[index]
        settings = {"dev_mode": "eval"}
        stale = doctor(model, None, zoo.cross_entropy, sgd(model), (x, y), (dev_x, dev_y), settings=settings)
        assert stale["BatchNorm"].verdict == DOUBTFUL
        assert "dev_mode='train'" in stale["BatchNorm"].advice

    def test_a_scorer_that_shares_the_models_parameters(self) -> None:
        model, train, dev = case()
        scorer = MLPScorer(SIZE)
        scorer.body[1] = model[0]  # type: ignore[index]
        found = doctor(model, scorer, zoo.cross_entropy, sgd(model), train, dev)
        assert found["set-up"].verdict == BROKEN
        assert "share parameters" in found["set-up"].seen

    def test_a_warm_up_that_begins_at_0(self) -> None:
        def warm(model: nn.Module) -> Optimizer:
            optimizer = sgd(model)
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: t / 100)
            return optimizer

        assert verdicts(examine(optimizer=warm)) == {}

    def test_what_cannot_be_examined_is_refused(self) -> None:
        with pytest.raises(GradsieveError, match=r"arguments of DDS: .*colour"):
            examine(colour="red")
        with pytest.raises(GradsieveError, match="leave the sampler out"):
            examine(sampler=object())

        class Single(nn.Linear):
            def __deepcopy__(self, memo: Any) -> nn.Module:
                raise RuntimeError("there is only one of me")

        with pytest.raises(GradsieveError, match=r"copy\.deepcopy fails here .*only one of me"):
            examine(change=lambda _: Single(SIZE, CLASSES))


def state(*objects: Any) -> Iterator[Any]:
    """All tensors and values of state_dicts."""
    for each in objects:
        if isinstance(each, dict):
            yield from state(*each.values())
        elif isinstance(each, list | tuple):
            yield from state(*each)
        else:
            yield each.detach().clone() if isinstance(each, Tensor) else each


@pytest.mark.parametrize("kind", zoo.KINDS)
def test_nothing_of_the_users_changes(kind: str) -> None:
    model, train, dev = case(kind)
    scorer = like(model)
    optimizer, scorer_optimizer = Adam(model.parameters()), Adam(scorer.parameters())
    zoo.cross_entropy(model, train).mean().backward()
    optimizer.step()  # there are moments, and gradients that wait

    def everything() -> list[Any]:
        torch_state = [optimizer.state_dict(), scorer_optimizer.state_dict(), train, dev, torch.get_rng_state()]
        return [*state(torch_state), random.getstate(), np.random.get_state()[1].tolist()]  # type: ignore[union-attr]

    before, also, rest = zoo.fingerprint(model), zoo.fingerprint(scorer), everything()
    hooks = len(optimizer._optimizer_step_post_hooks)
    settings = {"scorer_optimizer": scorer_optimizer}
    assert doctor(model, scorer, zoo.cross_entropy, optimizer, train, dev, settings=settings).ok
    assert zoo.differences(before, zoo.fingerprint(model)) == []
    assert zoo.differences(also, zoo.fingerprint(scorer)) == []
    for old, new in zip(rest, everything(), strict=True):
        assert torch.equal(old, new) if isinstance(old, Tensor) else old == new
    assert len(optimizer._optimizer_step_post_hooks) == hooks


def flat(output: str) -> str:
    """A table's text without its lines and breaks."""
    return " ".join(output.replace("│", " ").split())


class TestCommand:
    def test_a_recipe_that_is_well(self, call: Callable[..., Ended]) -> None:
        result = call("doctor", "digits-noisy")
        assert result.code == 0, result
        for text in ("digits-noisy, dds", "none of 100 pictures of dev", "of 10 classes", "1,500 steps: about"):
            assert text in flat(result.out)
        assert result.out.endswith("DDS can work. Nothing is doubtful.\n")

    @pytest.mark.parametrize("form", ["folder", "shards", "table"])
    def test_a_dev_set_inside_the_training_set(self, form: str, call: Callable[..., Ended], tmp_path: Path) -> None:
        data = tmp_path / "data"
        if form == "folder":
            make_folder(data, train=(20, 20), test=(4, 4))
            shutil.copytree(data / "train", data / "dev")
        elif form == "shards":
            make_shards(data, 8, test="test-{:04}.tar")
            shutil.copy(data / "train-0003.tar", data / "dev-0000.tar")
        else:
            data.mkdir()
            table([0, 1, 2] * 8).to_parquet(data / "train.parquet")
            table([0, 1, 2] * 4, 3).to_parquet(data / "dev.parquet")
            table([0, 1, 2], 80).to_parquet(data / "test.parquet")
        settings = ("data.size=8", "model.name=small-cnn", "batch_size=16", "dev_batch_size=12", "data.workers=0")
        options = [part for key in settings for part in ("--set", key)]
        result = call("doctor", "images", "--data", str(data), *options)
        assert result.code == 1, result
        count = {"folder": 40, "shards": 3, "table": 12}[form]
        assert f"{count} of {count} pictures of dev (100%) also stand in the training set" in flat(result.out)
        assert "Broken: overlap" in result.out

    def test_a_class_that_dev_lacks(self, call: Callable[..., Ended], tmp_path: Path) -> None:
        make_folder(tmp_path / "data", train=(20, 20), dev=(5,), test=(4, 4))
        settings = ("data.size=8", "model.name=small-cnn", "batch_size=16", "data.workers=0")
        options = [part for key in settings for part in ("--set", key)]
        result = call("doctor", "images", "--data", str(tmp_path / "data"), *options)
        assert "dev has none of b (1)" in flat(result.out)

    def test_a_model_of_ones_own_that_cannot_work(self, call: Callable[..., Ended], tmp_path: Path) -> None:
        (tmp_path / "sick.py").write_text(
            "import torch\n"
            "from torch import nn\n"
            "class Low(nn.Sequential):\n"
            "    def forward(self, x):\n"
            "        with torch.autocast('cpu', torch.bfloat16):\n"
            "            return super().forward(x)\n"
            "def low(n): return Low(nn.Flatten(), nn.Linear(64, n))\n"
        )
        result = call("doctor", "digits", "--set", "model.name=sick:low")
        assert result.code == 1, result
        assert "reward='jvp'" in flat(result.out)
        assert call("doctor", "digits", "--set", "model.name=sick:low", "--set", "dds.reward=jvp").code == 0

    def test_languages(self, call: Callable[..., Ended], text: Path) -> None:
        settings = ("steps=300", "batch_words=60", "pool=20", "data.pieces=60", "model.hidden=8", "model.embedding=8")
        options = [part for key in (*settings, "dds.items_between=100") for part in ("--set", key)]
        result = call("doctor", "translation", "--data", str(text), *options)
        assert result.code == 0, result
        for seen in (
            "English sentences have sources in several languages",
            "agree with those of az",
            "none of 8 sentence",
        ):
            assert seen in flat(result.out)
        rare = call("doctor", "translation", "--data", str(text), *options, "--set", "dds.items_between=100000")
        assert rare.code == 1
        assert "lower dds.items_between" in flat(rare.out)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("digit",), "did you mean digits"),
            (("digits", "--method", "uniform"), "uniform has no scorer"),
            (("digits", "--method", "magic"), "unknown method 'magic'"),
            (("cifar10-4k",), "needs CIFAR-10"),
            (("translation-demo", "--method", "tcs"), "tcs has no scorer"),
        ],
    )
    def test_bad_input(self, arguments: tuple[str, ...], message: str, call: Callable[..., Ended]) -> None:
        result = call("doctor", *arguments)
        assert result.code == 2
        assert message in result.err


class TestFigures:
    def test_correlations(self) -> None:
        a, b = torch.randn(50), torch.randn(50)
        assert correlation(a, b) == pytest.approx(float(torch.corrcoef(torch.stack([a, b]))[0, 1]), abs=1e-6)
        assert rank_correlation(a, a.exp()) == pytest.approx(1)
        assert correlation(a, torch.ones(50)) == 0
        assert rank_correlation(torch.zeros(50), torch.arange(50)) == 0  # whatever order a sort leaves equals in
        assert cosine({"w": a, "c": b}, {"w": a}) == pytest.approx(float(a.norm() / torch.cat([a, b]).norm()), abs=1e-6)

    def test_signal_to_noise_finds_what_was_put_in(self) -> None:
        signal, noise = torch.randn(20_000), torch.randn(16, 20_000)
        ratio, least, most = signal_to_noise(signal + 2 * noise)  # of the mean of 16: signal 1, noise 1/2
        assert ratio == pytest.approx(2, abs=0.1)
        assert least < ratio < most
        assert signal_to_noise(noise)[0] < 0.3
        assert signal_to_noise(torch.zeros(4, 5))[:2] == (0, 0)

    @pytest.mark.parametrize("true", [0.0, 1.0, 3.0])
    @pytest.mark.parametrize("directions", [2, 9])
    def test_its_interval_holds_the_truth_nine_times_in_ten(self, true: float, directions: int) -> None:
        """Noise in few directions, one of which may be the signal's: what one dev batch is."""
        held = 0
        for _ in range(200):
            basis = torch.linalg.qr(torch.randn(64, directions)).Q  # (B, d)
            signal = torch.randn(directions)
            signal = true * signal * (directions**0.5 / signal.norm())
            parts = (signal + 4 * torch.randn(16, directions)) @ basis.T  # of the mean of 16: noise 1 a direction
            _, least, most = signal_to_noise(parts)
            held += least <= true <= most
        assert held >= 160  # 180 are promised; the quantiles are approximate
