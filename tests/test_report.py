"""The report: what it says of runs, against slow oracles; and the page itself, in a browser where there is one."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import vl_convert
from conftest import Ended
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file
from scipy.stats import binomtest
from selenium import webdriver
from selenium.webdriver import ActionChains, Keys
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import Select, WebDriverWait
from test_runs import run

from gradsieve import GradsieveError
from gradsieve.images.data import ImageSet, Memory, Splits
from gradsieve.images.examples import PROBABILITIES, SHOWN, choose, mean_weights, save_examples, thumbnails
from gradsieve.images.load import load_splits
from gradsieve.report.page.build import render, write_report
from gradsieve.report.page.curves import binned, noted, over_seeds, points_each
from gradsieve.report.page.details import class_rows
from gradsieve.report.page.detection import auroc, precision_at, suspicions
from gradsieve.report.page.durations import FIRST, TRAINING, divided, parts, step_times
from gradsieve.report.page.gallery import gallery, short_names
from gradsieve.report.page.intervals import wilson
from gradsieve.report.page.languages import samples
from gradsieve.report.page.naming import experiments
from gradsieve.report.page.read import Run, find_runs
from gradsieve.report.page.spread import EDGES, class_shares, groups, histogram, quantiles
from gradsieve.runs.directory import RunDirectory
from gradsieve.runs.timing import Times
from gradsieve.tasks import TASKS, recipe_of

HOSTILE = "</script><img src=x onerror=window.hit=1>"
LIMIT = 5_000_000
PATIENCE = 300
"""Seconds that a browser on a busy machine may take for anything."""
LINES = ("steps=60", "evaluate_every=20", "checkpoint_every=30", "dev_holdout=0.3")


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison on digits: two seeds of two methods, one seed of a third, and one that was retrained."""
    folder = tmp_path_factory.mktemp("compared")
    for method, seeds in (("uniform", 2), ("dds", 2), ("batchweight", 1), ("dds-retrained", 1)):
        for seed in range(seeds):
            run(folder / method / f"seed-{seed}", method, *LINES, seed=seed)
    return folder


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs whose classes, files and description would take over a page that lets them."""
    folder = tmp_path_factory.mktemp("hostile")
    recipe = folder / "own.toml"
    text = json.dumps(HOSTILE)
    recipe.write_text(
        f'task = "images"\ndescription = {text}\nsteps = 20\n[data]\nname = "images"\n[model]\nname = "mlp"'
    )
    settings = (
        "steps=20",
        "evaluate_every=10",
        "checkpoint_every=10",
        "batch_size=8",
        "data.size=8",
        "dev_batch_size=4",
    )
    pixels = np.random.default_rng(0).integers(0, 255, (40, 8, 8, 3), np.uint8)
    for split in ("train", "dev", "test"):
        for number, name in enumerate(("<img src=x onerror=window.hit=1>", "b\"'&amp;{{7*7}}")):
            place = folder / "folders" / split / name
            place.mkdir(parents=True)
            for i in range(12):
                Image.fromarray(pixels[12 * number + i]).save(place / f"<svg onload=window.hit=1>{i}.png")
    shutil.copy(next(place.iterdir()), bytes(folder / "folders/train" / name) + b"/\xff.png")
    features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=[HOSTILE, "other"]))
    rows = {"image": [Image.fromarray(each) for each in pixels], "label": [i % 2 for i in range(40)]}
    table = datasets.Dataset.from_dict(rows, features)
    datasets.DatasetDict(train=table, test=table).save_to_disk(folder / "table")
    for kind in ("folders", "table"):
        run(folder / f"runs/{kind}", "dds", *settings, recipe=str(recipe), data=folder / kind)
    return folder / "runs"


@pytest.fixture(scope="module")
def translated(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    """Two methods on text that has a hostile sentence in its test set."""
    folder = tmp_path_factory.mktemp("translated")
    shutil.copytree(text, folder / "text")
    lines = (text / "test.az-en.tsv").read_text().splitlines()
    lines[0] = f"{HOSTILE} oneak\t{HOSTILE} one"
    (folder / "text/test.az-en.tsv").write_text("".join(line + "\n" for line in lines))
    for method in ("uniform", "dds"):
        run(folder / "runs" / method, method, recipe="translation", data=folder / "text")
    return folder / "runs"


def page_of(*folders: Path) -> str:
    return render(find_runs(folders), TASKS)


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


class Elements(HTMLParser):
    """Every element and attribute of a page, as a browser would find them; and its text."""

    def __init__(self, page: str):
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


class TestFigures:
    """Pure functions, each against a slow and obvious way to the same number."""

    @given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=2, max_size=12))
    def test_auroc_is_the_chance_that_a_wrong_label_looks_worse(self, rows: list[tuple[int, bool]]) -> None:
        suspicion, wrong = np.array([s for s, _ in rows], float), np.array([w for _, w in rows])
        if not wrong.any() or wrong.all():
            return
        pairs = [(a > b) + 0.5 * (a == b) for a in suspicion[wrong] for b in suspicion[~wrong]]
        assert auroc(suspicion, wrong) == pytest.approx(np.mean(pairs))

    @given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=10))
    def test_precision_at_k_breaks_ties_at_random(self, rows: list[tuple[int, bool]]) -> None:
        suspicion, wrong = np.array([s for s, _ in rows], float), np.array([w for _, w in rows])
        for k in range(1, len(rows) + 1):
            threshold = sorted(suspicion)[-k]
            surely, tied = suspicion > threshold, suspicion == threshold
            expected = (wrong[surely].sum() + wrong[tied].mean() * (k - surely.sum())) / k
            assert precision_at(suspicion, wrong, np.array([k]))[0] == pytest.approx(expected)

    @given(
        st.lists(st.dictionaries(st.integers(1, 100), st.floats(-9, 9), max_size=30), min_size=1, max_size=4),
        st.sampled_from([3, 10, 200]),
    )
    def test_bins_hold_means(self, series: list[dict[int, float]], points: int) -> None:
        steps, rows = binned(series, 100, points)
        assert len(steps) <= points + 1
        assert steps == sorted(set(steps))
        width = max(1.0, 100 / points)
        for own, row in zip(series, rows, strict=True):
            for end, value in zip(steps, row, strict=True):
                inside = [v for step, v in own.items() if -(-step // width) == -(-end // width)]
                assert value == (pytest.approx(sum(inside) / len(inside)) if inside else None)
        if points == 200:  # no denser than the grid: nothing is lost
            assert steps == sorted({step for own in series for step in own})

    def test_means_over_seeds_are_of_those_that_got_so_far(self) -> None:
        assert over_seeds([[1.0, 2.0, None], [3.0, None, None]]) == {
            "value": [2.0, 2.0, None],
            "low": [1.0, 2.0, None],
            "high": [3.0, 2.0, None],
        }
        assert points_each(10**6) >= 30
        assert points_each(1) <= 150

    def test_weights_by_group(self) -> None:
        generator = np.random.default_rng(0)
        weights = generator.exponential(size=(3, 50)).astype(np.float32)
        weights[0, :20] = np.nan
        wrong = generator.random(50) < 0.4
        found = quantiles(np.array([1, 2, 3]), weights, wrong)
        assert [line["group"] for line in found] == ["right labels", "wrong labels"]
        for line, members in zip(found, (~wrong, wrong), strict=True):
            for i in range(3):
                own = sorted(w for w, member in zip(weights[i], members, strict=True) if member and np.isfinite(w))
                middle = (len(own) - 1) / 2
                expected = (own[int(np.floor(middle))] + own[int(np.ceil(middle))]) / 2
                assert line["q50"][i] == pytest.approx(expected, rel=1e-3)
        bars = histogram(np.array([0.0, 0.9, 1.1, 100.0, np.nan]), None)
        assert sum(bar["count"] for bar in bars) == 4
        assert min(bar["low"] for bar in bars) == EDGES[0]
        assert max(bar["high"] for bar in bars) == EDGES[-1]
        assert list(groups(5, np.zeros(5, bool))) == list(groups(5, np.zeros(4, bool))) == ["all examples"]

    @given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 9)), min_size=1, max_size=20))
    def test_class_shares(self, rows: list[tuple[int, float]]) -> None:
        labels, mean = np.array([label for label, _ in rows]), np.array([w for _, w in rows])
        for label, (data, trained) in enumerate(class_shares(labels, mean, 4)):
            assert data == pytest.approx(100 * sum(own == label for own, _ in rows) / len(rows))
            if mean.sum() > 1e-6:
                assert trained == pytest.approx(100 * sum(w for own, w in rows if own == label) / mean.sum())

    def test_of_many_classes_those_that_changed_most(self) -> None:
        labels = np.arange(1000).repeat(2)
        mean = np.where(labels == 7, 30.0, np.where(labels == 9, 0.0, 1.0))
        shown = [row["label"] for row in class_rows(labels, mean, [])]
        assert len(shown) == 60
        assert shown[0] == "7"
        assert shown[-1] == "9"

    @given(st.integers(0, 50), st.integers(1, 50))
    def test_the_interval_of_an_accuracy(self, right: int, more: int) -> None:
        expected = binomtest(right, right + more).proportion_ci(0.95, method="wilson")
        assert wilson(100 * right / (right + more), right + more) == pytest.approx(
            (100 * expected.low, 100 * expected.high), abs=0.01
        )

    def test_time_is_divided_without_loss(self) -> None:
        assert divided(10.0, {}) == {TRAINING: 10.0}
        for in_step in ({"data": 1.0, "loss": 3.0}, {"data": 5.0, "method": 30.0}):
            assert sum(divided(10.0, in_step).values()) == pytest.approx(10.0)

    def test_steps_that_wait_for_no_device_are_not_timed(self) -> None:
        times = Times(torch.device("meta"))
        with times.part("loss"):
            pass
        times.after_step(next_waits=False)
        assert times.state_dict() == {"around": {}, "in_step": {}, "timed_steps": 0, "history": []}

    def test_times_of_steps_are_means_between_evaluations(self, tmp_path: Path) -> None:
        times = Times(torch.device("cpu"))
        for step in range(1, 7):
            times.in_step = {"loss": 0.25 * step * step, "method": 1.0 * step}
            times.after_step(next_waits=False)
            if step in (2, 6):
                times.note(step)
        (tmp_path / "time.json").write_text(json.dumps(times.state_dict()))
        own = Run(tmp_path, {})
        assert step_times(own, ["loss"]) == {2: 1000 * 0.25 * 4 / 2, 6: 1000 * 0.25 * (36 - 4) / 4}
        assert step_times(own, ["method"]) == {2: 1000, 6: 1000}
        assert step_times(own) == {2: 1500, 6: 3000}
        assert step_times(Run(tmp_path / "older", {})) == {}

    def test_names_without_what_they_share(self) -> None:
        assert short_names(["/data/train/a/1.png", "/data/train/b/2.png", ""]) == ["a/1.png", "b/2.png", ""]
        assert short_names(["x, row 3", ""]) == ["x, row 3", ""]


class TestHoldout:
    def test_it_is_taken_evenly_and_the_same_each_time(self) -> None:
        whole = load_splits(recipe_of("digits"), None, 3).dev
        recipe = recipe_of("digits", ["dev_holdout=0.3"])
        splits, again = load_splits(recipe, None, 3), load_splits(recipe, None, 3)
        assert splits.dev_holdout is not None
        assert again.dev_holdout is not None
        assert torch.equal(splits.dev_holdout.rows, again.dev_holdout.rows)
        assert sorted([*splits.dev.rows.tolist(), *splits.dev_holdout.rows.tolist()]) == sorted(whole.rows.tolist())
        assert len(splits.dev_holdout) == 30
        for label in range(10):
            count = int((whole.labels == label).sum())
            assert abs(int((splits.dev_holdout.labels == label).sum()) - 0.3 * count) <= 1

    @pytest.mark.parametrize("share", [0.001, 1.0])
    def test_a_share_that_leaves_nothing(self, share: float) -> None:
        with pytest.raises(GradsieveError, match="dev_holdout"):
            load_splits(recipe_of("digits", [f"dev_holdout={share}"]), None, 0)

    def test_it_is_measured_and_steers_nothing(self, compared: Path, tmp_path: Path) -> None:
        seen, held = (noted(find_runs([compared / "dds/seed-0"])[0], key, "loss") for key in ("dev", "dev_holdout"))
        assert list(seen) == list(held) == [20, 40, 60]
        assert seen != held
        (alone,) = find_runs([compared / "dds/seed-0"])
        assert alone.about["sizes"] == {"train": 1100, "dev": 70, "dev_holdout": 30, "test": 597}

    def test_no_method_may_have_its_own(self, call: Callable[..., Ended]) -> None:
        ended = call("compare", "digits", "--methods", "uniform,dds:dev_holdout=0.5", "--out", "here")
        assert ended.code == 2
        assert "dev_holdout=0.5 would not be the same" in ended.err


class TestExamples:
    def test_they_are_the_same_after_a_stop(self, tmp_path: Path, stopped: Callable[..., Any], compared: Path) -> None:
        with stopped(45):
            run(tmp_path / "run", "dds", *LINES)
        assert (tmp_path / "run/examples.safetensors").exists()  # a report needs no end
        run(tmp_path / "run", "dds", *LINES, resume=True)
        for name in ("examples.safetensors", "examples.json"):
            assert (tmp_path / "run" / name).read_bytes() == (compared / "dds/seed-0" / name).read_bytes()
        times = json.loads((tmp_path / "run/time.json").read_text())
        assert times["step"] == 60
        assert times["timed_steps"] == 60
        assert [noted["step"] for noted in times["history"]] == [20, 40, 60]

    def test_what_is_kept(self, compared: Path) -> None:
        kept = load_file(compared / "dds/seed-0/examples.safetensors")
        weights = mean_weights(compared / "dds/seed-0", 1100)
        assert weights is not None
        assert kept["labels"].shape == kept["losses"].shape == kept["damaged"].shape == (1100,)
        assert kept["probabilities"].shape == (1100, 10)
        assert set(weights.argsort()[:5].tolist()) <= set(kept["shown"].tolist())
        assert set(weights.argsort()[-5:].tolist()) <= set(kept["shown"].tolist())
        losses = -kept["probabilities"].float().gather(1, kept["labels"].long()[:, None]).squeeze(1).log()
        likely = kept["losses"] < 5
        torch.testing.assert_close(kept["losses"].float()[likely], losses[likely], rtol=0.02, atol=0.01)

    def test_they_stay_small(self, tmp_path: Path) -> None:
        count, classes = 200_000, 1000
        labels = torch.arange(count) % classes
        images = ImageSet.whole(
            Memory(torch.zeros(1, 3, 224, 224, dtype=torch.uint8).expand(count, -1, -1, -1), labels)
        )
        splits = Splits(images, images[:9], images[:9], classes, (0.0,) * 3, (1.0,) * 3)
        folder = RunDirectory(tmp_path / "run", recipe_of("digits"), "dds", 0, "", resume=False)
        seen = {"losses": torch.rand(count).half(), "predicted": labels}
        with folder.opened({}):
            save_examples(folder, splits, images, torch.zeros(count, dtype=torch.bool), seen)
        assert (tmp_path / "run/examples.safetensors").stat().st_size < 2_000_000
        assert PROBABILITIES * 2 < LIMIT
        assert thumbnails(torch.randint(0, 17, (2, 1, 224, 300))).shape == (2, 1, 48, 48)
        assert int(thumbnails(torch.full((1, 3, 8, 8), 16)).max()) == 255

    def test_choice(self) -> None:
        weights = torch.arange(200.0)
        weights[:3] = torch.nan
        labels = torch.zeros(200, dtype=torch.long)
        predicted = torch.zeros(200, dtype=torch.long)
        predicted[100] = 1
        shown = set(choose(weights, labels, {"predicted": predicted, "losses": -weights.nan_to_num()}).tolist())
        assert {3, 3 + SHOWN - 1, 199, 200 - SHOWN, 100, 0} <= shown
        assert len(choose(None, labels, {})) == 0


class TestReading:
    def test_methods_are_told_apart_by_what_differs(self, compared: Path, tmp_path: Path) -> None:
        (found,) = experiments(find_runs([compared]))
        assert list(found.variants) == ["uniform", "batchweight", "dds", "dds-retrained"]
        assert list(found.variants["dds"]) == [0, 1]
        for name, changed in (("a", {"dds": {"max_logit": 7.0}}), ("b", {"steps": 99}), ("c", {})):
            shutil.copytree(compared / "dds/seed-0", tmp_path / name)
            settings = json.loads((tmp_path / name / "recipe.json").read_text())
            for key, value in changed.items():
                settings["recipe"][key] = {**settings["recipe"][key], **value} if isinstance(value, dict) else value
            (tmp_path / name / "recipe.json").write_text(json.dumps(settings))
        first, second = experiments(find_runs([compared, tmp_path]))
        assert "dds:dds.max_logit=7.0" in first.variants
        assert sum("seed-0]" in name or "/c]" in name for name in first.variants) == 2
        assert second.title == "digits-noisy, steps=99"
        assert list(second.variants) == ["dds"]
        assert "digits-noisy, steps=60" in page_of(compared, tmp_path)

    def test_folders_without_runs(self, call: Callable[..., Ended], tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        (tmp_path / "broken").mkdir()
        (tmp_path / "broken/recipe.json").write_text('{"recipe": {}}')
        for folder, message in (("empty", "holds no run"), ("nowhere", "no folder"), ("broken", "damaged")):
            ended = call("report", folder)
            assert ended.code == 2
            assert message in ended.err
            assert "Traceback" not in ended.err
        assert call("report").code == 2

    def test_the_command(self, call: Callable[..., Ended], compared: Path, tmp_path: Path) -> None:
        shutil.copytree(compared, tmp_path / "runs")
        ended = call("report", "runs")
        assert (ended.code, ended.out) == (0, "The report is runs/report.html\n")
        assert call("report", "runs/dds/seed-0", "runs/uniform/seed-0", "--out", "new/[b]two.html").code == 0
        assert (tmp_path / "new/[b]two.html").stat().st_size < LIMIT
        assert [file.name for file in (tmp_path / "new").iterdir()] == ["[b]two.html"]
        (tmp_path / "file").touch()
        ended = call("report", "runs", "--out", "file/below.html")
        assert ended.code == 2
        assert "cannot write" in ended.err

    def test_tasks_are_not_mixed(self, compared: Path, translated: Path) -> None:
        with pytest.raises(GradsieveError, match="images and translation"):
            page_of(compared, translated)


class TestPage:
    def test_of_a_comparison(self, compared: Path) -> None:
        page = page_of(compared)
        assert len(page) < 1_500_000
        data = data_of(page)
        charts = ("dev", "loss", "effective", "reward_mean", "holdout", "weights", "classes", "time", "step_method")
        assert set(charts) <= set(data["charts"])
        assert [method["name"] for method in data["methods"]] == ["uniform", "batchweight", "dds", "dds-retrained"]
        text = Elements(page).text
        for expected in (
            "Against uniform",
            "597 test",
            "40% of the training labels",
            "Most wanted",
            "AUROC",
            "weight 0",
        ):
            assert expected in text
        spent = parts(find_runs([compared / "dds-retrained"])[0])
        assert FIRST in spent
        assert "rewards and scorer" in spent

    def test_every_chart_is_valid(self, compared: Path, translated: Path) -> None:
        for folder in (compared, translated):
            for chart in data_of(page_of(folder))["charts"].values():
                assert vl_convert.vegalite_to_vega(chart["spec"] | {"datasets": {"rows": []}})["marks"]

    def test_of_a_translation(self, translated: Path) -> None:
        page = page_of(translated)
        data = data_of(page)
        assert {"dev", "dev_loss", "usage", "agreement", "holdout", "time", "step_method"} <= set(data["charts"])
        steering, dev = data["charts"]["holdout"]["data"]
        assert steering["step"] == dev["step"]
        assert steering["mean"] != dev["mean"]
        assert "all of it is held out" in page
        spent = parts(find_runs([translated / "dds"])[0])
        assert {"reading batches", "forward pass and weights", "rewards and scorer"} <= set(spent)
        assert {line["language"] for line in data["details"]["1-0"]["usage"]} == {"az", "ru", "tr"}
        assert "az" not in {line["language"] for line in data["details"]["1-0"]["agreement"]}
        runs = dict(zip(("uniform", "dds"), find_runs([translated / "uniform", translated / "dds"]), strict=True))
        first = samples(runs)[0]
        assert first["source"] == f"{HOSTILE} oneak"
        assert list(first["translations"]) == ["uniform", "dds"]
        assert "bootstrap p" in page

    def test_the_scores_that_find_wrong_labels(self, compared: Path) -> None:
        (ended,) = find_runs([compared / "dds/seed-1"])
        found = suspicions(ended)
        assert found is not None
        scores, wrong = found
        assert list(scores) == ["weight", "loss", "cleanlab"]
        assert wrong.sum() == 440
        assert all(auroc(score, wrong) > 0.6 for score in scores.values())
        pictures = gallery(ended)
        assert list(pictures) == ["most wanted", "least wanted", "thought wrong"]
        weights = [picture.weight for picture in pictures["least wanted"] if picture.weight is not None]
        assert weights == sorted(weights)
        assert max(weights) < min(p.weight for p in pictures["most wanted"] if p.weight is not None)
        assert all(picture.predicted != picture.label for picture in pictures["thought wrong"])
        (plain,) = find_runs([compared / "uniform/seed-0"])
        assert list(gallery(plain)) == ["hardest"]

    def test_of_runs_that_are_still_going(self, compared: Path, tmp_path: Path) -> None:
        shutil.copytree(compared, tmp_path / "runs")
        for going in ("dds/seed-1", "uniform/seed-1", "batchweight/seed-0"):
            folder = tmp_path / "runs" / going
            for name in ("result.json", "damaged.safetensors", "time.json"):
                (folder / name).unlink(missing_ok=True)
            lines = (folder / "metrics.jsonl").read_text()
            (folder / "metrics.jsonl").write_text(lines[: 2 * len(lines) // 3])
        (tmp_path / "runs/batchweight/seed-0/metrics.jsonl").unlink()
        shutil.rmtree(tmp_path / "runs/batchweight/seed-0/scores")
        text = Elements(page_of(tmp_path / "runs")).text
        assert "3 runs not ended" in text
        assert "batchweight, seed 0: step 0 of 60" in text
        assert re.search(r"dds, seed 1: step [2-5]\d of 60", text)
        page = page_of(tmp_path / "runs/dds/seed-1")
        assert re.search(r"dds is at step [2-5]\d of 60", page)
        shutil.rmtree(tmp_path / "runs/dds/seed-1/scores")
        for name in ("examples.safetensors", "examples.json", "metrics.jsonl", "environment.json"):
            (tmp_path / "runs/dds/seed-1" / name).unlink()
        assert "step 0 of 60" in page_of(tmp_path / "runs/dds/seed-1")

    def test_long_runs_and_many_make_no_large_page(self, compared: Path, tmp_path: Path) -> None:
        settings = json.loads((compared / "dds/seed-0/recipe.json").read_text())
        settings["recipe"] |= {"steps": 200_000}
        figures = {"loss": 1 / 3, "reward_mean": 1 / 7, "reward_std": 1 / 9, "effective_sample_size": 10 / 3}
        lines = [json.dumps({"step": 50 * i, **figures}) + "\n" for i in range(1, 4001)]
        for number in range(12):
            folder = tmp_path / f"dds/seed-{number}"
            folder.mkdir(parents=True)
            (folder / "recipe.json").write_text(json.dumps(settings | {"seed": number}))
            (folder / "metrics.jsonl").write_text("".join(lines))
        assert len(page_of(tmp_path)) < LIMIT

    @pytest.mark.parametrize("kind", ["folders", "table"])
    def test_what_data_say_is_only_text(self, hostile: Path, kind: str) -> None:
        page = page_of(hostile / kind)
        elements = Elements(page)
        assert [tag for tag, _ in elements.found].count("script") == 3
        for tag, attributes in elements.found:
            assert not any(name.startswith("on") for name in attributes)
            assert tag != "img" or str(attributes["src"]).startswith("data:image/")
        assert HOSTILE in elements.text  # the description
        if kind == "table":
            assert f"labelled {HOSTILE}" in re.sub(r"\s+", " ", elements.text)
        else:
            assert "<svg onload=window.hit=1>" in elements.text
            assert "\\xff.png" in (hostile / "folders/examples.json").read_text()
            assert "{{7*7}}" in elements.text

    def test_sentences_are_only_text(self, translated: Path) -> None:
        elements = Elements(page_of(translated))
        assert elements.text.count(HOSTILE) >= 2
        assert not [attributes for tag, attributes in elements.found if tag == "img"]

    def test_it_asks_for_nothing(self, compared: Path) -> None:
        for tag, attributes in Elements(page_of(compared)).found:
            for name in ("src", "href", "srcset", "action"):
                value = attributes.get(name)
                assert value is None or re.match(r"data:|#", value), (tag, value)


def channel(value: int) -> float:
    share = value / 255
    return share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4


def contrast(first: str, second: str) -> float:
    """By WCAG 2."""
    lights = []
    for colour in (first, second):
        red, green, blue = (channel(int(colour[i : i + 2], 16)) for i in (1, 3, 5))
        lights.append(0.2126 * red + 0.7152 * green + 0.0722 * blue)
    return (max(lights) + 0.05) / (min(lights) + 0.05)


def test_colours_can_be_told_from_the_paper() -> None:
    style = (files("gradsieve.report.page") / "page.css").read_text()
    blocks = [dict(re.findall(r"--(\w+): (#\w{6})", block)) for block in re.findall(r"\{([^{}]*--c8[^{}]*)\}", style)]
    assert len(blocks) == 4  # light, dark, dark by choice, print
    assert blocks[1] == blocks[2]
    for own in blocks:
        for paper in ("paper", "panel"):
            assert all(contrast(own[name], own[paper]) >= 4.5 for name in ("ink", "quiet", "good", "bad", "accent"))
        assert all(contrast(own[f"c{number}"], own["paper"]) >= 3 for number in range(9))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium without a window. Debian has both as packages: chromium, chromium-driver."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver = shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("there is no Chromium with its driver here")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    started = webdriver.Chrome(options=options, service=Service(driver))
    started.set_script_timeout(PATIENCE)
    started.set_page_load_timeout(PATIENCE)
    yield started
    started.quit()


class Opened:
    """A page in the browser."""

    def __init__(self, browser: Any, file: Path, *, width: int = 1280, dark: bool = False):
        self.browser = browser
        self.logs("browser"), self.logs("performance")  # what an earlier page left
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.get(file.as_uri())
        self.wait("return document.documentElement.dataset.drawn === 'yes'")

    def run(self, script: str, *arguments: Any) -> Any:
        return self.browser.execute_script(script, *arguments)

    def wait(self, condition: str) -> None:
        WebDriverWait(self.browser, PATIENCE, poll_frequency=0.05).until(lambda _: self.run(condition))

    def logs(self, kind: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.browser.get_log(kind)
        return found

    def requests(self) -> list[str]:
        events = [json.loads(entry["message"])["message"] for entry in self.logs("performance")]
        return [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]

    def variants(self, chart: str) -> set[str]:
        """Which methods a chart has lines of."""
        rows = f"[...gradsieve.views].find(([f]) => f.dataset.chart === '{chart}')[1].data('rows')"
        return set(self.run(f"return {rows}.map((row) => row.variant)"))


@pytest.fixture(scope="module")
def pages(compared: Path, hostile: Path, translated: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Written pages, by what they are of."""
    place = tmp_path_factory.mktemp("pages")
    folders = {
        "compared": compared,
        "translated": translated,
        "hostile": hostile / "table",
        "files": hostile / "folders",
        "begun": place / "begun",
    }
    shutil.copytree(compared / "dds/seed-0", place / "begun", ignore=shutil.ignore_patterns("result.json"))
    lines = (place / "begun/metrics.jsonl").read_text().splitlines(keepends=True)
    first = next(number for number, line in enumerate(lines) if '"dev"' in line)
    (place / "begun/metrics.jsonl").write_text("".join(lines[: first + 1]))
    return {name: write_report([folder], place / f"{name}.html", TASKS) for name, folder in folders.items()}


