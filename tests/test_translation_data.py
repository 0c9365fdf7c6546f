"""Text for translation: files, cleaning, vocabularies, the multi-way index, batches; distributions over languages."""

import gzip
import hashlib
import io
import tarfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradsieve import GradsieveError, GroupDDS
from gradsieve.baselines.tcs import (
    frequent_ngrams,
    ngram_similarity,
    related_distribution,
    target_first_distribution,
    tcs_distribution,
    uniform_distribution,
)
from gradsieve.translation import corpus, ragged, vocabulary
from gradsieve.translation.corpus import MultiWay, load_corpus, numbered
from gradsieve.translation.demo_corpus import read_catalogue, write_demo_corpus
from gradsieve.translation.download import download_ted
from gradsieve.translation.pairs import ENGLISH, Limits, fault, languages, read_pairs
from gradsieve.translation.ragged import BOS, EOS, PAD, UNK, Ragged, cut_by_words, padded
from gradsieve.translation.vocabulary import SPECIAL, Vocabulary, distinct, learn_vocabulary

MT8 = Path(__file__).parents[2] / "shared/data/mt8"
PAIRS = [("bir alma", "one apple"), ("iki alma", "two apples"), ("böyük ev", "a big house")]
sequences = st.lists(st.lists(st.integers(0, 99), max_size=6), max_size=8)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def write_tsv(path: Path, pairs: list[tuple[str, str]]) -> None:
    raw = "".join(f"{a}\t{b}\n" for a, b in pairs).encode()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)


class TestRagged:
    @given(sequences, st.lists(st.integers(0, 7), max_size=12))
    def test_it_is_a_list_of_lists(self, rows: list[list[int]], places: list[int]) -> None:
        ragged = Ragged.of(rows)
        assert ragged.tolist() == rows
        assert len(ragged) == len(rows)
        assert ragged.values.dtype == torch.int32
        assert ragged.offsets.dtype == torch.int64
        index = [i for i in places if i < len(rows)]
        assert ragged[torch.tensor(index, dtype=torch.long)].tolist() == [rows[i] for i in index]
        assert Ragged.cat([ragged, Ragged.of([[5]]), ragged]).tolist() == [*rows, [5], *rows]

    def test_many_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ragged, "BLOCK", 3)
        rows = [[i] * (i % 4) for i in range(10)]
        assert Ragged.of(rows)[torch.arange(9, -1, -1)].tolist() == rows[::-1]

    @given(sequences)
    def test_padding(self, rows: list[list[int]]) -> None:
        table, lengths = padded(Ragged.of(rows), -1)
        longest = max(map(len, rows), default=0)
        assert table.shape == (len(rows), longest)
        assert table.tolist() == [row + [-1] * (longest - len(row)) for row in rows]
        assert lengths.tolist() == [len(row) for row in rows]


