"""Rewards from activations against the slow oracle, and the other options that make a step cheaper."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam

from gradsieve import DDS, GradsieveError, SignalScorer, StepRecord, like
from gradsieve.networks import ConvScorer, MLPScorer

CPU = torch.device("cpu")
Batch = tuple[Tensor, Tensor]


def losses_of(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.mix, self.head = (
            nn.Embedding(9, 6),
            nn.LayerNorm(6),
            nn.Linear(6, 6),
            nn.Linear(6, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.words(x))
        return self.head((h + self.mix(self.mix(h)).relu()).mean(1))  # one layer twice


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(3, 6), nn.Linear(6, 3)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.words(x).tanh().mean(1))


def image_net(norm: nn.Module) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, stride=2),
        norm,
        nn.Tanh(),
        nn.Conv2d(4, 4, 3, groups=2),
        nn.Flatten(),
        nn.Linear(16, 3),
    )


MODELS = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3, bias=False)),
        lambda n: torch.randn(n, 5),
    ),
    "convolutions": (lambda: image_net(nn.GroupNorm(2, 4)), lambda n: torch.randn(n, 2, 8, 8)),
    "BatchNorm at rest": (lambda: image_net(nn.BatchNorm2d(4).eval()), lambda n: torch.randn(n, 2, 8, 8)),
    "words": (Words, lambda n: torch.randint(9, (n, 4))),
    "tied": (Tied, lambda n: torch.randint(3, (n, 4))),
}


def records(kind: str, reward: str, steps: int = 3, micro: int = 1, **options: object) -> list[StepRecord]:
    torch.manual_seed(0)
    make, inputs = MODELS[kind]
    model = make().double()
    optimizer = Adam(model.parameters(), lr=0.01)

    def batch(size: int) -> Batch:
        x = inputs(size)
        return (x.double() if x.is_floating_point() else x), torch.randint(3, (size,))

    dds = DDS(model, SignalScorer().double(), losses_of, optimizer, [batch(5)], seed=0, reward=reward, **options)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(micro):
            dds.loss(batch(6)).backward()
        optimizer.step()
        record = dds.step()
        assert record is not None
        assert record.skipped is None
        found.append(record)
    return found


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("micro", [1, 2])
def test_they_are_the_gradients_agreement_with_dev(kind: str, micro: int) -> None:
    expected = records(kind, "per_example", micro=micro, alignment="last_layer")
    found = records(kind, "activations", micro=micro, alignment="last_layer")
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.rewards, b.rewards, rtol=1e-8, atol=1e-12)
        torch.testing.assert_close(a.weights, b.weights)


def test_under_batchnorm_the_total_is_the_same_and_divided_otherwise() -> None:
    found = []
    for reward in ("activations", "per_example"):
        torch.manual_seed(0)
        model = image_net(nn.BatchNorm2d(4)).double()
        optimizer = SGD(model.parameters(), lr=0.1)
        dev = (torch.randn(5, 2, 8, 8).double(), torch.randint(3, (5,)))
        batch = (torch.randn(6, 2, 8, 8).double(), torch.randint(3, (6,)))
        dds = DDS(model, SignalScorer().double(), losses_of, optimizer, [dev], seed=0, reward=reward)
        dds.loss(batch).backward()
        optimizer.step()
        before = {name: b.clone() for name, b in model.named_buffers()}
        record = dds.step()
        assert record is not None
        assert record.rewards is not None
        assert all(torch.equal(b, before[name]) for name, b in model.named_buffers())
        found.append(record)
    a, b = found
    assert not torch.allclose(a.rewards, b.rewards, rtol=1e-3)
    torch.testing.assert_close((a.weights * a.rewards).sum(), (b.weights * b.rewards).sum())


def test_layers_that_it_does_not_know_are_named() -> None:
    model = nn.LSTM(3, 4)
    with pytest.raises(GradsieveError, match="is a LSTM: use reward='finite_difference'"):
        DDS(model, MLPScorer(3), losses_of, SGD(model.parameters(), lr=0.1), [0], reward="activations")


def test_the_running_average_of_the_dev_gradient() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    optimizer = SGD(model.parameters(), lr=0.0)  # theta stays, so that dev gradients can be averaged by hand
    dev = [(torch.randn(5, 4).double(), torch.randint(3, (5,))) for _ in range(3)]
    dds = DDS(model, SignalScorer().double(), losses_of, optimizer, dev, seed=0, dev_average=0.6, optimizer_aware=False)
    expected = torch.zeros(3, 4).double()
    for number, part in enumerate(dev):
        optimizer.zero_grad()
        dds.loss(dev[0]).backward()
        optimizer.step()
        dds.step()
        (gradient,) = torch.autograd.grad(losses_of(model, part).mean(), [model.weight])
        expected = gradient if number == 0 else 0.6 * expected + 0.4 * gradient
        torch.testing.assert_close(dds.agreement.direction["weight"], expected)
    again = DDS(model, SignalScorer().double(), losses_of, optimizer, dev, dev_average=0.6)
    again.load_state_dict(dds.state_dict())
    assert torch.equal(again._d_theta["weight"], dds._d_theta["weight"])


def test_a_scorer_in_bfloat16_scores_nearly_alike_and_learns() -> None:
    found = [records("convolutions", "finite_difference", scorer_precision=p) for p in ("float32", "bfloat16")]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a.weights, b.weights, rtol=0.02, atol=0.01)
    with pytest.raises(GradsieveError, match="scorer_precision must be one of"):
        records("mlp", "finite_difference", scorer_precision="int8")


@pytest.mark.parametrize("kind", ["conv", "like"])
def test_a_scorer_may_see_a_smaller_image(kind: str) -> None:
    shrunk: list[tuple[int, ...]] = []
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10))
    scorer = ConvScorer(3, 10, shrink=2) if kind == "conv" else like(model, shrink=2)
    scorer.body[0].register_forward_pre_hook(lambda _, inputs: shrunk.append(tuple(inputs[0].shape)))  # type: ignore[index]
    assert scorer((torch.randn(2, 3, 16, 16), torch.tensor([1, 2]))).shape == (2,)
    assert shrunk == [(2, 3, 8, 8)]


def steps_with(reward: str, *, scale: float = 1.0, thawed: bool = False, **options: object) -> Tensor:
    """Rewards of the third step; the first layer may be frozen until then."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    optimizer, batch = SGD(model.parameters(), lr=0.1), (torch.randn(6, 5).double(), torch.randint(3, (6,)))
    model[0].requires_grad_(not thawed)
    dds = DDS(model, SignalScorer().double(), losses_of, optimizer, [batch], seed=0, reward=reward, **options)
    for step in range(3):
        model[0].requires_grad_(not thawed or step == 2)
        optimizer.zero_grad()
        (dds.loss(batch) * scale).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= scale
        optimizer.step()
        record = dds.step()
    assert record is not None
    return record.rewards


