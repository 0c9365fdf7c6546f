"""A trained scorer as a product: scores of any set, in bounded memory, and training by them."""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch
from conftest import Ended
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet
from test_image_sources import examples as tar_examples
from test_image_sources import make_folder, make_shards, make_tar, own_cache, table  # noqa: F401
from test_runs import CPU, run
from torch import Tensor
from torch.optim import SGD

from gradsieve import DDS, GradsieveError, alignment
from gradsieve.images import parts, use
from gradsieve.images.data import ImageSet
from gradsieve.images.files import Folder, Shards
from gradsieve.images.load import load_splits
from gradsieve.images.scores import best, percentiles, read_scores, write_scores
from gradsieve.images.scoring import BATCH, TrainedScorer, score_set
from gradsieve.images.train import SetUp, cross_entropy
from gradsieve.images.use import score_run
from gradsieve.tasks import recipe_of

IMAGES = ("data.size=8", "model.name=small-cnn", "steps=2", "batch_size=8", "dev_batch_size=4", "data.workers=0")


def read(file: Path) -> dict[str, list[Any]]:
    return parquet.read_table(file).to_pydict()


@pytest.fixture(scope="module")
def signal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the default scorer, long enough that it has learned something."""
    out = tmp_path_factory.mktemp("signal") / "run"
    run(out, "dds", "steps=400", "evaluate_every=400", "checkpoint_every=400", "dds.caution=0.0")
    return out


@pytest.fixture(scope="module")
def mlp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("mlp") / "run"
    run(out, "dds", "scorer.kind=mlp+label")
    return out


class TestScores:
    @pytest.mark.parametrize("kind", ["mlp+label", "conv+label", "mlp"])
    def test_they_are_those_that_the_scorer_gives_in_training(self, kind: str, tmp_path: Path) -> None:
        run(tmp_path / "run", "dds", f"scorer.kind={kind}")
        score_run(tmp_path / "run", tmp_path / "s.parquet", data=None, device=CPU)
        found = read(tmp_path / "s.parquet")
        init = f"scorer.init={tmp_path / 'run/final/scorer.safetensors'}"
        recipe: Any = recipe_of("digits-noisy", [f"scorer.kind={kind}", init])
        splits = load_splits(recipe, None, 0)
        assert found["label"] == splits.train.labels.tolist()  # the damaged ones
        assert found["id"] == [str(row) for row in splits.train.rows.tolist()]
        setup = SetUp(recipe, "dds", splits, 0, CPU)
        scores = torch.tensor(found["score"])
        for batch, _ in zip(setup.stream, range(3), strict=False):
            setup.way.loss(batch).backward()
            setup.optimizer.step()
            record = setup.way.step()
            assert record is not None
            expected = torch.softmax(scores[batch[2]], dim=0)
            torch.testing.assert_close(record.weights, expected, rtol=1e-4, atol=1e-6)
            setup = SetUp(recipe, "dds", splits, 0, CPU)  # this one's scorer has learned since

    def test_the_default_scorer_weighs_a_batch_as_in_training(self, signal: Path) -> None:
        """At the final parameters, with the final dev gradient; the set is one batch of training."""
        trained = TrainedScorer(signal, CPU)
        images = load_splits(trained.recipe, None, 0).train[:64]
        (batch,) = trained.batches(images)
        dds = DDS(
            trained.model, trained.scorer, cross_entropy, SGD(trained.model.parameters(), 0.0), [batch], caution=0.0
        )
        dds.agreement.direction = trained.direction
        dds.loss(batch).backward()
        dds.optimizer.step()
        record = dds.step()
        assert record is not None
        scores = score_set(TrainedScorer(signal, CPU), images, cross_entropy, lambda done, total: None)
        assert float(scores.std()) > 0.1
        torch.testing.assert_close(record.weights, torch.softmax(scores, dim=0), rtol=1e-3, atol=1e-5)

    def test_signals_are_those_of_the_final_model(self, signal: Path) -> None:
        trained = TrainedScorer(signal, CPU)
        images = load_splits(trained.recipe, None, 0).train
        batch = next(iter(trained.batches(images[:40])))
        told = trained.told(batch, cross_entropy)
        torch.testing.assert_close(told["loss"], cross_entropy(trained.model, batch).detach())
        exact = alignment(trained.model, cross_entropy, batch, trained.direction, estimator="per_example")
        assert torch.corrcoef(torch.stack([told["alignment"], exact]))[0, 1] > 0.999
        scores = score_set(trained, images[:40], cross_entropy, lambda done, total: None)
        with torch.no_grad():
            raw = trained.scorer(None, **told)
        torch.testing.assert_close(scores, 2 * torch.tanh(raw / 2), rtol=1e-3, atol=1e-3)

    def test_agreement_in_the_last_layer_is_told_if_it_was_in_training(self, tmp_path: Path) -> None:
        run(tmp_path / "run", "dds", "steps=40", "dds.alignment=last_layer")
        trained = TrainedScorer(tmp_path / "run", CPU)
        batch = next(iter(trained.batches(load_splits(trained.recipe, None, 0).train[:40])))
        told, layer = trained.told(batch, cross_entropy), trained.last_layer
        assert layer is not None
        inputs = list[Tensor]()
        hook = layer.layer.register_forward_hook(lambda _, given, __: inputs.append(given[0].detach()))
        trained.model(batch[0])
        hook.remove()
        v_w, v_b = trained.direction[layer.weight], trained.direction[layer.bias]
        less_common = {layer.weight: v_w, layer.bias: v_b - (inputs[0] @ v_w.T + v_b).mean(0)}
        expected = alignment(trained.model, cross_entropy, batch, less_common, estimator="per_example")
        torch.testing.assert_close(told["alignment"], expected, rtol=1e-3, atol=1e-5)
        assert "1,100 scores" in score_run(tmp_path / "run", tmp_path / "s.parquet", data=None, device=CPU)[0]

    def test_a_scorer_that_was_told_no_alignment_is_told_none(self, tmp_path: Path) -> None:
        """The few steps of this run are those before a budget's first choice, when rewards are rare."""
        run(tmp_path / "run", "dds", "steps=40", "dds.overhead=0.1")
        trained = TrainedScorer(tmp_path / "run", CPU)
        batch = next(iter(trained.batches(load_splits(trained.recipe, None, 0).train[:40])))
        told = trained.told(batch, cross_entropy)
        assert not told["alignment"].any()
        torch.testing.assert_close(told["loss"], cross_entropy(trained.model, batch).detach())
        assert "1,100 scores" in score_run(tmp_path / "run", tmp_path / "s.parquet", data=None, device=CPU)[0]

    def test_they_do_not_hang_on_the_order_of_the_set(self, signal: Path) -> None:
        trained = TrainedScorer(signal, CPU)
        images = load_splits(trained.recipe, None, 0).train
        by_label = images.labels.argsort(stable=True)
        scores = [score_set(trained, s, cross_entropy, lambda *_: None) for s in (images, images[by_label])]
        torch.testing.assert_close(scores[0][by_label], scores[1], rtol=1e-3, atol=1e-3)

    def test_the_user_is_told_that_scores_have_not_proved_their_worth(self, mlp: Path, tmp_path: Path) -> None:
        shutil.copytree(mlp, tmp_path / "run")
        given = tmp_path / "run/final/input.json"
        content = json.loads(given.read_text())
        for trust, told in ((1.0, False), (0.25, True)):
            given.write_text(json.dumps(content | {"trust": trust}))
            lines = score_run(tmp_path / "run", tmp_path / f"{trust}.parquet", data=None, device=CPU)
            assert any("counted by 25%" in line for line in lines) == told
        assert content["trust"] == 1

    def test_wrong_labels_get_low_scores(self, signal: Path, tmp_path: Path) -> None:
        lines = score_run(signal, tmp_path / "s.parquet", data=None, keep=0.6, device=CPU)
        assert "1,100 scores" in lines[0]
        found = read(tmp_path / "s.parquet")
        splits = load_splits(TrainedScorer(signal, CPU).recipe, None, 0)
        assert splits.damaged is not None
        percentile = torch.tensor(found["weight_percentile"])
        assert percentile[~splits.damaged].mean() > percentile[splits.damaged].mean() + 20
        kept = (tmp_path / "s.keep.txt").read_text().splitlines()
        assert len(kept) == 660
        chosen = torch.tensor([name in set(kept) for name in found["id"]])
        assert kept == [name for name, keep in zip(found["id"], chosen, strict=True) if keep]
        assert percentile[chosen].min() >= percentile[~chosen].max()

    def test_the_other_splits(self, mlp: Path, tmp_path: Path) -> None:
        for split, count in (("dev", 100), ("test", 597)):
            score_run(mlp, tmp_path / f"{split}.parquet", data=None, split=split, device=CPU)
            assert len(read(tmp_path / f"{split}.parquet")["id"]) == count

    def test_columns_and_origin(self, mlp: Path, tmp_path: Path) -> None:
        score_run(mlp, tmp_path / "s.parquet", data=None, device=CPU)
        schema = parquet.read_schema(tmp_path / "s.parquet")
        assert [(f.name, str(f.type)) for f in schema] == [
            ("id", "string"),
            ("label", "int64"),
            ("score", "float"),
            ("weight_percentile", "float"),
        ]
        assert json.loads(schema.metadata[b"gradsieve"])["scorer"] == "mlp+label"

    @given(st.lists(st.integers(0, 4), min_size=1, max_size=30), st.floats(0.01, 1))
    def test_percentiles_and_the_best(self, values: list[int], share: float) -> None:
        scores = torch.tensor(values, dtype=torch.float32)
        for value, percentile in zip(values, percentiles(scores).tolist(), strict=True):
            below, equal = sum(v < value for v in values), values.count(value)
            assert percentile == pytest.approx(100 * (below + equal / 2) / len(values), rel=1e-5)
        kept = best(scores, share)
        assert int(kept.sum()) == max(1, round(share * len(values)))
        assert kept.all() or scores[kept].min() >= scores[~kept].max()


