"""Translators, their loss, and beam search against a slow one."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from gradsieve import GradsieveError, alignment
from gradsieve.translation.decode import beam_search, longest_lengths
from gradsieve.translation.model import LSTMTranslator, build_translator
from gradsieve.translation.ragged import BOS, EOS, PAD
from gradsieve.translation.transformer import TransformerTranslator, sinusoids
from gradsieve.translation.translator import (
    TranslationBatch,
    Translator,
    reordered,
    reversed_within,
    translation_batch,
    translation_loss,
)

NAMES = ("lstm", "transformer")
SPECIAL = 4


def tiny(name: str, pieces: int = 11, *, dropout: float = 0.3, scale: float = 1.0, seed: int = 0) -> Translator:
    """In float64, so that rounding decides nothing; `scale` makes it sure of what it says."""
    torch.manual_seed(seed)
    model = build_translator(name, 13, pieces, hidden=8, embedding=6, dropout=dropout, layers=2, heads=2).double()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(scale)
    return model


def padded(rows: list[Tensor], extra: int = 0) -> Tensor:
    out = torch.full((len(rows), max(map(len, rows)) + extra), PAD)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out


def batch_of(sources: list[Tensor], targets: list[Tensor], extra: int = 0) -> TranslationBatch:
    bos, eos = torch.tensor([BOS]), torch.tensor([EOS])
    lengths = torch.tensor([len(s) for s in sources])
    wanted = [torch.cat([bos, t, eos]) for t in targets]
    return translation_batch(padded(sources, extra), lengths, padded(wanted, extra))


def sentences(count: int, pieces: int, longest: int = 7) -> list[Tensor]:
    return [torch.randint(SPECIAL, pieces, (int(torch.randint(1, longest + 1, ())),)) for _ in range(count)]


def random_batch(count: int = 5, extra: int = 0) -> TranslationBatch:
    return batch_of(sentences(count, 13), sentences(count, 11), extra)


def rows_of(batch: TranslationBatch, index: list[int]) -> TranslationBatch:
    """Those rows, with no more padding than they need."""
    sources = [batch.source[i, : batch.source_lengths[i]] for i in index]
    return batch_of(sources, [t[t != PAD][1:-1] for t in batch.target[index]])


@pytest.mark.parametrize("name", NAMES)
def test_shapes(name: str) -> None:
    batch, model = random_batch(), tiny(name)
    given, count = batch.target[:, :-1], int((batch.target[:, 1:] != PAD).sum())
    assert model(batch.source, batch.source_lengths, given).shape == (*given.shape, 11)
    assert model(batch.source, batch.source_lengths, given, batch.places).shape == (count, 11)
    assert translation_loss(model, batch).shape == (5,)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_the_loss_over_real_pieces_is_the_plain_one(name: str, label_smoothing: float) -> None:
    """Logits everywhere, then padding ignored: values and gradients."""
    batch, model = random_batch(extra=2), tiny(name).eval()
    logits = model(batch.source, batch.source_lengths, batch.target[:, :-1])
    each = F.cross_entropy(
        logits.transpose(1, 2),
        batch.target[:, 1:],
        ignore_index=PAD,
        reduction="none",
        label_smoothing=label_smoothing,
    )
    plain = each.sum(1)
    ours = translation_loss(model, batch, label_smoothing=label_smoothing)
    torch.testing.assert_close(ours, plain)
    counts = (batch.target[:, 1:] != PAD).sum(1)
    mean = translation_loss(model, batch, label_smoothing=label_smoothing, reduction="mean")
    torch.testing.assert_close(mean, plain / counts)
    parameters = list(model.parameters())
    torch.testing.assert_close(
        torch.autograd.grad(ours.sum(), parameters), torch.autograd.grad(plain.sum(), parameters)
    )


@pytest.mark.parametrize("name", NAMES)
@given(count=st.integers(1, 6), extra=st.integers(0, 3), seed=st.integers(0, 99))
def test_a_sentences_loss_does_not_depend_on_its_neighbours(name: str, count: int, extra: int, seed: int) -> None:
    model = tiny(name, seed=seed).eval()
    batch = random_batch(count, extra)
    together = translation_loss(model, batch)
    alone = torch.cat([translation_loss(model, rows_of(batch, [i])) for i in range(count)])
    torch.testing.assert_close(together, alone)
    order = torch.randperm(count).tolist()
    torch.testing.assert_close(translation_loss(model, rows_of(batch, order)), together[order])


@pytest.mark.parametrize("name", NAMES)
def test_gradients_flow_to_all_parameters(name: str) -> None:
    model = tiny(name)
    translation_loss(model, random_batch()).sum().backward()
    for parameter, p in model.named_parameters():
        assert p.grad is not None, parameter
        assert p.grad.abs().max() > 1e-9, parameter


@pytest.mark.parametrize("name", NAMES)
def test_padding_has_no_gradient(name: str) -> None:
    model = tiny(name)
    translation_loss(model, random_batch(extra=3)).sum().backward()
    for table in (model.source_embedding, model.target_embedding):
        assert isinstance(table.weight, nn.Parameter)
        assert table.weight.grad is not None
        assert table.weight.grad[PAD].abs().max() == 0


@pytest.mark.parametrize("name", NAMES)
def test_steps_are_the_forward_pass(name: str) -> None:
    """Piece by piece, rows exchanged on the way, as beams are."""
    model, batch = tiny(name).eval(), random_batch(4)
    whole = model(batch.source, batch.source_lengths, batch.target[:, :-1]).log_softmax(-1)
    memory = model.encode(batch.source, batch.source_lengths)
    state, order = model.start(memory), torch.arange(4)
    for t in range(whole.shape[1]):
        shuffle = torch.randperm(4)
        memory, state, order = reordered(memory, shuffle), reordered(state, shuffle), order[shuffle]
        log_probs, state = model.step(memory, state, batch.target[order, t])
        torch.testing.assert_close(log_probs, whole[order, t])


@pytest.mark.parametrize("name", NAMES)
def test_no_place_sees_what_follows_it(name: str) -> None:
    model, batch = tiny(name).eval(), random_batch(3)
    given = torch.randint(SPECIAL, 11, (3, 6))
    changed = given.clone()
    changed[:, 4:] = BOS
    before, after = (model(batch.source, batch.source_lengths, g) for g in (given, changed))
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.allclose(before[:, 4:], after[:, 4:])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("training", [True, False])
def test_rewards_work_on_it(name: str, training: bool) -> None:
    """In forward mode and by finite differences, dropout included, as by a backward pass per sentence."""
    model, batch = tiny(name).train(training), random_batch()
    direction = {n: torch.randn_like(p) for n, p in model.named_parameters()}
    exact = alignment(model, translation_loss, batch, direction, estimator="per_example")
    assert exact.abs().min() > 0
    torch.testing.assert_close(alignment(model, translation_loss, batch, direction, estimator="jvp"), exact)
    near = alignment(model, translation_loss, batch, direction, estimator="finite_difference", epsilon=1e-6)
    torch.testing.assert_close(near, exact, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_rewards_work_in_float32(name: str) -> None:
    """Where the LSTM's own kernel has no forward mode."""
    model, batch = tiny(name).float(), random_batch()
    direction = {n: torch.randn_like(p) for n, p in model.named_parameters()}
    exact = alignment(model, translation_loss, batch, direction, estimator="per_example")
    torch.testing.assert_close(alignment(model, translation_loss, batch, direction), exact, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_the_seed_decides_dropout(name: str) -> None:
    model, batch = tiny(name), random_batch()
    losses = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        losses.append(translation_loss(model, batch))
    assert torch.equal(losses[0], losses[1])
    assert not torch.allclose(losses[0], losses[2])
    model.eval()
    assert torch.equal(translation_loss(model, batch), translation_loss(model, batch))


@pytest.mark.parametrize("name", NAMES)
def test_state_dict_round_trip(name: str) -> None:
    one, other, batch = tiny(name, seed=1).eval(), tiny(name, seed=2).eval(), random_batch()
    assert not torch.allclose(translation_loss(one, batch), translation_loss(other, batch))
    other.load_state_dict(one.state_dict())
    assert torch.equal(translation_loss(one, batch), translation_loss(other, batch))


def test_the_papers_model() -> None:
    """Appendix, for 8,000 pieces each: embeddings of 128, LSTMs of 512, weights uniform in +-0.1."""
    model = build_translator("lstm", 8000, 8000)
    assert isinstance(model, LSTMTranslator)
    assert model.dropout.p == 0.3
    sizes = {name: sum(p.numel() for p in module.parameters()) for name, module in model.named_children()}
    assert sizes == {
        "source_embedding": 8000 * 128,
        "target_embedding": 8000 * 128,
        "forwards": 4 * 512 * (128 + 512 + 2),
        "backwards": 4 * 512 * (128 + 512 + 2),
        "bridge": 1024 * 512 + 512,
        "decoder": 4 * 512 * (128 + 512 + 2),
        "keys": 1024 * 512,
        "combine": 1536 * 512 + 512,
        "output": 512 * 8000 + 8000,
        "dropout": 0,
    }
    assert sum(sizes.values()) == 11_932_480
    for p in model.parameters():
        assert 0.09 < p.abs().max() <= 0.1
        assert abs(p.mean()) < 0.01


def test_reversed_within() -> None:
    x = torch.arange(1, 9).view(2, 4, 1)
    real = torch.tensor([[True, True, True, False], [True, False, False, False]])
    assert reversed_within(x, real)[:, :, 0].tolist() == [[3, 2, 1, 4], [5, 6, 7, 8]]


def test_sinusoids() -> None:
    codes = sinusoids(3, 2, torch.zeros(6, dtype=torch.float64))
    for row, place in enumerate((3, 4)):
        for i in range(3):
            angle = place / 10000 ** (2 * i / 6)
            assert codes[row, 2 * i] == pytest.approx(math.sin(angle))
            assert codes[row, 2 * i + 1] == pytest.approx(math.cos(angle))


def test_what_cannot_be_built_is_named() -> None:
    with pytest.raises(GradsieveError, match="lstm or transformer"):
        build_translator("gru", 10, 10)
    with pytest.raises(GradsieveError, match="hidden size that 8 divides, not 12"):
        TransformerTranslator(10, 10, hidden=12, heads=4)
    with pytest.raises(GradsieveError, match="'sum' or the 'mean'"):
        translation_loss(tiny("lstm"), random_batch(), reduction="median")
    with pytest.raises(GradsieveError, match="beam must be 1 or more"):
        beam_search(tiny("lstm"), *random_batch()[:2], beam=0)


# Beam search


def log_probs_after(model: Translator, source: Tensor, prefix: list[int]) -> list[float]:
    """By the training forward pass over the whole prefix: nothing in common with the steps of the search."""
    logits = model(source[None], torch.tensor([len(source)]), torch.tensor([[BOS, *prefix]]))
    values: list[float] = logits[0, -1].log_softmax(-1).tolist()
    return [-math.inf if piece in (PAD, BOS) else value for piece, value in enumerate(values)]


def slow_beam_search(
    model: Translator, source: Tensor, beam: int, length_penalty: float, max_ratio: float
) -> list[int]:
    limit = int(longest_lengths(torch.tensor([len(source)]), max_ratio))
    live: list[tuple[float, list[int]]] = [(0.0, [])]
    finished: list[tuple[float, list[int]]] = []
    for n in range(1, limit + 1):
        candidates = [
            (log_prob + more, [*prefix, piece])
            for log_prob, prefix in live
            for piece, more in enumerate(log_probs_after(model, source, prefix))
            if more > -math.inf
        ]
        candidates.sort(key=lambda c: -c[0])
        finished += [(p / n**length_penalty, ids[:-1]) for p, ids in candidates[:beam] if ids[-1] == EOS]
        live = [c for c in candidates if c[1][-1] != EOS][:beam]
        lengths = [limit, n] if len(finished) >= beam else [limit]
        if finished and any(max(finished)[0] >= live[0][0] / length**length_penalty for length in lengths):
            break
    return max(finished)[1] if finished else live[0][1]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("beam", "length_penalty"), [(1, 1.0), (2, 0.0), (3, 0.6), (5, 1.0), (12, 1.5)])
