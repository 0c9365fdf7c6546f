"""Translation as a whole: batches, the choice of a model, killed runs, bad text, the commands."""

import io
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Ended
from hypothesis import given
from hypothesis import strategies as st
from test_runs import CPU, SMALL_TEXT, digest, end_as_if_never_killed, run

from gradsieve import GradsieveError
from gradsieve.baselines.tcs import uniform_distribution
from gradsieve.report.usage import plot_usage, usage_curves
from gradsieve.tasks import recipe_of
from gradsieve.translation.corpus import MultiWay
from gradsieve.translation.load import load_text
from gradsieve.translation.ragged import PAD, Ragged
from gradsieve.translation.stream import Slice, Stream
from gradsieve.translation.train import SetUp, accumulate, preferred
from gradsieve.translation.translator import translation_loss

SETTINGS = [part for key in SMALL_TEXT for part in ("--set", key)]


class Alike:
    """A stand-in for a method: every language that has a sentence, alike."""

    def __init__(self, observes: bool):
        self.observes, self.generator = observes, torch.Generator().manual_seed(0)

    def times(self, available: torch.Tensor) -> torch.Tensor:
        return torch.ones(len(available), dtype=torch.long)

    def draw(self, available: torch.Tensor) -> torch.Tensor:
        return torch.multinomial(uniform_distribution(available), 1, generator=self.generator).squeeze(1)


def corpus_of(targets: int, languages: int, seed: int) -> MultiWay:
    """Sentence j of language i is made of the piece 100 i + j + 10 alone; targets of j + 10."""
    chance = torch.Generator().manual_seed(seed)
    available = torch.rand(targets, languages, generator=chance) < 0.6
    available[:, 0] |= ~available.any(1)
    lengths = torch.randint(1, 9, (targets,), generator=chance).tolist()
    groups = [available[:, i].nonzero()[:, 0] for i in range(languages)]
    return MultiWay(
        tuple(f"l{i}" for i in range(languages)),
        Ragged.of([[j + 1000] * lengths[j] for j in range(targets)]),
        available,
        tuple(Ragged.of([[10_000 * (i + 1) + j] * lengths[j] for j in its.tolist()]) for i, its in enumerate(groups)),
        tuple(groups),
        {},
        "",
    )


def stream_of(corpus: MultiWay, batching: str, observes: bool, words: int = 24, pool: int = 15) -> Stream:
    return Stream(corpus, Alike(observes), words=words, batching=batching, pool=pool, seed=3, device=CPU)