@pytest.mark.parametrize("how", [{"scale": 1024.0}, {"thawed": True}])
def test_a_scaled_loss_and_a_thawed_layer(how: dict[str, Any]) -> None:
    torch.testing.assert_close(steps_with("activations", **how), steps_with("per_example", **how))


def test_an_unknown_layer_that_is_thawed_is_refused() -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.PReLU(), nn.Linear(7, 3))
    model[1].requires_grad_(False)
    batch = (torch.randn(6, 5), torch.randint(3, (6,)))
    dds = DDS(model, None, losses_of, SGD(model.parameters(), lr=0.1), [batch], reward="activations")
    dds.loss(batch)
    model[1].requires_grad_(True)
    with pytest.raises(GradsieveError, match="1 is a PReLU"):
        dds.loss(batch)


def test_a_copy_of_the_model_is_not_listened_to() -> None:
    """A teacher within the loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    batch = (torch.randn(6, 5), torch.randint(3, (6,)))
    teachers: list[nn.Module] = []

    def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
        return losses_of(model, batch) + sum(0 * losses_of(teacher, batch) for teacher in teachers)

    optimizer = SGD(model.parameters(), lr=0.1)
    dds = DDS(model, None, loss_fn, optimizer, [batch], reward="activations", alignment="last_layer")
    teachers.append(copy.deepcopy(model))
    for _ in range(2):
        optimizer.zero_grad()
        dds.loss(batch).backward()
        optimizer.step()
        record = dds.step()
    assert record is not None
    assert record.skipped is None