@pytest.mark.parametrize("seed", [0, 1, 2])
@torch.no_grad()
def test_beam_search_is_the_slow_one(name: str, beam: int, length_penalty: float, seed: int) -> None:
    """Beams wider than the vocabulary too; models so peaked that they end at different lengths."""
    model = tiny(name, 7, scale=1.0 if name == "transformer" else 20.0, seed=seed).eval()
    model.output.bias[EOS] += 0.5 * seed
    sources = sentences(6, 13, 4)
    lengths = torch.tensor([len(s) for s in sources])
    settings = {"length_penalty": length_penalty, "max_ratio": 0.5}
    found = beam_search(model, padded(sources), lengths, beam=beam, **settings)
    assert found == [slow_beam_search(model, s, beam, **settings) for s in sources]


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_greedy_takes_the_likeliest_piece_each_time(name: str) -> None:
    model = tiny(name, scale=1.0 if name == "transformer" else 20.0).eval()
    sources = sentences(8, 13)
    lengths = torch.tensor([len(s) for s in sources])
    expected = []
    for source, limit in zip(sources, longest_lengths(lengths, 2.0).tolist(), strict=True):
        prefix: list[int] = []
        while len(prefix) < limit:
            values = log_probs_after(model, source, prefix)
            piece = values.index(max(values))
            if piece == EOS:
                break
            prefix.append(piece)
        expected.append(prefix)
    assert beam_search(model, padded(sources), lengths, beam=1) == expected