def pairs_of(part: Slice) -> list[tuple[int, int]]:
    """(language, target) of each row, after a check that they belong together."""
    found = []
    for source, target in zip(part.batch.source[:, 0].tolist(), part.batch.target[:, 1].tolist(), strict=True):
        assert source % 10_000 == target - 1000
        found.append((source // 10_000 - 1, target - 1000))
    return found


class TestStream:
    @given(
        st.integers(1, 60), st.integers(1, 4), st.sampled_from(["language", "mixed"]), st.booleans(), st.integers(0, 9)
    )
    def test_every_target_comes_once_in_a_pass(
        self, targets: int, languages: int, batching: str, observes: bool, seed: int
    ) -> None:
        corpus = corpus_of(targets, languages, seed)
        stream, seen, drawn = stream_of(corpus, batching, observes), Counter[int](), 0
        for slices in stream:
            pairs = [pair for part in slices for pair in pairs_of(part)]
            assert sum(part.share for part in slices) == pytest.approx(1)
            assert all(corpus.available[target, group] for group, target in pairs)
            if observes:
                assert all({part.group} == {group for group, _ in pairs_of(part)} for part in slices)
            if batching == "language":
                assert len({group for group, _ in pairs}) == 1
            else:
                assert observes or len(slices) == 1
            words = sum(int((part.batch.source != PAD).sum()) + len(part.batch.places) for part in slices)
            assert words <= 24 or len(pairs) == 1
            seen.update(target for _, target in pairs)
            drawn += len(pairs)
            if drawn > 4 * targets + 200:
                break
        waiting = Counter(stream._waiting[:, 0].tolist()) + Counter(
            target for batch in stream._ready for target in batch[:, 0].tolist()
        )
        total = seen + waiting  # every pool takes whole shares of a pass
        counts = [total[target] for target in range(targets)]
        assert max(counts) - min(counts) <= 1

    def test_nobody_waits_for_ever(self) -> None:
        corpus = corpus_of(80, 3, 0)
        seen: set[int] = set()
        for number, slices in enumerate(stream_of(corpus, "language", False)):
            seen |= {target for part in slices for _, target in pairs_of(part)}
            if number == 300:
                break
        assert seen == set(range(80))

    def test_a_language_fills_batches_whatever_its_share(self) -> None:
        """One that is drawn seldom waits for its batch to fill, and is not trained on by the crumb."""
        corpus = corpus_of(500, 4, 1)
        sizes = []
        for number, slices in enumerate(stream_of(corpus, "language", True, words=60, pool=50)):
            sizes.append(sum(int(part.batch.source_lengths.sum()) + len(part.batch.places) for part in slices))
            if number == 100:
                break
        assert min(sizes) >= 30

    @pytest.mark.parametrize("batching", ["language", "mixed"])
    def test_it_goes_on_from_anywhere(self, batching: str) -> None:
        corpus = corpus_of(40, 3, 0)
        whole = stream_of(corpus, batching, True)
        batches = iter(whole)
        for number in range(30):
            again = stream_of(corpus, batching, True)
            again.load_state_dict(whole.state_dict())
            again.method.generator.set_state(whole.method.generator.get_state())  # type: ignore[attr-defined]
            expected, found = next(batches), next(iter(again))
            assert [pairs_of(part) for part in expected] == [pairs_of(part) for part in found], number


def set_up(text: Path, method: str, *extra: str) -> SetUp:
    recipe = recipe_of("translation", [*SMALL_TEXT, "model.dropout=0.0", *extra])
    return SetUp(recipe, method, load_text(recipe, text), 0, CPU)  # type: ignore[arg-type]


def test_slices_add_up_to_the_batchs_gradient(text: Path) -> None:
    """A mixed batch by one backward pass for each language, against one for all."""
    setup = set_up(text, "dds", "batching=mixed", "batch_words=120")
    parameters = list(setup.model.parameters())
    slices = next(iter(setup.stream))
    assert len(slices) > 1
    total = sum(translation_loss(setup.model, part.batch).sum() for part in slices)
    pieces = sum(len(part.batch.places) for part in slices)
    expected = torch.autograd.grad(total / pieces, parameters)
    for part in slices:
        accumulate(parameters, torch.autograd.grad(setup.way.loss(part.batch), parameters), part)
    torch.testing.assert_close([p.grad for p in parameters], list(expected))


def test_uniform_draws_every_pair_alike_and_related_two_languages(text: Path) -> None:
    setup = set_up(text, "uniform")
    corpus = setup.text.corpus
    assert len(setup.stream.items) == sum(map(len, corpus.sources))
    shares = [len(sources) / len(setup.stream.items) for sources in corpus.sources]
    assert list(setup.usage()["usage"].values()) == pytest.approx(shares, abs=1e-6)
    related = set_up(text, "related", "data.related=ru").usage()["usage"]
    assert related["tr"] == 0
    assert related["az"] > 0
    assert related["ru"] > 0


def test_priors(text: Path) -> None:
    """DDS begins with the low-resource language wherever it can be had, TCS+DDS where TCS is."""
    passes = ("dds.prior_passes=300", "dds.prior_lr=0.01", "tcs_dds.prior_passes=300", "tcs_dds.prior_lr=0.01")
    plain, tcs, both = (set_up(text, name, *passes) for name in ("dds", "tcs", "tcs+dds"))
    has = plain.text.corpus.available[plain.text.corpus.available[:, plain.text.target]]
    assert float(plain.way.probabilities(has)[:, plain.text.target].mean()) > 0.9
    available = tcs.text.corpus.available
    torch.testing.assert_close(both.way.probabilities(available), tcs.way.probabilities(available), atol=0.05, rtol=0)


@pytest.mark.parametrize(
    ("new", "old", "better"),
    [
        ({"bleu": 2.0, "perplexity": 9.0}, {"bleu": 1.0, "perplexity": 8.0}, True),
        ({"bleu": 1.0, "perplexity": 7.0}, {"bleu": 2.0, "perplexity": 8.0}, False),
        ({"bleu": 0.0, "perplexity": 19.0}, {"perplexity": 21.0}, True),
        ({"perplexity": 30.0}, {"bleu": 0.0, "perplexity": 19.0}, False),
        ({"perplexity": 30.0}, {"perplexity": 40.0}, True),
    ],
)
def test_the_authors_choice_of_a_model(new: dict[str, float], old: dict[str, float], better: bool) -> None:
    assert preferred(new, old) == better


def test_mixed_batches_and_transformers_run_and_resume(text: Path, tmp_path: Path, stopped: Callable[..., Any]) -> None:
    options: dict[str, Any] = {"recipe": "translation", "data": text}
    settings = ("batching=mixed", "model.name=transformer", "model.heads=2", "model.layers=1", "dds.projection=50")
    run(tmp_path / "whole", "dds", *settings, **options)
    with stopped(17):
        run(tmp_path / "stopped", "dds", *settings, **options)
    run(tmp_path / "stopped", "dds", *settings, resume=True, **options)
    assert digest(tmp_path / "stopped") == digest(tmp_path / "whole")


def test_killed_at_random_moments_it_ends_as_if_it_had_never_been(text: Path, tmp_path: Path) -> None:
    arguments = ("train", "translation", "--method", "dds", "--data", str(text), *SETTINGS, "--set", "steps=300")
    arguments = (*arguments, "--set", "evaluate_every=100", "--set", "decode.bleu_below=1.0")
    end_as_if_never_killed(arguments, tmp_path, kills=6)


def test_compare_translate_and_pictures(
    call: Callable[..., Ended], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("compare", "translation", "--data", str(text), "--methods", "uniform,tcs+dds", "--seeds", "2")
    ended = call(*arguments, "--out", "c", *SETTINGS)
    assert ended.code == 0, ended.err
    for words in ("bootstrap p", "chrF by dev", "share of character n-grams in common with az", "tcs+dds/"):
        assert words in ended.out or words == "tcs+dds/"
    rows = json.loads((tmp_path / "c/comparison.json").read_text())["rows"]
    assert len(rows[1]["bootstrap"]) == 2
    assert rows[0]["bootstrap"] == []
    assert (tmp_path / "c/tcs+dds/usage.png").read_bytes().startswith(b"\x89PNG")

    run_folder = tmp_path / "c/tcs+dds/seed-0"
    lines = (run_folder / "translations/test.source").read_text()
    for option, which in ((["--last"], "last"), ([], "best")):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(f"{lines}\n".encode())))
        ended = call("translate", str(run_folder), *option)
        assert ended.code == 0, ended.err
        wanted = (run_folder / f"translations/test.{which}").read_text() + "\n"
        assert [" ".join(line.split()) for line in ended.out.splitlines()] == wanted.splitlines()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n")))
    ended = call("translate", str(run_folder))
    assert (ended.code, "not UTF-8" in ended.err) == (2, True)
    assert "does not know the language xx" in call("translate", str(run_folder), "--language", "xx").err
    assert "no run of a translation recipe" in call("translate", str(tmp_path)).err


def test_usage_curves(text: Path, tmp_path: Path) -> None:
    run(tmp_path / "run", "tcs", recipe="translation", data=text)
    steps, usage = usage_curves(tmp_path / "run")
    assert steps.tolist() == [5, 10, 15, 20, 25, 30]
    assert set(usage) == {"az", "ru", "tr"}
    plot_usage([tmp_path / "run"], tmp_path / "usage.png", title="usage")
    assert (tmp_path / "usage.png").is_file()


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("train.tr-en.tsv", b"one ek\n", "train.tr-en.tsv, line 1: 0 TABs"),
        ("train.tr-en.tsv", b"a\tb\n\xff\tb\n", "train.tr-en.tsv, line 2: byte 1 is not UTF-8"),
        ("dev.az-en.tsv", b"", "dev.az-en.tsv is empty"),
        ("test.az-en.tsv", None, "no test data for az"),
        ("train.az-en.tsv", None, "data.target=az is not among the languages ru, tr"),
    ],
)
def test_bad_text_is_explained(
    file: str, content: bytes | None, message: str, call: Callable[..., Ended], text: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for each in text.iterdir():
        (data / each.name).write_bytes(each.read_bytes())
    if content is None:
        (data / file).unlink()
    else:
        (data / file).write_bytes(content)
    ended = call("train", "translation", "--data", str(data), "--out", "x", *SETTINGS)
    assert ended.code == 2, ended
    assert message in ended.err
    assert "Traceback" not in ended.err
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give the folder with --data"),
        (("--data", "nowhere"), "nowhere is no folder"),
        (("--data", "TEXT", "--set", "data.target=xx"), "data.target=xx is not among"),
        (("--data", "TEXT", "--set", "data.languages=['az', 'xx']"), "no train data for the language 'xx'"),
        (("--data", "TEXT", "--set", "data.languages=['az', 'az']"), "names one twice"),
        (("--data", "TEXT", "--set", "data.related=az"), "data.related=az must be one of"),
        (("--data", "TEXT", "--method", "mentornet"), "unknown method 'mentornet'"),
        (("--data", "TEXT", "--set", "model.name=transformer", "--set", "model.heads=3"), "needs a hidden size"),
        (("--data", "TEXT", "--set", "dds.lr=0"), "dds.lr"),
    ],
)
def test_bad_settings_are_explained(
    arguments: tuple[str, ...], message: str, call: Callable[..., Ended], text: Path, tmp_path: Path
) -> None:
    ended = call("train", "translation", *SETTINGS, *(a.replace("TEXT", str(text)) for a in arguments), "--out", "x")
    assert ended.code == 2, ended
    assert message in ended.err
    assert not (tmp_path / "x").exists()


def test_a_run_needs_its_text(text: Path) -> None:
    with pytest.raises(GradsieveError, match="gradsieve download ted"):
        load_text(recipe_of("translation"), None)  # type: ignore[arg-type]


def test_the_papers_settings() -> None:
    content = recipe_of("ted8").model_dump()
    assert (content["model"]["hidden"], content["model"]["embedding"], content["model"]["dropout"]) == (512, 128, 0.3)
    assert (content["optimizer"]["lr"], content["dds"]["lr"], content["data"]["pieces"]) == (0.001, 0.0001, 8000)
    assert (content["dds"]["updates"], content["tcs_dds"]["updates"]) == (1, 100)
    assert (content["dds"]["items_between"], content["dds"]["batch_size"]) == (20_000, 160)