class TestReading:
    @pytest.mark.parametrize("names", ["tsv", "tsv.gz", "az en", "az.gz en.gz", "az en.gz", "az.gz en"])
    def test_every_form_gives_the_same(self, names: str, tmp_path: Path) -> None:
        sides = [[f"{a}\t{b}" for a, b in PAIRS]] if "tsv" in names else zip(*PAIRS, strict=True)
        for name, lines in zip(names.split(), sides, strict=True):
            raw = "".join(f"{line}\n" for line in lines).encode()
            (tmp_path / f"train.az-en.{name}").write_bytes(gzip.compress(raw) if name.endswith("gz") else raw)
        pairs = read_pairs(tmp_path, "train", "az", Limits())
        assert list(pairs) == PAIRS
        assert list(pairs) == PAIRS, "a second pass reads them again"
        assert pairs.dropped.kept == 3
        assert languages(tmp_path) == ["az"]

    def test_languages_are_those_with_training_data(self, tmp_path: Path) -> None:
        present = "train.tr-en.tsv train.az-en.tsv.gz train.pt-br-en.pt-br train.pt-br-en.en.gz train.en-en.tsv"
        for name in f"{present} dev.be-en.tsv train.half-en.half train.xx train.xx-en.yy other".split():
            (tmp_path / name).touch()
        assert languages(tmp_path) == ["az", "pt-br", "tr"]

    def test_windows_files(self, tmp_path: Path) -> None:
        (tmp_path / "dev.az-en.tsv").write_bytes("\ufeffbir\tone\r\niki\ttwo".encode())
        assert list(read_pairs(tmp_path, "dev", "az")) == [("bir", "one"), ("iki", "two")]

    def test_line_breaks_of_unicode_end_no_line(self, tmp_path: Path) -> None:
        (tmp_path / "dev.az-en.tsv").write_text("bir\u2028iki\tone\x0btwo\n", encoding="utf-8")
        assert list(read_pairs(tmp_path, "dev", "az")) == [("bir\u2028iki", "one\x0btwo")]

    def test_cleaning_counts(self, tmp_path: Path) -> None:
        bad = [("", "one"), (" ", "one"), ("bir", ""), ("a " * 6, "six words, almost"), ("bir", "o" * 28)]
        write_tsv(tmp_path / "train.az-en.tsv", [*PAIRS, *bad])
        pairs = read_pairs(tmp_path, "train", "az", Limits(max_words=5, max_ratio=9))
        assert list(pairs) == PAIRS
        assert str(pairs.dropped) == "3 kept, 3 empty, 1 overlong, 1 ratio"
        assert len(list(read_pairs(tmp_path, "train", "az"))) == 5, "without limits only empty sides go"

    def test_text_without_spaces_can_be_overlong(self) -> None:
        assert fault("字" * 2500, "word " * 150, Limits()) == "overlong"
        assert fault("字" * 300, "word " * 150, Limits()) is None

    @pytest.mark.parametrize(
        ("raw", "message"),
        [
            (b"bir\tone\niki two\n", r"train.az-en.tsv, line 2: 0 TABs"),
            (b"bir\tone\tuno\n", r"train.az-en.tsv, line 1: 2 TABs"),
            (b"bir\tone\n\n", r"line 2: 0 TABs"),
            (b"bir\tone\nik\xff\ttwo\n", r"train.az-en.tsv, line 2: byte 3 is not UTF-8"),
            (b"", r"train.az-en.tsv is empty"),
        ],
    )
    def test_bad_lines_are_located(self, raw: bytes, message: str, tmp_path: Path) -> None:
        (tmp_path / "train.az-en.tsv").write_bytes(raw)
        with pytest.raises(GradsieveError, match=message):
            list(read_pairs(tmp_path, "train", "az"))

    @pytest.mark.parametrize("side", ["az", "en"])
    def test_moses_sides_of_different_length(self, side: str, tmp_path: Path) -> None:
        for name in ("az", "en"):
            (tmp_path / f"train.az-en.{name}").write_text("a\nb\n" if name == side else "a\nb\nc\n")
        with pytest.raises(GradsieveError, match=rf"train.az-en.{side} ends after line 2, where .* goes on"):
            list(read_pairs(tmp_path, "train", "az"))

    @pytest.mark.parametrize("damage", [lambda raw: raw[:-20], lambda raw: b"bir\tone\n", lambda raw: raw[:30] * 2])
    def test_damaged_gzip(self, damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
        raw = gzip.compress("".join(f"bir {i * 7919}\tone {i * 104729}\n" for i in range(9999)).encode())
        (tmp_path / "train.az-en.tsv.gz").write_bytes(damage(raw))
        with pytest.raises(GradsieveError, match=r"train.az-en.tsv.gz is damaged after line"):
            list(read_pairs(tmp_path, "train", "az"))

    def test_what_is_not_there(self, tmp_path: Path) -> None:
        write_tsv(tmp_path / "train.az-en.tsv", PAIRS)
        write_tsv(tmp_path / "train.tr-en.tsv", PAIRS)
        with pytest.raises(GradsieveError, match=r"no train data for the language 'xx'.*for az, tr"):
            read_pairs(tmp_path, "train", "xx")
        with pytest.raises(GradsieveError, match=r"no dev data for az: add dev.az-en.tsv"):
            read_pairs(tmp_path, "dev", "az")
        with pytest.raises(GradsieveError, match="no language"):
            read_pairs(tmp_path / "..", "dev", "az")
        with pytest.raises(GradsieveError, match="is no folder"):
            languages(tmp_path / "absent")
        (tmp_path / "train.tr-en.tsv.gz").touch()
        with pytest.raises(GradsieveError, match="more than once"):
            read_pairs(tmp_path, "train", "tr")


AZ = [(f"alma {i} ev böyük kitab", f"apple {i} house big book") for i in range(40)]
TR = [(f"elma {i} ev büyük kitap", f"apple {i} house big book") for i in range(20, 80)]
TR += [("elma", "apple 21 house big book"), ("elmalar", "apple 21 house big book"), ("ev", "house")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus")
    write_tsv(path / "train.az-en.tsv", AZ)
    write_tsv(path / "train.tr-en.tsv.gz", TR)
    for split in ("dev", "test"):
        write_tsv(path / f"{split}.az-en.tsv", PAIRS)
    return path


@pytest.fixture(scope="module")
def words(folder: Path) -> Vocabulary:
    return learn_vocabulary({language: read_pairs(folder, "train", language) for language in ("az", "tr")}, 60)


class TestVocabulary:
    def test_special_ids(self, words: Vocabulary) -> None:
        assert (PAD, UNK, BOS, EOS) == (0, 1, 2, 3)
        ids = words.encode("az", ["alma", "", "\u4e00"]).tolist()
        assert all(sentence[-1] == EOS and PAD not in sentence and BOS not in sentence for sentence in ids)
        assert ids[1] == [EOS]
        assert UNK in ids[2]

    def test_english_comes_back_as_it_was(self, words: Vocabulary) -> None:
        texts = ["apple 31 house big book", "big big apple"]
        ids = words.encode(ENGLISH, texts)
        assert words.decode(ids.tolist()) == texts
        followed_by_anything = [[BOS, *sentence, 7, PAD, PAD] for sentence in ids.tolist()]
        assert words.decode(followed_by_anything) == texts
        assert words.decode([[], [EOS]]) == ["", ""]

    def test_languages_share_the_pieces_that_are_spelled_alike_and_no_others(self, words: Vocabulary) -> None:
        az, tr = (
            {model.IdToPiece(i): int(words._tables[name][i]) for i in range(SPECIAL, model.GetPieceSize())}
            for name, model in words._models.items()
            if name != ENGLISH
        )
        assert az.keys() & tr.keys()
        assert all(az[piece] == tr[piece] for piece in az.keys() & tr.keys())
        everything = az | tr
        assert sorted(everything.values()) == list(range(SPECIAL, words.source_size))
        assert words.encode(ENGLISH, [e for _, e in AZ]).values.max() < words.target_size

    def test_it_is_deterministic_cached_and_rebuilt_from_its_models(self, folder: Path, tmp_path: Path) -> None:
        pairs = {language: read_pairs(folder, "train", language) for language in ("az", "tr")}
        notes: list[str] = []
        first = learn_vocabulary(pairs, 60, target_size=50, cache=tmp_path / "cache", on_note=notes.append)
        made = {path.name: path.read_bytes() for path in (tmp_path / "cache").iterdir()}
        assert sorted(name.split("-")[0] for name in made) == ["az", "en", "tr"]
        again = learn_vocabulary(pairs, 60, target_size=50)
        assert first.checksum == again.checksum == Vocabulary(first.sources, first.target).checksum
        for name in made:
            (tmp_path / "cache" / name).write_bytes(made[next(n for n in made if n.startswith("az"))])
        cached = learn_vocabulary(pairs, 60, target_size=50, cache=tmp_path / "cache")
        assert cached.target == cached.sources["az"] == first.sources["az"], "the cache was read"
        learn_vocabulary({"az": PAIRS}, 30, cache=tmp_path / "cache")
        assert len(list((tmp_path / "cache").iterdir())) == 5, "another text has another name"

    def test_too_little_text_shrinks_it_with_a_note(self, capfd: pytest.CaptureFixture[str]) -> None:
        notes: list[str] = []
        small = learn_vocabulary({"az": PAIRS}, 8000, on_note=notes.append)
        assert small.source_size < 100
        assert notes[0] == f"the vocabulary of az has {small.source_size} pieces, not 8,000: its text has no more."
        assert notes[1].startswith("the vocabulary of en has")
        assert capfd.readouterr() == ("", "")

    def test_errors(self, words: Vocabulary) -> None:
        with pytest.raises(GradsieveError, match="no vocabulary of 5 pieces for az"):
            learn_vocabulary({"az": AZ}, 5)
        with pytest.raises(GradsieveError, match="no text to learn a vocabulary of az from"):
            learn_vocabulary({"az": []}, 50)
        with pytest.raises(GradsieveError, match="no language xx; it has az, tr, en"):
            words.encode("xx", ["text"])

    def test_a_sample_of_much_text(self, monkeypatch: pytest.MonkeyPatch) -> None:
        texts = [str(i) for i in range(3000)]
        sample = list(distinct(texts + texts, every=3))
        assert 900 < len(sample) < 1100
        assert len({*sample}) == len(sample)
        assert list(distinct(["a", "b", "a"], every=1)) == ["a", "b"]
        monkeypatch.setattr(vocabulary, "MAX_SENTENCES", 20)
        assert learn_vocabulary({"az": AZ}, 60).source_size > SPECIAL


@pytest.fixture(scope="module", params=[7, corpus.CHUNK])
def loaded(request: pytest.FixtureRequest, folder: Path, words: Vocabulary) -> MultiWay:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "CHUNK", request.param)
        return load_corpus(folder, ["az", "tr"], "az", words)


class TestMultiWay:
    def test_it_holds_the_pairs_of_every_language(self, loaded: MultiWay, words: Vocabulary) -> None:
        for language, pairs in (("az", AZ), ("tr", TR)):
            sources, targets = loaded.pairs_of(language)
            found = zip(map(tuple, sources.tolist()), map(tuple, loaded.targets[targets].tolist()), strict=True)
            texts, english = zip(*pairs, strict=True)
            ids = words.encode(language, texts).tolist(), words.encode(ENGLISH, english).tolist()
            assert Counter(found) == Counter(zip(*(map(tuple, side) for side in ids), strict=True))

    def test_targets_are_distinct_and_know_their_languages(self, loaded: MultiWay, words: Vocabulary) -> None:
        english = list(dict.fromkeys(b for _, b in AZ + TR))
        assert words.decode(loaded.targets.tolist()) == english
        for column, pairs in enumerate((AZ, TR)):
            have = {b for _, b in pairs}
            assert loaded.available[:, column].tolist() == [e in have for e in english]
        assert loaded.available.dtype == torch.bool
        assert loaded.dropped["tr"].kept == len(TR)

    def test_sources_are_of_the_language_drawn(self, loaded: MultiWay, words: Vocabulary) -> None:
        targets = torch.randint(len(loaded), (200,), generator=generator(1))
        groups = torch.multinomial(uniform_distribution(loaded.available[targets]), 1, generator=generator(2))[:, 0]
        rows = loaded.draw_sources(targets, groups, generator(3))
        assert torch.equal(rows, loaded.draw_sources(targets, groups, generator(3)))
        drawn = loaded.source(groups, rows).tolist()
        english = words.decode(loaded.targets[targets].tolist())
        known = [Counter(), Counter()]  # type: ignore[var-annotated]
        for table, language, pairs in zip(known, ("az", "tr"), (AZ, TR), strict=True):
            ids = words.encode(language, [a for a, _ in pairs]).tolist()
            table.update((tuple(i), e) for i, (_, e) in zip(ids, pairs, strict=True))
        for source, text, group in zip(drawn, english, groups.tolist(), strict=True):
            assert (tuple(source), text) in known[group]
        assert len(loaded.source(groups[:0], loaded.draw_sources(targets[:0], groups[:0], generator()))) == 0

    def test_all_sources_of_a_target_are_drawn_alike(self, loaded: MultiWay, words: Vocabulary) -> None:
        english = words.decode(loaded.targets.tolist())
        targets = torch.full((3000,), english.index("apple 21 house big book"))
        groups = torch.ones_like(targets)
        rows = loaded.draw_sources(targets, groups, generator())
        drawn = Counter(map(tuple, loaded.source(groups, rows).tolist()))
        assert len(drawn) == 3
        assert min(drawn.values()) > 850

    def test_a_language_that_lacks_the_target(self, loaded: MultiWay) -> None:
        target = (~loaded.available[:, 0]).nonzero()[:1, 0]
        with pytest.raises(GradsieveError, match="az was drawn for a target that has no source"):
            loaded.draw_sources(target, torch.zeros_like(target), generator())

    def test_the_checksum_is_the_texts(self, loaded: MultiWay, folder: Path, tmp_path: Path, words: Vocabulary) -> None:
        for name in ("train.az-en.tsv", "dev.az-en.tsv", "test.az-en.tsv"):
            (tmp_path / name).write_bytes((folder / name).read_bytes())
        write_tsv(tmp_path / "train.tr-en.tsv", TR)
        assert load_corpus(tmp_path, ["az", "tr"], "az", words).checksum == loaded.checksum
        write_tsv(tmp_path / "train.tr-en.tsv", [*TR[:-1], ("\u4e01", "house")])
        assert load_corpus(tmp_path, ["az", "tr"], "az", words).checksum != loaded.checksum

    def test_errors(self, folder: Path, tmp_path: Path, words: Vocabulary) -> None:
        with pytest.raises(GradsieveError, match="no dev data for tr"):
            load_corpus(folder, ["az", "tr"], "tr", words)
        with pytest.raises(GradsieveError, match="xx is not among az, tr"):
            load_corpus(folder, ["az", "tr"], "xx", words)
        with pytest.raises(GradsieveError, match=r"cleaning left nothing of .*: 0 kept, 0 empty, 40 overlong"):
            load_corpus(folder, ["az"], "az", words, Limits(max_words=1))
        for name in ("train", "dev", "test"):
            write_tsv(tmp_path / f"{name}.az-en.tsv", PAIRS)
        for raw, message in ((b"bir one\n", r"test.az-en.tsv, line 1: 0 TABs"), (b"\tone\n", "no pair with text")):
            (tmp_path / "test.az-en.tsv").write_bytes(raw)
            with pytest.raises(GradsieveError, match=message):
                load_corpus(tmp_path, ["az"], "az", words)

    @given(st.lists(st.tuples(st.integers(-2, 2), st.integers(-2, 2)), max_size=20))
    def test_numbers_go_by_first_appearance_and_need_both_halves_of_a_key(self, rows: list[tuple[int, int]]) -> None:
        numbers, first = numbered(torch.tensor(rows, dtype=torch.long).view(-1, 2))
        distinct_rows = list(dict.fromkeys(rows))
        assert numbers.tolist() == [distinct_rows.index(row) for row in rows]
        assert first.tolist() == [rows.index(row) for row in distinct_rows]

    def test_keys_are_all_bits_of_a_checksum(self) -> None:
        texts = [str(i) for i in range(20_000)]
        keys = corpus._keys(texts)
        assert keys.numpy().tobytes() == b"".join(hashlib.blake2b(t.encode(), digest_size=16).digest() for t in texts)
        numbers, _ = numbered(torch.cat([keys, keys.flip(0)]))
        assert numbers.tolist() == [*range(20_000), *reversed(range(20_000))]


class TestBatches:
    @given(st.lists(st.integers(1, 50), max_size=60), st.integers(1, 120))
    def test_every_item_once_within_the_budget(self, lengths: list[int], budget: int) -> None:
        batches = cut_by_words(torch.tensor(lengths, dtype=torch.long), budget)
        slow: list[list[int]] = []
        for item, length in enumerate(lengths):
            if not slow or sum(lengths[i] for i in slow[-1]) + length > budget:
                slow.append([])
            slow[-1].append(item)
        assert [batch.tolist() for batch in batches] == slow


def rows_of(items: int, groups: int, seed: int) -> torch.Tensor:
    return torch.rand(items, groups, generator=generator(seed)) < 0.5


class TestDistributions:
    @given(st.integers(1, 6), st.integers(2, 5), st.floats(0.01, 5), st.integers(0, 99))
    def test_against_loops(self, items: int, groups: int, temperature: float, seed: int) -> None:
        rows = rows_of(items, groups, seed)
        similarities = torch.rand(groups, generator=generator(seed))
        related, target = 1, 0
        found = {
            "tcs": tcs_distribution(similarities, temperature)(rows),
            "uniform": uniform_distribution(rows),
            "related": related_distribution(related, target)(rows),
            "first": target_first_distribution(target)(rows),
        }
        for j in range(items):
            have = rows[j].nonzero().flatten().tolist()
            odds = {
                "tcs": {i: ((similarities[i] - similarities[have].max()).double() / temperature).exp() for i in have},
                "uniform": dict.fromkeys(have, 1.0),
                "related": {i: 1.0 for i in have if i in (related, target)},
                "first": {target: 1.0} if target in have else dict.fromkeys(have, 1.0),
            }
            for name, its in odds.items():
                expected = torch.tensor([float(its.get(i, 0.0)) for i in range(groups)])
                expected = expected / expected.sum() if its else expected
                torch.testing.assert_close(found[name][j], expected, atol=1e-5, rtol=1e-4, msg=name)

    def test_extreme_temperatures_and_missing_items(self) -> None:
        rows = torch.tensor([[1, 1, 1], [0, 1, 1], [0, 0, 0]])
        cold = tcs_distribution(torch.tensor([1.0, 0.3, 0.2]), 1e-4)(rows)
        torch.testing.assert_close(cold, torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 0, 0]]))
        hot = tcs_distribution(torch.tensor([1.0, 0.3, 0.2]), 1e6)(rows)
        torch.testing.assert_close(hot, uniform_distribution(rows))
        with pytest.raises(GradsieveError, match="temperature must be above 0"):
            tcs_distribution(torch.zeros(2), 0.0)
        with pytest.raises(GradsieveError, match="similarities must be finite"):
            tcs_distribution(torch.tensor([0.0, float("nan")]), 1.0)

    def test_group_dds_can_imitate_them(self) -> None:
        rows = rows_of(400, 3, 0)
        rows = rows[rows.any(1)]
        dds = GroupDDS(None, 3, 0, generator=generator())
        assert dds.imitate(tcs_distribution(torch.tensor([1.0, 0.5, 0.1]), 0.3), rows, passes=30) < 0.05

    @given(st.lists(st.text("abç ", max_size=8), max_size=5), st.lists(st.text("abç ", max_size=8), max_size=5))
    def test_similarity_against_loops(self, texts: list[str], others: list[str]) -> None:
        assert ngram_similarity(texts, others, (1, 2), 4) == slow_similarity(texts, others, (1, 2), 4)
        assert ngram_similarity(texts, others) == ngram_similarity(others, texts)
        assert ngram_similarity(texts, texts) == (1.0 if "".join(texts).strip() else 0.0)

    def test_the_most_frequent_come_first(self) -> None:
        assert frequent_ngrams(["aab b", "ab"], (1, 2), 3) == ["a", "b", "ab"]
        assert frequent_ngrams(["a b"], (2,)) == [], "no n-gram crosses a space"