@pytest.mark.parametrize("name", NAMES)
def test_order_and_padding_do_not_change_translations(name: str) -> None:
    model = tiny(name, scale=1.0 if name == "transformer" else 20.0)
    sources = sentences(7, 13)
    lengths = torch.tensor([len(s) for s in sources])
    found = beam_search(model, padded(sources), lengths)
    assert model.training
    assert beam_search(model, padded(sources, 4), lengths) == found
    order = [3, 0, 6, 1, 5, 2, 4]
    assert beam_search(model, padded([sources[i] for i in order]), lengths[order]) == [found[i] for i in order]
    assert [beam_search(model, s[None], torch.tensor([len(s)]))[0] for s in sources] == found
    assert beam_search(model, torch.zeros(0, 3, dtype=torch.long), torch.zeros(0, dtype=torch.long)) == []


def test_a_translation_that_never_ends_is_cut_at_its_longest_length() -> None:
    model = tiny("lstm")
    with torch.no_grad():
        model.output.bias[EOS] = -1e4
    sources = sentences(3, 13)
    lengths = torch.tensor([len(s) for s in sources])
    found = beam_search(model, padded(sources), lengths, max_ratio=1.5)
    assert [len(f) for f in found] == longest_lengths(lengths, 1.5).tolist()


@pytest.mark.parametrize("name", NAMES)
def test_learns_to_reverse_sentences(name: str) -> None:
    """To a loss near zero; the search then says them, though many poor hypotheses end before the right one."""
    sources = [torch.randperm(9)[: int(torch.randint(2, 6, ()))] + SPECIAL for _ in range(24)]
    targets = [s.flip(0) for s in sources]
    batch = batch_of(sources, targets)
    model = build_translator(name, 13, 13, hidden=64, embedding=32, dropout=0.0, layers=1, heads=2)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(300):
        optimizer.zero_grad()
        translation_loss(model, batch, reduction="mean").mean().backward()
        optimizer.step()
    assert translation_loss(model, batch).max() < 0.1
    assert beam_search(model, batch.source, batch.source_lengths) == [t.tolist() for t in targets]