class Endless:
    """Pixels made from the number of the row: as many as one likes, nowhere kept."""

    shards: Tensor | None = None
    checksum = "endless"

    def __init__(self, count: int):
        self.labels = torch.arange(count) % 10
        self.most = 0

    def read(self, rows: Sequence[int], generator: torch.Generator | None) -> Tensor:
        self.most = max(self.most, len(rows))
        pixels = torch.tensor(rows).view(-1, 1) * torch.arange(1, 65) % 17
        return pixels.to(torch.uint8).view(-1, 1, 8, 8)

    def id(self, row: int) -> str:
        return f"row {row}"


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads memory from /proc")
@pytest.mark.parametrize("which", ["signal", "mlp"])
def test_100_000_rows_in_bounded_memory(which: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    source, count, sizes = Endless(100_000), 100_000, {}
    images = ImageSet.whole(source)
    trained = TrainedScorer(request.getfixturevalue(which), CPU)

    def on_rows(done: int, total: int) -> None:
        assert total == count
        sizes[done] = resident()

    scores = score_set(trained, images, cross_entropy, on_rows)
    write_scores(tmp_path / "s.parquet", images, scores, {})
    assert source.most == BATCH
    assert max(sizes) == count
    assert max(sizes.values()) - sizes[10 * BATCH] < 16e6  # the pixels alone would be 25e6 as floats
    assert resident() - sizes[10 * BATCH] < 64e6
    file = parquet.ParquetFile(tmp_path / "s.parquet")
    assert file.metadata.num_rows == count
    assert file.num_row_groups > 1
    torch.testing.assert_close(read_scores(tmp_path / "s.parquet", images), scores)


class TestFiles:
    def test_a_folder_and_a_set_that_stands_by_itself(self, call: Callable[..., Ended], tmp_path: Path) -> None:
        make_folder(tmp_path / "data", train=(9, 8), dev=(3, 3), test=(4, 4))
        hostile = tmp_path / "data/train/a" / os.fsdecode(b"line\nbreak \xff.png")
        hostile.write_bytes(next((tmp_path / "data/train/a").iterdir()).read_bytes())
        run(tmp_path / "run", "dds", *IMAGES, recipe="images", data=tmp_path / "data")
        ended = call("score", "run", "--data", "data", "--out", "s.parquet", "--keep", "0.5")
        assert ended.code == 0, ended
        found = read(tmp_path / "s.parquet")
        assert len(found["id"]) == 18
        assert found["id"][0].startswith("train/a/000.")
        assert "train/a/line\\nbreak \\xff.png" in found["id"]
        assert len((tmp_path / "s.keep.txt").read_text().splitlines()) == 9
        assert call("score", "run", "--data", "data/train", "--out", "alone.parquet").code == 0
        assert read(tmp_path / "alone.parquet") == found
        make_folder(tmp_path / "new", more=(2, 2, 2))
        refused = call("score", "run", "--data", "new/more", "--out", "x.parquet")
        assert refused.code == 2
        assert "classes that the training set lacks: c" in refused.err

    def test_shards_and_tables(self, tmp_path: Path) -> None:
        make_shards(tmp_path / "shards", 4, test="test-{:04}.tar")
        run(tmp_path / "run", "dds", *IMAGES, recipe="images", data=tmp_path / "shards")
        score_run(tmp_path / "run", tmp_path / "s.parquet", data=tmp_path / "shards", device=CPU)
        found = read(tmp_path / "s.parquet")
        assert found["id"][:2] == ["train-0000.tar/0000/0000.jpg", "train-0000.tar/0000/0001.jpg"]
        members = [(name.replace("0000/", "k" * 120 + "/"), raw) for name, raw in tar_examples(0, [0, 1, 2])]
        make_tar(tmp_path / "alone/more.tar", members)
        score_run(tmp_path / "run", tmp_path / "more.parquet", data=tmp_path / "alone", device=CPU)
        assert len(set(read(tmp_path / "more.parquet")["id"])) == 3
        (tmp_path / "table").mkdir()
        table([0, 1, 2, 2]).to_parquet(tmp_path / "table/part.parquet")
        score_run(tmp_path / "run", tmp_path / "t.parquet", data=tmp_path / "table", device=CPU)
        assert read(tmp_path / "t.parquet")["id"] == ["rows/0", "rows/1", "rows/2", "rows/3"]
        table([0, 1, 7]).to_parquet(tmp_path / "table/part.parquet")
        with pytest.raises(GradsieveError, match=r"label 7, but .* knows 3 classes"):
            score_run(tmp_path / "run", tmp_path / "x.parquet", data=tmp_path / "table", device=CPU)

    @pytest.mark.parametrize("kind", ["paper", "signal"])
    def test_settings_of_the_run_are_followed(self, kind: str, tmp_path: Path) -> None:
        settings = ("model.channels_last=true", "model.precision=bf16", "optimizer.average=0.5", "dds.max_logit=none")
        run(tmp_path / "run", "dds-retrained", f"scorer.kind={kind}", "model.name=small-cnn", "steps=4", *settings)
        score_run(tmp_path / "run", tmp_path / "s.parquet", data=None, device=CPU)
        assert len(set(read(tmp_path / "s.parquet")["score"])) > 1

    def test_what_cannot_be_scored_is_refused(self, mlp: Path, call: Callable[..., Ended], tmp_path: Path) -> None:
        run(tmp_path / "uniform", "uniform", "steps=2")
        (tmp_path / "file").touch()
        (tmp_path / "text").mkdir()
        (tmp_path / "text/recipe.json").write_text('{"recipe": {"task": "translation"}, "method": "dds", "seed": 0}')
        (tmp_path / "going").mkdir()
        (tmp_path / "going/recipe.json").write_text((mlp / "recipe.json").read_text())
        for arguments, message in (
            (("uniform", "--out", "s.parquet"), "was trained by uniform, which leaves no scorer"),
            (("text", "--out", "s.parquet"), "its scorer chooses languages"),
            (("going", "--out", "s.parquet"), "has not ended yet"),
            (("nowhere", "--out", "s.parquet"), "is no run directory"),
            ((str(mlp), "--out", "s.csv"), "ends in .parquet"),
            ((str(mlp), "--out", "file/s.parquet"), "cannot write file/s.parquet"),
            ((str(mlp), "--out", "s.parquet", "--data", "."), "no --data"),
            ((str(mlp), "--out", "s.parquet", "--split", "all"), "--split is train, dev, test"),
            ((str(mlp), "--out", "s.parquet", "--keep", "0"), "--keep"),
            ((str(mlp), "--out", "s.parquet", "--keep", "1.5"), "--keep"),
        ):
            refused = call("score", *arguments)
            assert refused.code == 2, refused
            assert message in refused.err
            assert not (tmp_path / "s.parquet").exists()

    def test_ids_are_the_same_wherever_a_picture_is_seen_from(self, tmp_path: Path) -> None:
        make_folder(tmp_path, train=(2, 2), dev=(1, 1), test=(1, 1))
        make_shards(tmp_path / "shards", 2)
        folder, tars = Folder(tmp_path / "train", 8), sorted((tmp_path / "shards").glob("train*"))
        assert [folder.id(row)[:-4] for row in range(3)] == ["train/a/000", "train/a/001", "train/b/000"]
        assert Shards(tars, 8).id(3) == Shards(tars[1:], 8).id(0)


class TestTrainingByScores:
    @pytest.fixture
    def scores(self, signal: Path, tmp_path: Path) -> Path:
        score_run(signal, tmp_path / "s.parquet", data=None, device=CPU)
        return tmp_path / "s.parquet"

    def test_filter_and_weight(self, scores: Path) -> None:
        recipe: Any = recipe_of("digits-noisy")
        plain = load_splits(recipe, None, 0)
        best_half: Any = recipe_of("digits-noisy", [f"selection.file={scores}", "selection.keep=0.5"])
        kept = load_splits(best_half, None, 0)
        assert len(kept.train) == 550
        assert kept.damaged is not None
        assert len(kept.damaged) == 550
        assert kept.damaged.float().mean() < 0.3  # of all it is 0.4
        weighted: Any = recipe_of("digits-noisy", [f"selection.file={scores}", "selection.use=weight"])
        weighed = load_splits(weighted, None, 0)
        assert weighed.weights is not None
        assert weighed.weights.mean() == pytest.approx(1)
        assert len({splits.checksum for splits in (plain, kept)}) == 2
        setup = SetUp(weighted, "uniform", weighed, 0, CPU)
        images, labels, index, weights = batch = next(iter(setup.stream))
        torch.testing.assert_close(weights, weighed.weights[index])
        own = cross_entropy(setup.model, (images, labels))
        torch.testing.assert_close(setup.way.loss(batch), (own * weights).mean())

    @pytest.mark.parametrize("method", ["uniform", "uniform+dev", "oracle", "dds", "mentornet", "batchweight", "spcl"])
    @pytest.mark.parametrize("use", ["filter", "weight"])
    def test_every_method(self, method: str, use: str, scores: Path, tmp_path: Path) -> None:
        settings = (f"selection.file={scores}", f"selection.use={use}", "steps=3")
        assert run(tmp_path / "run", method, *settings)["skipped"] == 0

    def test_the_scores_are_part_of_the_run(self, scores: Path, tmp_path: Path) -> None:
        settings = ("steps=2", f"selection.file={scores}")
        run(tmp_path / "run", "uniform", *settings)
        content = parquet.read_table(scores)
        parquet.write_table(content.set_column(2, "score", pyarrow.array([0.5] * len(content))), scores)
        with pytest.raises(GradsieveError, match="holds another run: data was"):
            run(tmp_path / "run", "uniform", *settings, resume=True)

    def test_on_the_command_line(self, scores: Path, call: Callable[..., Ended], tmp_path: Path) -> None:
        settings = ("--set", "steps=2", "--set", "evaluate_every=2")
        ended = call("train", "digits-noisy", "--method", "uniform", "--scores", "s.parquet", "--out", "run", *settings)
        assert ended.code == 0, ended
        assert json.loads((tmp_path / "run/recipe.json").read_text())["recipe"]["selection"] == {
            "file": "s.parquet",
            "use": "filter",
            "keep": 0.8,
        }
        methods = "uniform,uniform:selection.file=s.parquet:selection.keep=0.5"
        assert call("compare", "digits-noisy", "--methods", methods, "--seeds", "1", "--out", "c", *settings).code == 0

    def test_files_of_another_kind_are_refused(self, scores: Path, call: Callable[..., Ended], tmp_path: Path) -> None:
        rows = parquet.read_table(scores)
        (tmp_path / "text.parquet").write_text("id,score")
        parquet.write_table(rows.drop_columns("score"), tmp_path / "none.parquet")
        parquet.write_table(rows.set_column(0, "id", rows["label"]), tmp_path / "numbers.parquet")
        parquet.write_table(rows.slice(5), tmp_path / "part.parquet")
        labels = pyarrow.array([(label + 1) % 10 for label in rows["label"].to_pylist()])
        parquet.write_table(rows.set_column(1, "label", labels), tmp_path / "labels.parquet")
        parquet.write_table(rows.drop_columns("label"), tmp_path / "foreign.parquet")
        for file, message in (
            ("missing.parquet", "is no file"),
            ("text.parquet", "cannot be read as a Parquet file"),
            ("none.parquet", "needs the columns id (text) and score"),
            ("numbers.parquet", "needs the columns id (text) and score"),
            ("part.parquet", "no score for 5 of 1,100"),
            ("labels.parquet", "1,100 examples have another label"),
        ):
            refused = call("train", "digits-noisy", "--scores", file, "--out", "x")
            assert refused.code == 2, refused
            assert message in refused.err
            assert not (tmp_path / "x").exists()
        assert call("train", "digits-noisy", "--scores", "foreign.parquet", "--out", "x", "--set", "steps=1").code == 0
        other_seed = call("train", "digits-noisy", "--seed", "1", "--scores", "s.parquet", "--out", "y")
        assert other_seed.code == 2
        wrong_task = call("train", "translation-demo", "--scores", "s.parquet", "--out", "y")
        assert "unknown key selection" in wrong_task.err
        typo = call("train", "digits", "--scores", "s.parquet", "--set", "selection.keeep=1", "--out", "y")
        assert "did you mean keep" in typo.err


def test_a_restart_finds_the_parts_that_are_done(signal: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART", 300)
    seen: list[int] = []
    measure = use.told_of

    def counted(trained: Any, images: Any, *rest: Any) -> Any:
        seen.append(len(images))
        if len(seen) == 3:
            raise KeyboardInterrupt
        return measure(trained, images, *rest)

    monkeypatch.setattr(use, "told_of", counted)
    with pytest.raises(KeyboardInterrupt):
        score_run(signal, tmp_path / "s.parquet", data=None, device=CPU)
    assert len(list((tmp_path / "s.parts").iterdir())) == 2
    score_run(signal, tmp_path / "s.parquet", data=None, device=CPU)
    assert seen[:3] == [300, 300, 300]
    assert sum(seen[3:]) == len(read(tmp_path / "s.parquet")["id"]) - 600
    monkeypatch.setattr(parts, "PART", 1 << 17)
    monkeypatch.setattr(use, "told_of", measure)
    score_run(signal, tmp_path / "whole.parquet", data=None, device=CPU)
    found, expected = read(tmp_path / "s.parquet"), read(tmp_path / "whole.parquet")
    assert found["id"] == expected["id"]
    assert found["score"] == pytest.approx(expected["score"], abs=1e-2)
    assert not (tmp_path / "s.parts").exists()