def slow_similarity(texts: list[str], others: list[str], n: tuple[int, ...], most_frequent: int) -> float:
    ranked = []
    for side in (texts, others):
        grams = [
            w[i : i + k] for text in side for w in text.split() for k in n for i in range(len(w)) if i + k <= len(w)
        ]
        ranked.append(sorted({*grams}, key=lambda gram: (-grams.count(gram), gram))[:most_frequent])
    length = min(map(len, ranked))
    return sum(gram in ranked[1][:length] for gram in ranked[0][:length]) / length if length else 0.0


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("demo") / "new"
    write_demo_corpus(path)
    return path


class TestDemoCorpus:
    def test_it_is_a_corpus_of_a_poor_language_and_richer_ones(self, demo: Path) -> None:
        assert languages(demo) == ["be", "fr", "hu", "uk"]
        text = {name: dict(map(reversed, read_pairs(demo, "train", name))) for name in languages(demo)}  # type: ignore
        assert len(text["be"]) == 800
        assert all(len(text[name]) > 3000 for name in ("fr", "hu", "uk"))
        assert len(text["be"].keys() & text["uk"].keys()) > 700
        similarity = {name: ngram_similarity(text[name].values(), text["be"].values()) for name in ("uk", "hu", "fr")}
        assert max(similarity, key=similarity.__getitem__) == "uk"

    def test_splits_share_no_english(self, demo: Path) -> None:
        dev, test = ({e for _, e in read_pairs(demo, split, "be")} for split in ("dev", "test"))
        assert (len(dev), len(test)) == (400, 600)
        assert not dev & test
        for language in languages(demo):
            assert not (dev | test) & {e for _, e in read_pairs(demo, "train", language)}

    def test_it_is_the_same_each_time(self, demo: Path, tmp_path: Path) -> None:
        write_demo_corpus(tmp_path)
        assert {p.name: p.read_bytes() for p in demo.iterdir()} == {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def test_catalogues_of_either_byte_order(self) -> None:
        texts = [(b"", b"header"), (b"one", b"adzin")]
        for order in ("little", "big"):
            place, table, strings = 28 + 32, [], b""
            for side in (0, 1):
                for pair in texts:
                    table += [len(pair[side]), place + len(strings)]
                    strings += pair[side] + b"\0"
            numbers = [0x950412DE, 0, 2, 28, 28 + 16, 0, 0, *table]
            raw = b"".join(n.to_bytes(4, order) for n in numbers) + strings  # type: ignore[arg-type]
            assert read_catalogue(raw) == [("", "header"), ("one", "adzin")]

    def test_no_place(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(GradsieveError, match="cannot write to"):
            write_demo_corpus(tmp_path / "file/below")


TED = "talk_name\ten\taz\ttr\n1\tone apple .\tbir alma .\tbir elma .\n1\ttwo\t__NULL__\tiki\n2\t__NULL__\tev\tev\n"


class TestDownload:
    def archive(self, folder: Path, **texts: str) -> str:
        files = {"train": TED, "dev": TED.replace("bir alma .", "_ _ NULL _ _"), "test": TED, **texts}
        with tarfile.open(folder / "ted.tar.gz", "w:gz") as tar:
            for split, text in files.items():
                member = tarfile.TarInfo(f"./all_talks_{split}.tsv")
                member.size = len(text.encode())
                tar.addfile(member, io.BytesIO(text.encode()))
        return (folder / "ted.tar.gz").as_uri()

    def test_it_leaves_the_files_and_nothing_else(self, tmp_path: Path) -> None:
        heard: list[tuple[int, int]] = []
        out = tmp_path / "here/ted"
        url = self.archive(tmp_path)
        assert download_ted(out, ["az", "tr"], url, lambda done, total: heard.append((done, total)))
        names = [f"{split}.{name}-en.tsv" for split in ("dev", "test", "train") for name in ("az", "tr")]
        assert sorted(path.name for path in out.iterdir()) == names[1:], "az has no dev sentence and so no dev file"
        assert list(read_pairs(out, "train", "az")) == [("bir alma .", "one apple .")]
        assert list(read_pairs(out, "train", "tr")) == [("bir elma .", "one apple ."), ("iki", "two")]
        assert heard[-1][0] == heard[-1][1] > 0
        assert not download_ted(out, ["tr"], "file:///nowhere")

    @pytest.mark.parametrize(
        ("texts", "message"),
        [
            ({"dev": TED.replace("\ttr\n", "\txx\n")}, r"all_talks_dev.tsv: no column tr; there are en, az, xx"),
            ({"train": TED + "3\tcut\n"}, r"all_talks_train.tsv, line 5: 2 columns, where there are 4"),
            ({"train": TED.replace("bir elma .", "__NULL__").replace("iki", "__NULL__")}, "no sentence in .* tr"),
            ({"test": ""}, "no column en, az, tr; there are none"),
        ],
    )
    def test_a_wrong_archive_leaves_nothing(self, texts: dict[str, str], message: str, tmp_path: Path) -> None:
        url = self.archive(tmp_path, **texts)
        with pytest.raises(GradsieveError, match=message):
            download_ted(tmp_path / "out", ["az", "tr"], url)
        assert list((tmp_path / "out").iterdir()) == []

    def test_something_else(self, tmp_path: Path) -> None:
        with tarfile.open(tmp_path / "other.tar.gz", "w:gz"):
            pass
        with pytest.raises(GradsieveError, match=r"not the TED corpus: it has no all_talks_test.tsv"):
            download_ted(tmp_path / "out", ["az"], (tmp_path / "other.tar.gz").as_uri())
        whole = Path(self.archive(tmp_path).removeprefix("file://"))
        (tmp_path / "cut.tar.gz").write_bytes(whole.read_bytes()[:-30])
        for name in ("cut.tar.gz", "absent.tar.gz"):
            with pytest.raises(GradsieveError, match="could not fetch"):
                download_ted(tmp_path / "out", ["az"], (tmp_path / name).as_uri())
        assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.skipif(not MT8.is_dir(), reason="the real corpus ../shared/data/mt8 is not on this machine")
def test_the_real_corpus() -> None:
    assert languages(MT8) == ["az", "be", "cs", "gl", "pt", "ru", "sk", "tr"]
    pairs = {name: read_pairs(MT8, "train", name, Limits()) for name in ("az", "be")}
    words = learn_vocabulary(pairs, 1000)
    loaded = load_corpus(MT8, list(pairs), "az", words)
    assert loaded.available.sum(0).tolist() == [5946, 4509]
    assert len(loaded) == len({e for its in pairs.values() for _, e in its})
    references = [e for _, e in read_pairs(MT8, "dev", "az")]
    back = words.decode(words.encode(ENGLISH, references).tolist())
    assert sum(a == b for a, b in zip(back, references, strict=True)) > 0.97 * len(references)
