"""ScoreSampler: the paper's other use of the scores."""

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset
from zoo import Batch, cross_entropy, differences, fingerprint, mlp

from gradsieve import DDS, GradsieveError, MLPScorer, ScoreSampler, SignalScorer
from gradsieve.scorer import example_weights, psi_objective


class Table(nn.Module):
    """One free score per example, looked up by the example's index."""

    def __init__(self, scores: Tensor):
        super().__init__()
        self.scores = nn.Parameter(scores)

    def forward(self, batch: tuple[Tensor, ...]) -> Tensor:
        return self.scores[batch[2]]


def data(rows: int = 12) -> TensorDataset:
    return TensorDataset(torch.randn(rows, 6).double(), torch.randint(3, (rows,)), torch.arange(rows))


def test_draws_follow_the_softmax_of_the_scores() -> None:
    dataset, scorer = data(), Table(torch.randn(12).double())
    sampler = ScoreSampler(dataset, scorer, batch_size=50, num_samples=200_000, max_logit=None)
    drawn = torch.bincount(torch.tensor(list(sampler)), minlength=12) / 200_000
    torch.testing.assert_close(drawn.double(), torch.softmax(scorer.scores.detach(), 0), atol=5e-3, rtol=0)
    torch.testing.assert_close(sampler.probabilities(), torch.softmax(scorer.scores.detach(), 0))
    assert len(sampler) == 200_000


@pytest.mark.parametrize("form", ["expectation", "algorithm1"])
def test_weighting_and_sampling_give_the_same_expected_gradients(form: str) -> None:
    """For theta exactly, by summing over what may be drawn; for psi by the mean over many drawn batches."""
    model, dataset, scorer = mlp().eval().double(), data(), Table(torch.randn(12).double())
    whole: Batch = dataset.tensors  # type: ignore[assignment]
    parameters = list(model.parameters())

    weights = example_weights(scorer(whole))
    weighted = torch.autograd.grad((weights.detach() * cross_entropy(model, whole)).sum(), parameters)
    sampler = ScoreSampler(dataset, scorer, batch_size=4, max_logit=None)
    p = sampler.probabilities()
    per_draw = [torch.autograd.grad(cross_entropy(model, whole)[i], parameters) for i in range(12)]
    for k, expected in enumerate(weighted):
        torch.testing.assert_close(sum(p[i] * per_draw[i][k] for i in range(12)), expected)

    rewards = torch.randn(12).double()
    objective = psi_objective(scorer(whole), weights, rewards, "expectation")
    (expected,) = torch.autograd.grad(objective, scorer.parameters())
    draws = torch.tensor(list(ScoreSampler(dataset, scorer, batch_size=64, num_samples=64 * 4000, max_logit=None)))
    total = torch.zeros(12).double()
    for batch in draws.view(-1, 64):
        scores = scorer((None, None, batch))  # type: ignore[arg-type]
        logits = scores - scores.detach()
        objective = psi_objective(logits, example_weights(logits), rewards[batch], form)
        total += torch.autograd.grad(objective, scorer.parameters())[0]
    mean = total / 4000 * 64 / 63  # the batch's own mean as baseline takes 1/B of the signal
    assert float((mean - expected).norm() / expected.norm()) < 0.05


@pytest.mark.parametrize("refresh_every", [1, 50])
def test_training_by_sampling(refresh_every: int) -> None:
    """Examples that hurt dev are drawn less and less; weights only make up for what was learned since the draw."""
    dataset = data(20)
    x, y, _ = dataset.tensors
    y[:10] = (x[:10, 0] > 0).long()
    y[10:] = (x[10:, 0] <= 0).long()  # the second half says the opposite of the first, and of dev
    dev_x = torch.randn(50, 6).double()
    dev = [(dev_x, (dev_x[:, 0] > 0).long())]
    model, scorer = mlp().double().eval(), Table(torch.zeros(20).double())
    optimizer = SGD(model.parameters(), lr=0.1)
    sampler = ScoreSampler(dataset, scorer, batch_size=10, refresh_every=refresh_every)
    inner = torch.optim.Adam(scorer.parameters(), lr=0.05, fused=True)
    dds = DDS(model, scorer, cross_entropy, optimizer, dev, sampler=sampler, scorer_optimizer=inner)
    for _ in range(100):
        for batch in DataLoader(dataset, batch_size=10, sampler=sampler):
            optimizer.zero_grad()
            loss = dds.loss(batch)
            if refresh_every == 1:
                torch.testing.assert_close(loss, cross_entropy(model, batch).mean())
            loss.backward()
            optimizer.step()
            record = dds.step()
            assert record is not None
            assert record.skipped is None
    sampler.refresh()
    assert float(sampler.probabilities()[:10].sum()) > 0.75


def test_scores_are_refreshed_every_n_steps_and_leave_no_trace() -> None:
    dataset = data()
    scorer = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1)).double()
    scorings = 0

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = scorer

        def forward(self, batch: tuple[Tensor, ...]) -> Tensor:
            nonlocal scorings
            scorings += 1
            return self.net(batch[0]).squeeze(1)

    counting = Counting()
    sampler = ScoreSampler(dataset, counting, batch_size=4, refresh_every=2, scoring_batch_size=5)
    before = fingerprint(counting)
    assert len(list(sampler)) == 12  # three steps: scored before the first and the third
    assert scorings == 2 * 3
    assert differences(before, fingerprint(counting)) == []