class TestInABrowser:
    @pytest.mark.parametrize("name", ["compared", "translated", "hostile", "files", "begun"])
    def test_it_draws_everything_without_a_complaint_or_a_request(
        self, browser: Any, pages: dict[str, Path], name: str
    ) -> None:
        page = Opened(browser, pages[name])
        drawn = page.run(
            "return [...document.querySelectorAll('figure[data-chart]')].map((f) => [f.dataset.chart,"
            " f.querySelectorAll('svg path, svg rect, svg text').length, f.querySelector('.absent').hidden])"
        )
        expected = data_of(pages[name].read_text())["charts"]
        assert {chart for chart, _, _ in drawn} == set(expected)
        assert all(marks > 5 and shown for _, marks, shown in drawn), drawn
        assert page.logs("browser") == []
        asked = page.requests()
        assert pages[name].as_uri() in asked  # so others would be seen too
        assert [url for url in asked if not url.startswith(("data:", pages[name].as_uri()))] == []
        assert page.run("return window.hit === undefined && !document.querySelector('img[src=x], svg[onload]')")

    def test_a_line_of_one_point_is_seen(self, browser: Any, pages: dict[str, Path]) -> None:
        page = Opened(browser, pages["begun"])
        opacity = "return document.querySelector('[data-chart={}] .mark-symbol path').getAttribute('opacity')"
        assert page.run(opacity.format("dev")) == "1"
        assert page.run(opacity.format("step")) == "0"  # of a longer one, only under the pointer

    def test_choosing_methods_seeds_and_steps_changes_the_curves(self, browser: Any, pages: dict[str, Path]) -> None:
        page = Opened(browser, pages["compared"])
        everyone = {"uniform", "batchweight", "dds", "dds-retrained"}
        assert page.variants("dev") == everyone
        paths = "return document.querySelectorAll('[data-chart=dev] .mark-line path').length"
        assert page.run(paths) == 4
        browser.find_element("css selector", "input[name=method][value='0']").click()
        page.wait(f"{paths} === 3")
        assert page.variants("dev") == page.variants("loss") == everyone - {"uniform"}
        assert "batchweight, dds, dds-retrained, steps 0 to 60" in page.run(
            "return document.querySelector('.said').textContent"
        )
        Select(browser.find_element("name", "seed")).select_by_value("1")
        page.wait(f"{paths} === 1")
        assert page.variants("dev") == {"dds"}
        field = browser.find_element("name", "last")
        field.clear()
        field.send_keys("40", Keys.TAB)
        rows = "[...gradsieve.views].find(([f]) => f.dataset.chart === 'dev')[1].data('rows')"
        page.wait(f"return Math.max(...{rows}.map((row) => row.step)) === 40")
        browser.find_element("name", "all").click()
        page.wait(f"return Math.max(...{rows}.map((row) => row.step)) === 60")
        assert page.logs("browser") == []

    def test_dragging_looks_closer_and_a_double_click_back(self, browser: Any, pages: dict[str, Path]) -> None:
        page = Opened(browser, pages["compared"])
        plot = browser.find_element("css selector", "[data-chart=loss] .plot")
        page.run("arguments[0].scrollIntoView({block: 'center'})", plot)
        ActionChains(browser).move_to_element_with_offset(plot, 0, -40).click_and_hold().move_by_offset(
            90, 5
        ).release().perform()
        page.wait("return gradsieve.shown.first > 0")
        first, last = page.run("return [gradsieve.shown.first, gradsieve.shown.last]")
        assert 20 < first < last < 55
        assert page.run("return document.getElementById('chooser').elements.first.valueAsNumber") == first
        ActionChains(browser).move_to_element(plot).double_click().perform()
        page.wait("return gradsieve.shown.first === 0 && gradsieve.shown.last === 60")

    def test_choosing_a_run_changes_what_is_shown_of_it(self, browser: Any, pages: dict[str, Path]) -> None:
        page = Opened(browser, pages["compared"])
        figures = "JSON.stringify([...gradsieve.views].find(([f]) => f.dataset.chart === 'weights')[1].data('rows'))"
        before = page.run(f"return {figures}")
        pictures = (
            "return [...document.querySelectorAll('.galleries:not([hidden]) img')].map((image) => image.src).join()"
        )
        seen = page.run(pictures)
        Select(browser.find_element("name", "run")).select_by_visible_text("dds, seed 1")
        WebDriverWait(browser, PATIENCE).until(lambda _: page.run(f"return {figures}") != before)
        assert page.run(pictures) != seen
        Select(browser.find_element("name", "run")).select_by_visible_text("uniform, seed 0")
        page.wait("return !document.querySelector('[data-chart=weights] .absent').hidden")
        assert "Hardest for the model" in browser.find_element("id", "closer").text

    def test_figures_tell_themselves_under_the_pointer_and_as_a_table(
        self, browser: Any, pages: dict[str, Path]
    ) -> None:
        page = Opened(browser, pages["compared"])
        plot = browser.find_element("css selector", "[data-chart=dev] .plot")
        page.run("arguments[0].scrollIntoView({block: 'center'})", plot)
        ActionChains(browser).move_to_element_with_offset(plot, 60, 0).perform()
        page.wait("return document.querySelector('#vg-tooltip-element.visible')")
        told = browser.find_element("id", "vg-tooltip-element").text
        assert re.search(r"method\s+(uniform|batchweight|dds|dds-retrained)\b", told)
        assert re.search(r"step\s+\d+\s+Dev accuracy\s+\d", told)
        page = Opened(browser, pages["hostile"])
        mark = browser.find_element("css selector", "[data-chart=classes] .mark-symbol path")
        page.run("arguments[0].scrollIntoView({block: 'center'})", mark)
        ActionChains(browser).move_to_element(mark).perform()
        page.wait("return document.querySelector('#vg-tooltip-element.visible')")
        tooltip = browser.find_element("id", "vg-tooltip-element")
        assert HOSTILE in tooltip.text or "other" in tooltip.text
        assert not tooltip.find_elements("tag name", "img")
        summary = browser.find_element("css selector", "[data-chart=classes] summary")
        summary.send_keys(Keys.ENTER)
        page.wait("return document.querySelector('[data-chart=classes] table')")
        assert HOSTILE in browser.find_element("css selector", "[data-chart=classes] table").text
        assert page.run("return window.hit") is None

    @pytest.mark.parametrize("name", ["compared", "translated", "hostile"])
    def test_a_phone_needs_no_sideways_scroll(self, browser: Any, pages: dict[str, Path], name: str) -> None:
        page = Opened(browser, pages[name], width=390)
        assert page.run("return document.documentElement.scrollWidth") <= 390
        widths = "return [...document.querySelectorAll('.plot svg')].map((svg) => svg.getBoundingClientRect().width)"
        assert 250 < max(page.run(widths)) <= 360

    @pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
    @pytest.mark.parametrize("name", ["compared", "translated"])
    def test_axe_finds_nothing(self, browser: Any, pages: dict[str, Path], name: str, dark: bool) -> None:
        page = Opened(browser, pages[name], dark=dark)
        page.run((files("axe_core_python") / "axe.min.js").read_text())
        chosen = {"runOnly": ["color-contrast"]} if dark else {}  # nothing else is another in the dark
        found = browser.execute_async_script("axe.run(document, arguments[0]).then(arguments[1])", chosen)
        assert [(rule["id"], rule["nodes"][0]["html"]) for rule in found["violations"]] == []
        looked_at = {"color-contrast"} if dark else {"color-contrast", "label", "select-name", "button-name"}
        assert looked_at <= {rule["id"] for rule in found["passes"]}
        assert page.run("return getComputedStyle(document.body).backgroundColor") == (
            "rgb(18, 23, 28)" if dark else "rgb(255, 255, 255)"
        )

    def test_paper_is_light_even_in_the_dark(self, browser: Any, pages: dict[str, Path]) -> None:
        Opened(browser, pages["compared"], dark=True)
        features = [{"name": "prefers-color-scheme", "value": "dark"}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", "features": features})
        style = "return getComputedStyle(document.documentElement).getPropertyValue('--ink')"
        assert browser.execute_script(style) == "#1c2630"
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
        assert len(browser.print_page()) > 10_000
