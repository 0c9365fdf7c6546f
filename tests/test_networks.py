"""The ready-made scorers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from zoo import cnn, mlp

from gradsieve import ConvScorer, GradsieveError, MLPScorer, SignalScorer, like
from gradsieve.images.models import WideResNet, small_cnn
from gradsieve.networks import scaled, standardized


@given(rows=st.integers(1, 9), size=st.integers(4, 20), channels=st.integers(1, 4), classes=st.integers(2, 6))
def test_one_score_per_example_and_all_equal_at_the_start(rows: int, size: int, channels: int, classes: int) -> None:
    batch = (torch.randn(rows, channels, size, size), torch.randint(classes, (rows,)))
    features = channels * size * size
    scorers = [MLPScorer(features), MLPScorer(features, classes), ConvScorer(channels), ConvScorer(channels, classes)]
    for scorer in scorers:
        assert torch.equal(scorer(batch), torch.zeros(rows))


@pytest.mark.parametrize("label", [False, True])
def test_scorers_read_the_label_only_if_told_to(label: bool) -> None:
    x, y = torch.randn(6, 1, 8, 8), torch.zeros(6, dtype=torch.long)
    classes = 10 if label else None
    for scorer in (MLPScorer(64, classes), ConvScorer(1, classes), like(small_cnn(1), label=label)):
        for p in scorer.parameters():
            nn.init.normal_(p) if p.ndim > 1 else None
        scorer.eval()
        assert torch.equal(scorer((x, y)), scorer((x, y + 1))) is not label


@pytest.mark.parametrize("label", [False, True])
@pytest.mark.parametrize("model", [mlp(6, 3), cnn(2, 3), small_cnn(3, 5), WideResNet(10, 1, 4)])
def test_like_is_the_same_architecture_with_weights_of_its_own(model: nn.Module, label: bool) -> None:
    before = {n: v.clone() for n, v in model.state_dict().items()}
    scorer = like(model, label=label)
    ours, theirs = dict(scorer.body.named_parameters()), dict(model.named_parameters())
    assert list(ours) == list(theirs)
    *body, weight, bias = ours
    classes = theirs[bias].shape[0]
    assert ours[weight].shape == (classes if label else 1, theirs[weight].shape[1])
    assert ours[bias].shape == (classes if label else 1,)
    for name in body:
        assert ours[name].shape == theirs[name].shape
        assert ours[name].data_ptr() != theirs[name].data_ptr()
        assert ours[name].ndim == 1 or not torch.equal(ours[name], theirs[name])
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())


def test_like_a_single_linear_layer_and_a_frozen_model() -> None:
    assert like(nn.Linear(4, 3))((torch.randn(5, 4), torch.zeros(5))).shape == (5,)
    frozen = mlp().requires_grad_(False)
    assert all(p.requires_grad for p in like(frozen).parameters())


def test_like_resets_what_has_no_reset_of_its_own() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.full((4,), 7.0))
            self.head = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.scale * x)

    assert torch.equal(like(Scaled()).body.scale, torch.ones(4))  # type: ignore[arg-type]


def test_like_takes_the_name_of_a_head_that_is_not_listed_last() -> None:
    class Reversed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(5, 3)
            self.trunk = nn.Linear(4, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.trunk(x))

    assert like(Reversed(), head="head")((torch.randn(6, 4), None)).shape == (6,)
    with pytest.raises(GradsieveError, match=r"head='tail'.*\['head', 'trunk'\]"):
        like(Reversed(), head="tail")


def test_scorers_of_the_input_alone_need_no_label() -> None:
    x = torch.randn(4, 6)
    assert MLPScorer(6)(x).shape == MLPScorer(6)((x,)).shape == (4,)
    with pytest.raises(GradsieveError, match="batch has none"):
        MLPScorer(6, 3)((x,))


def test_like_needs_a_linear_layer() -> None:
    with pytest.raises(GradsieveError, match="last linear layer"):
        like(nn.Conv2d(3, 4, 3))


@given(shift=st.floats(-5, 5), scale=st.floats(0.1, 100))
def test_signals_are_put_on_the_scale_of_their_batch(shift: float, scale: float) -> None:
    torch.manual_seed(0)
    signal = torch.randn(50).double()
    torch.testing.assert_close(standardized(scale * signal + shift), standardized(signal))
    torch.testing.assert_close(scaled(scale * signal), scaled(signal))
    assert float(standardized(signal).abs().max()) <= 2
    assert torch.equal(standardized(torch.full((4,), 3.0)), torch.zeros(4))


def test_signal_scorer_takes_features_of_the_example() -> None:
    batch = (torch.randn(6, 3), torch.zeros(6))
    scorer = SignalScorer(features=lambda batch: batch[0], num_features=3)
    loss, alignment = torch.rand(6), torch.randn(6)
    assert scorer(batch, loss=loss, alignment=alignment).shape == (6,)
    nn.init.normal_(scorer.body[-1].weight)  # type: ignore[arg-type]
    other = scorer((batch[0] + 1, batch[1]), loss=loss, alignment=alignment)
    assert not torch.allclose(scorer(batch, loss=loss, alignment=alignment), other)
    with pytest.raises(GradsieveError, match="together, or neither"):
        SignalScorer(num_features=3)


def test_a_split_of_ones_own() -> None:
    scorer = MLPScorer(6, 3, split=lambda batch: (batch["x"], batch["y"]))
    assert scorer({"x": torch.randn(4, 6), "y": torch.zeros(4)}).shape == (4,)
    with pytest.raises(GradsieveError, match="split="):
        MLPScorer(6)({"x": torch.randn(4, 6)})