@pytest.mark.parametrize("stop", [0, 1, 2])
def test_a_resumed_sampler_goes_on_where_it_stopped(stop: int) -> None:
    dataset, scorer = data(), Table(torch.randn(12).double())

    def make(seed: int) -> ScoreSampler:
        generator = torch.Generator().manual_seed(seed)
        return ScoreSampler(dataset, scorer, batch_size=4, refresh_every=2, generator=generator)

    sampler, other = make(0), make(1)
    loader = iter(DataLoader(dataset, batch_size=4, sampler=sampler))
    for _ in range(stop):
        next(loader)
    other.load_state_dict(sampler.state_dict())
    rest = [batch[2].tolist() for batch in loader]
    assert [batch[2].tolist() for batch in DataLoader(dataset, batch_size=4, sampler=other)] == rest
    assert len(rest) == 3 - stop


def test_non_finite_scores_are_drawn_as_neutral() -> None:
    scores = torch.zeros(12).double()
    scores[3] = torch.nan
    sampler = ScoreSampler(data(), Table(scores), batch_size=4)
    torch.testing.assert_close(sampler.probabilities(), torch.full((12,), 1 / 12).double())
    assert sampler.logits(data().tensors).tolist() == [0.0] * 12


class Told(ScoreSampler):
    """Writes down the first example's score by which each batch is drawn."""

    def refresh(self) -> None:
        super().refresh()
        assert isinstance(self.scorer, Table)
        self.score = float(self.scorer.scores[0].detach())

    def _draw(self, count: int) -> Tensor:
        drawn_by.append(self.score)
        return super()._draw(count)


drawn_by: list[float] = []


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_is_weighed_by_the_scores_that_it_was_drawn_by(workers: int) -> None:
    dataset, scorer = data(40), Table(torch.zeros(40).double())
    sampler = Told(dataset, scorer, batch_size=4, refresh_every=3, max_logit=None)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler, num_workers=workers)
    for batches in (10, 4, 10):  # of the second pass some are never used
        drawn_by.clear()
        found = []
        for batch, _ in zip(loader, range(batches), strict=False):
            found += sampler.logits(batch).unique().tolist()
            scorer.scores.data += 1  # learning, of a kind that changes no draws
        assert found == drawn_by[:batches]
        assert len(set(found)) > 1


def test_scores_that_nobody_asks_for_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradsieve.sampling.AHEAD", 4)
    sampler = ScoreSampler(data(), Table(torch.zeros(12).double()), batch_size=4, num_samples=200, refresh_every=1)
    for _ in sampler:
        assert len(sampler._newer) <= 4


def test_each_process_draws_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn() -> list[int]:
        return list(ScoreSampler(data(), Table(torch.zeros(12).double()), num_samples=50))

    alone = drawn()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    for rank, alike in ((0, True), (1, False)):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        assert (drawn() == alone) == alike


def test_clear_errors() -> None:
    with pytest.raises(GradsieveError, match="SignalScorer cannot have the signals"):
        ScoreSampler(data(), SignalScorer(), batch_size=4)
    with pytest.raises(GradsieveError, match="length above 0"):
        ScoreSampler(data(0), MLPScorer(6), batch_size=4)
    with pytest.raises(GradsieveError, match="at least 1"):
        ScoreSampler(data(), MLPScorer(6), batch_size=0)


def test_a_sampler_belongs_to_its_scorer() -> None:
    model, dataset, scorer = mlp(), data(), MLPScorer(6)
    sampler, optimizer = ScoreSampler(dataset, scorer, batch_size=4), SGD(model.parameters(), lr=0.1)
    for other, bound in ((MLPScorer(6), 2.0), (None, 2.0), (scorer, 1.0)):
        with pytest.raises(GradsieveError, match="same scorer"):
            DDS(model, other, cross_entropy, optimizer, [0], sampler=sampler, max_logit=bound)


def test_a_pass_is_whole_whatever_other_iterators_do() -> None:
    dataset, scorer = data(), Table(torch.zeros(12).double())
    sampler = ScoreSampler(dataset, scorer, batch_size=5)
    first = iter(sampler)
    next(first)
    assert len(list(sampler)) == len(list(sampler)) == 12


def test_right_after_a_refresh_weights_are_uniform_even_with_dropout() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1)).double()

        def forward(self, batch: tuple[Tensor, ...]) -> Tensor:
            return self.net(batch[0]).squeeze(1)

    model, dataset, scorer = mlp().double(), data(), Net()
    optimizer = SGD(model.parameters(), lr=0.1)
    sampler = ScoreSampler(dataset, scorer, batch_size=6, refresh_every=1)
    dds = DDS(model, scorer, cross_entropy, optimizer, [dataset.tensors], sampler=sampler)
    for batch in DataLoader(dataset, 6, sampler=sampler):
        optimizer.zero_grad()
        dds.loss(batch).backward()
        optimizer.step()
        record = dds.step()
        assert record is not None
        torch.testing.assert_close(record.weights, torch.full((6,), 1 / 6).double())
    assert scorer.training
