"""Equations 2 and 7: every estimator against brute force."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from zoo import KINDS, Batch, cross_entropy, differences, fingerprint, make, mlp, random_direction

from gradsieve import GradsieveError, alignment
from gradsieve.images.models import WideResNet


def brute_force(model: nn.Module, batch: Batch, direction: dict[str, Tensor]) -> Tensor:
    """One whole forward and backward per example, dropout masks replayed: written without gradsieve."""
    state, result = torch.get_rng_state(), []
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    for i in range(len(batch[1])):
        torch.set_rng_state(state)
        model.zero_grad()
        cross_entropy(model, batch)[i].backward()
        result.append(sum((p.grad * direction[n]).sum() for n, p in model.named_parameters() if p.grad is not None))
    torch.set_rng_state(state)
    model.zero_grad()
    for n, b in model.named_buffers():
        b.copy_(buffers[n])
    return torch.stack(result)


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def rank_correlation(a: Tensor, b: Tensor) -> float:
    ranks = torch.stack([a, b]).argsort(1).argsort(1).double()
    return float(torch.corrcoef(ranks)[0, 1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("estimator", ["jvp", "per_example"])
@given(rows=st.integers(2, 9), size=st.integers(1, 5), classes=st.integers(2, 5), seed=st.integers(0, 9))
def test_exact_estimators_equal_brute_force(
    kind: str, estimator: str, rows: int, size: int, classes: int, seed: int
) -> None:
    torch.manual_seed(seed)
    model, batch = make(kind, rows, size, classes)
    direction = random_direction(model)
    expected = brute_force(model, batch, direction)
    found = alignment(model, cross_entropy, batch, direction, estimator=estimator)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_jvp_in_float32_sees_the_same_dropout_masks(kind: str) -> None:
    """Single precision takes other kernels (oneDNN's LSTM, fused attention), which must not draw other masks."""
    model, batch = make(kind, 16, 4, 3, dtype=torch.float32)
    direction = random_direction(model)
    assert relative(alignment(model, cross_entropy, batch, direction), brute_force(model, batch, direction)) < 1e-4


@pytest.mark.parametrize("activation", [nn.GELU, nn.Tanh])
@given(seed=st.integers(0, 20), rows=st.integers(8, 40))
def test_finite_difference_in_float32_on_smooth_models(activation: type[nn.Module], seed: int, rows: int) -> None:
    torch.manual_seed(seed)
    model = mlp(10, 4, 32, activation)
    batch = (torch.randn(rows, 10), torch.randint(4, (rows,)))
    direction = dev_gradient(model, batch)
    exact = alignment(model, cross_entropy, batch, direction)
    assert relative(alignment(model, cross_entropy, batch, direction, estimator="finite_difference"), exact) < 1e-3


@pytest.mark.parametrize("steps", [0, 10])
def test_finite_difference_in_float32_on_a_batchnorm_network(steps: int) -> None:
    model = WideResNet(16, 1)
    batch = (torch.randn(64, 3, 16, 16), torch.randint(10, (64,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(model, batch).mean().backward()
        optimizer.step()
    direction = dev_gradient(model, (torch.randn(64, 3, 16, 16), torch.randint(10, (64,))))
    exact = alignment(model, cross_entropy, batch, direction)
    found = alignment(model, cross_entropy, batch, direction, estimator="finite_difference")
    assert relative(found, exact) < 0.05
    assert rank_correlation(found, exact) > 0.99


def test_finite_difference_error_is_proportional_to_epsilon_in_float64() -> None:
    model = mlp(10, 4, 32, nn.Tanh).double()
    batch = (torch.randn(20, 10).double(), torch.randint(4, (20,)))
    direction = random_direction(model)
    exact = alignment(model, cross_entropy, batch, direction)
    errors = [
        relative(alignment(model, cross_entropy, batch, direction, estimator="finite_difference", epsilon=e), exact)
        for e in (1e-2, 1e-3, 1e-4, 1e-5)
    ]
    for larger, smaller in pairwise(errors):
        assert larger / smaller == pytest.approx(10, rel=0.2)


@given(scale=st.floats(1e-6, 1e6))
def test_finite_difference_does_not_depend_on_the_length_of_the_direction(scale: float) -> None:
    torch.manual_seed(0)
    model = mlp(10, 4, 32, nn.Tanh)
    batch = (torch.randn(20, 10), torch.randint(4, (20,)))
    direction = random_direction(model)
    once = alignment(model, cross_entropy, batch, direction, estimator="finite_difference")
    longer = {n: scale * v for n, v in direction.items()}
    scaled = alignment(model, cross_entropy, batch, longer, estimator="finite_difference")
    assert relative(scaled / scale, once) < 5e-3


@pytest.mark.parametrize("estimator", ["finite_difference", "jvp", "per_example"])
def test_a_direction_of_zero_gives_rewards_of_zero(estimator: str) -> None:
    model, batch = make("cnn-train", 5, 2, 3)
    zero = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    for direction in (zero, {}):
        assert torch.equal(
            alignment(model, cross_entropy, batch, direction, estimator=estimator), torch.zeros(5).double()
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("estimator", ["finite_difference", "jvp", "per_example"])
def test_alignment_leaves_no_trace(kind: str, estimator: str) -> None:
    model, batch = make(kind, 6, 3, 3)
    direction = random_direction(model)
    cross_entropy(model, batch).mean().backward()
    before = fingerprint(model)
    alignment(model, cross_entropy, batch, direction, estimator=estimator)
    assert differences(before, fingerprint(model)) == []


def test_alignment_leaves_no_trace_when_the_loss_fails() -> None:
    model, batch = make("cnn-train", 6, 2, 3)
    direction = random_direction(model)
    before = fingerprint(model)

    def failing(model: nn.Module, batch: Batch) -> Tensor:
        cross_entropy(model, batch)
        raise KeyError("from the user's loss")

    with pytest.raises(KeyError):
        alignment(model, failing, batch, direction, estimator="finite_difference")
    assert differences(before, fingerprint(model)) == []


def test_cosine_is_the_dot_product_over_both_norms() -> None:
    model, batch = make("mlp", 5, 4, 3)
    model.eval()
    direction = random_direction(model)
    found = alignment(model, cross_entropy, batch, direction, estimator="per_example", cosine=True)
    v = torch.cat([d.flatten() for d in direction.values()])
    for i, cosine in enumerate(found):
        gradients = torch.autograd.grad(cross_entropy(model, batch)[i], list(model.parameters()))
        expected = F.cosine_similarity(torch.cat([g.flatten() for g in gradients]), v, dim=0)
        torch.testing.assert_close(cosine, expected)


def test_frozen_parameters_and_partial_directions() -> None:
    model, batch = make("mlp", 5, 4, 3)
    model[0].weight.requires_grad_(False)  # type: ignore[index]
    direction = {"3.bias": torch.randn(3).double()}
    expected = alignment(model, cross_entropy, batch, direction, estimator="per_example")
    torch.testing.assert_close(alignment(model, cross_entropy, batch, direction), expected)


def test_tied_weights_count_twice() -> None:
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    model = nn.Sequential(first, nn.Tanh(), second).double()
    batch = (torch.randn(5, 4).double(), torch.randint(4, (5,)))
    direction = random_direction(model)
    expected = brute_force(model, batch, direction)
    for estimator in ("jvp", "per_example"):
        torch.testing.assert_close(alignment(model, cross_entropy, batch, direction, estimator=estimator), expected)


def test_compiled_models_work_with_finite_differences() -> None:
    model = mlp(6, 3, 8, nn.Tanh).double().eval()
    batch = (torch.randn(7, 6).double(), torch.randint(3, (7,)))
    direction = random_direction(model)
    exact = alignment(model, cross_entropy, batch, direction)
    compiled = torch.compile(model, backend="eager")
    named = {f"_orig_mod.{n}": v for n, v in direction.items()}
    found = alignment(compiled, cross_entropy, batch, named, estimator="finite_difference", epsilon=1e-6)
    assert relative(found, exact) < 1e-5


def dev_gradient(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    found = torch.autograd.grad(cross_entropy(model, batch).mean(), list(model.parameters()))
    return dict(zip([n for n, _ in model.named_parameters()], found, strict=True))


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        return 2 * g * ctx.saved_tensors[0]


def custom_square(model: nn.Module, batch: Batch) -> Tensor:
    return _Square.apply(model(batch[0])).sum(1)


def no_forward_mode(model: nn.Module, batch: Batch) -> Tensor:
    return torch.ops.aten._pdist_forward(model(batch[0])).sum() + cross_entropy(model, batch)


@pytest.mark.parametrize(
    ("loss_fn", "name"), [(custom_square, "custom autograd.Function"), (no_forward_mode, "_pdist")]
)
def test_jvp_names_the_operator_that_stands_in_its_way(loss_fn, name: str) -> None:  # type: ignore[no-untyped-def]
    model, batch = make("mlp", 5, 4, 3)
    direction = random_direction(model)
    before = fingerprint(model)
    with pytest.raises(GradsieveError, match=f"{name}.*'finite_difference'"):
        alignment(model, loss_fn, batch, direction, estimator="jvp")
    assert differences(before, fingerprint(model)) == []


def test_bad_arguments_are_named() -> None:
    model, batch = make("mlp", 5, 4, 3)
    good = random_direction(model)
    with pytest.raises(GradsieveError, match=r"'exact'.*finite_difference, jvp, per_example"):
        alignment(model, cross_entropy, batch, good, estimator="exact")
    with pytest.raises(GradsieveError, match=r"cosine.*'per_example'"):
        alignment(model, cross_entropy, batch, good, cosine=True)
    with pytest.raises(GradsieveError, match="'nowhere'"):
        alignment(model, cross_entropy, batch, {"nowhere": torch.zeros(1)})
    with pytest.raises(GradsieveError, match=r"3\.bias.*\(7,\).*\(3,\)"):
        alignment(model, cross_entropy, batch, {"3.bias": torch.zeros(7)})
    with pytest.raises(GradsieveError, match="one loss per example"):
        alignment(model, lambda m, b: cross_entropy(m, b).mean(), batch, good)
    half = mlp().bfloat16()
    with pytest.raises(GradsieveError, match=r"bfloat16.*'jvp'"):
        alignment(half, cross_entropy, batch, random_direction(half), estimator="finite_difference")
