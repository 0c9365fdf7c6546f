"""Runs: recipes, checkpoints, run directories, resuming, comparing, the command line."""

import hashlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from conftest import Ended
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from safetensors.torch import load_file
from test_image_sources import make_folder, make_shards, table
from zoo import differences, fingerprint

from gradsieve import DDS, GradsieveError
from gradsieve.images.load import load_splits
from gradsieve.images.models import build_model
from gradsieve.images.recipe import ImageRecipe
from gradsieve.images.train import Preparation, SetUp, evaluate
from gradsieve.report.comparison import half_interval, oracle_shares, summarize, verdict
from gradsieve.report.frontier import frontier
from gradsieve.runs import checkpoint as checkpoint_file
from gradsieve.runs import directory as directory_module
from gradsieve.runs.checkpoint import load_checkpoint, save_checkpoint
from gradsieve.runs.directory import RunDirectory
from gradsieve.runs.journal import Journal
from gradsieve.runs.progress import Progress, duration
from gradsieve.runs.recipe import recipe_names
from gradsieve.tasks import TASKS, recipe_of

CPU = torch.device("cpu")
CIFAR10 = Path(__file__).parents[2] / "shared/data/cifar10"
SMALL = ["steps=30", "evaluate_every=10", "checkpoint_every=7", "log_every=5", "scores=6"]
SMALL_TEXT = [
    *("steps=30", "evaluate_every=10", "checkpoint_every=7", "log_every=5", "batch_words=60", "pool=20"),
    *("data.pieces=60", "model.hidden=8", "model.embedding=8", "decode.beam=2", "decode.bleu_below=1000"),
    *("dds.items_between=30", "tcs_dds.items_between=30", "tcs_dds.updates=2", "dds.prior_passes=2"),
]


def run(out: Path, method: str = "dds", *extra: str, recipe: str = "digits-noisy", **options: Any) -> dict[str, Any]:
    options = {"seed": 0, "data": None, "resume": False} | options
    with Progress(Console(quiet=True), quiet=True) as progress:
        task = recipe_of(recipe).task
        resolved = recipe_of(recipe, [*(SMALL_TEXT if task == "translation" else SMALL), *extra])
        return TASKS[task].train(resolved, method, out=out, device=CPU, progress=progress, **options)


def digest(out: Path) -> dict[str, str]:
    """Of everything that a run computed: parameters, scorer, scores, translations, figures."""
    folders = ("final", "best", "scores", "first/final", "translations")
    files = [file for folder in folders for file in out.glob(f"{folder}/*")]
    found = {str(f.relative_to(out)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return found | {"metrics": json.dumps([{k: v for k, v in line.items() if k != "seconds"} for line in lines])}


class TestRecipes:
    def test_all_recipes_are_valid_and_say_what_they_need(self) -> None:
        names = {
            "cifar10-4k",
            "cifar10-4k-cpu",
            "cifar10-full",
            "digits",
            "digits-noisy",
            "imagenet-10pct",
            "imagenet-full",
        }
        assert names <= set(recipe_names())
        for name in recipe_names():
            recipe = recipe_of(name)
            assert recipe.name == name
            assert recipe.description
            assert recipe.task in TASKS

    def test_the_papers_settings(self) -> None:
        cifar, imagenet = recipe_of("cifar10-4k"), recipe_of("imagenet-10pct")
        for recipe, steps, batch, lr, model in (
            (cifar, 200_000, 128, 0.1, "wrn-28-2"),
            (recipe_of("cifar10-full"), 200_000, 128, 0.1, "wrn-28-10"),
            (imagenet, 40_000, 4096, 3.2, "resnet50"),
            (recipe_of("imagenet-full"), 40_000, 4096, 3.2, "resnet50"),
        ):
            content = recipe.model_dump()
            assert (content["steps"], content["batch_size"]) == (steps, batch)
            assert content["model"]["name"] == model
            optimizer = content["optimizer"]
            assert (optimizer["lr"], optimizer["warmup"], optimizer["momentum"]) == (lr, 2000, 0.9)
            assert (optimizer["average"], optimizer["cosine"]) == (0.999, True)
            assert content["scorer"]["kind"] == "paper"

    def test_overrides_change_the_hash(self) -> None:
        recipe = recipe_of("digits", ["steps=7", "optimizer.lr=1e-4", "dds.max_logit=none", "scorer.kind=mlp+label"])
        content = recipe.model_dump()
        assert (recipe.steps, content["optimizer"]["lr"], content["dds"]["max_logit"]) == (7, 1e-4, None)
        assert content["scorer"]["kind"] == "mlp+label"
        none = recipe_of("cifar10-4k", ["augment=none", "damage.kind=none", "scorer.init=none"]).model_dump()
        assert (none["augment"], none["damage"]["kind"], none["scorer"]["init"]) == ("none", "none", None)
        assert recipe.hash != recipe_of("digits").hash
        assert (
            recipe.hash
            == recipe_of(
                "digits", ["steps=7", *["optimizer.lr=1e-4"], "dds.max_logit=none", "scorer.kind=mlp+label"]
            ).hash
        )

    @pytest.mark.parametrize(
        ("name", "overrides", "message"),
        [
            ("digit", [], r"unknown recipe 'digit', did you mean digits"),
            ("digits", ["step=3"], r"unknown key step, did you mean steps\?"),
            ("digits", ["optimizer.rate=3"], r"unknown key optimizer\.rate.*optimizer has name, lr"),
            ("digits", ["steps=0"], r"steps: .*greater than or equal to 1, not 0"),
            ("digits", ["steps=many"], r"steps: .*not 'many'"),
            ("digits", ["damage.share=2"], r"damage\.share"),
            ("digits", ["scorer.kind=magic"], r"scorer\.kind: .*'signal'"),
            ("digits", ["optimizer.lr=nan"], r"optimizer\.lr"),
            ("digits", ["steps"], r"wants key=value"),
            ("digits", ["steps.more=1"], r"steps is a value"),
            ("digits", ["task=cooking"], r"task must be one of images"),
            ("digits", ["steps=true"], r"steps: .*integer, not True"),
            ("digits", ["optimizer.nesterov=true", "optimizer.momentum=0"], r"nesterov needs a momentum"),
        ],
    )
    def test_bad_recipes_are_explained(self, name: str, overrides: list[str], message: str) -> None:
        with pytest.raises(GradsieveError, match=message):
            recipe_of(name, overrides)

    def test_a_recipe_file_of_ones_own(self, tmp_path: Path) -> None:
        own = tmp_path / "mine.toml"
        own.write_text(
            'task = "images"\ndescription = "mine"\nsteps = 5\n[data]\nname = "digits"\n[model]\nname = "mlp"\n'
        )
        assert recipe_of(str(own)).name == "mine"
        for bad in (b"steps = = 5", b"name = '\xff'"):
            own.write_bytes(bad)
            with pytest.raises(GradsieveError, match="not valid TOML"):
                recipe_of(str(own))


leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**53), 2**53),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.builds(
        lambda n, d: torch.arange(n).to(d),
        st.integers(0, 4),
        st.sampled_from([torch.float32, torch.uint8, torch.bfloat16]),
    ),
    st.just(torch.tensor(3.5)),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=4), st.integers(0, 9)), inner, max_size=3),
    ),
    max_leaves=8,
)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


class TestCheckpoints:
    @given(st.dictionaries(st.text(max_size=4), trees, max_size=3))
    def test_what_is_saved_is_loaded(self, tmp_path_factory: pytest.TempPathFactory, state: dict[str, Any]) -> None:
        folder = tmp_path_factory.mktemp("c") / "one"
        save_checkpoint(folder, state)
        assert same(load_checkpoint(folder), state)
        assert sorted(f.name for f in folder.iterdir()) == ["state.json", "tensors.safetensors"]

    def test_tensors_that_share_memory_and_views(self, tmp_path: Path) -> None:
        base = torch.arange(12.0).view(3, 4)
        state = {
            "a": base,
            "b": base,
            "c": base.t(),
            "d": base[1:],
            "e": base.to(memory_format=torch.contiguous_format),
        }
        save_checkpoint(tmp_path / "one", state)
        assert same(load_checkpoint(tmp_path / "one"), state)

    def test_only_data_is_saved(self, tmp_path: Path) -> None:
        with pytest.raises(GradsieveError, match="/f is a function"):
            save_checkpoint(tmp_path / "one", {"f": lambda: 1})
        assert list(tmp_path.iterdir()) == []

    def test_a_failed_write_leaves_nothing_and_spoils_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        save_checkpoint(tmp_path / "one", {"x": torch.ones(3)})

        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(checkpoint_file, "save_file", full)
        for name in ("one", "two"):
            with pytest.raises(GradsieveError, match=r"cannot write .*No space left on device.*--resume"):
                save_checkpoint(tmp_path / name, {"x": torch.zeros(3)})
        assert [f.name for f in tmp_path.iterdir()] == ["one"]
        assert load_checkpoint(tmp_path / "one")["x"].tolist() == [1, 1, 1]

    def test_a_damaged_checkpoint_is_passed_over(self, tmp_path: Path) -> None:
        def directory() -> RunDirectory:
            return RunDirectory(tmp_path / "run", recipe_of("digits"), "dds", 0, "data", resume=True)

        first, checkpoints = directory(), tmp_path / "run/checkpoints"
        with first.opened({}):
            for step in (1, 2, 3):
                first.save_checkpoint(step, {"x": torch.tensor(step)})
        assert sorted(f.name for f in checkpoints.iterdir()) == ["step-000000002", "step-000000003"]
        (checkpoints / "step-000000003/tensors.safetensors").write_bytes(b"cut")
        step, state = directory().restore() or (0, None)
        assert (step, int(state["x"])) == (2, 2)
        (checkpoints / "step-000000002/state.json").write_text("{")
        with pytest.raises(GradsieveError, match=r"no checkpoint of .* can be read"):
            directory().restore()

    def test_keys_with_slashes(self, tmp_path: Path) -> None:
        state = {"a/b": torch.zeros(1), "a": {"b": torch.ones(1)}}
        save_checkpoint(tmp_path / "one", state)
        assert same(load_checkpoint(tmp_path / "one"), state)


CASES = [
    pytest.param(recipe, method, id=f"{task}-{method}")
    for task, recipe in (("images", "digits-noisy"), ("translation", "translation"))
    for method in TASKS[task].methods
]


@pytest.mark.parametrize(("recipe", "method"), CASES)
class TestMethods:
    """Every method of every task through the same suite."""

    def test_it_runs_and_leaves_a_whole_directory(self, recipe: str, method: str, text: Path, tmp_path: Path) -> None:
        result = run(tmp_path / "run", method, recipe=recipe, data=text)
        assert json.loads((tmp_path / "run/result.json").read_text()) == result
        for key in ("recipe", "method", "seed", "steps", "seconds", "test", "test_best_by_dev", "signature"):
            assert key in result
        assert (result["recipe"], result["method"], result["seed"], result["steps"]) == (recipe, method, 0, 30)
        assert 0 <= result["test"][TASKS[recipe_of(recipe).task].metric] <= 100
        assert {"gradsieve", "commit", "recipe", "data", "seed"} <= set(result["signature"])
        present = {str(f.relative_to(tmp_path / "run")) for f in (tmp_path / "run").rglob("*") if f.is_file()}
        assert {"recipe.json", "environment.json", "metrics.jsonl", "final/model.safetensors"} <= present
        learns = method in ("dds", "dds-retrained", "mentornet", "tcs+dds")
        assert ("final/scorer.safetensors" in present) == learns
        lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines if "dev" in line] == [10, 20, 30]
        if recipe == "translation":
            assert {5, 10, 15, 20, 25, 30} <= {line["step"] for line in lines if "loss" in line}
            assert all(sum(line["usage"].values()) == pytest.approx(1, abs=1e-3) for line in lines if "loss" in line)
            assert any("rewards" in line for line in lines) == learns
            assert {f"translations/test.{n}" for n in ("source", "reference", "last", "best")} <= present
        else:
            assert [line["step"] for line in lines if "loss" in line] == [5, 10, 15, 20, 25, 30]
            weighs = learns or method in ("spcl", "batchweight")
            assert (len([name for name in present if name.startswith("scores/")]) == 6) == weighs

    def test_stopped_anywhere_it_goes_on_to_the_same_end(
        self, recipe: str, method: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run(tmp_path / "whole", method, recipe=recipe, data=text)
        noted = Journal.after_step
        for stop in (3, 7, 19):

            def after_step(self: Journal, step: int, *rest: Any, stop: int = stop, **more: Any) -> None:
                noted(self, step, *rest, **more)
                if step == stop:
                    raise KeyboardInterrupt

            monkeypatch.setattr(Journal, "after_step", after_step)
            with pytest.raises(KeyboardInterrupt):
                run(tmp_path / "stopped", method, recipe=recipe, data=text, resume=True)
        monkeypatch.setattr(Journal, "after_step", noted)
        run(tmp_path / "stopped", method, recipe=recipe, data=text, resume=True)
        assert digest(tmp_path / "stopped") == digest(tmp_path / "whole")

    def test_the_seed_decides(self, recipe: str, method: str, text: Path, tmp_path: Path) -> None:
        for name, seed in (("a", 1), ("b", 1), ("c", 2)):
            run(tmp_path / name, method, "steps=8", recipe=recipe, data=text, seed=seed)
        assert digest(tmp_path / "a") == digest(tmp_path / "b")
        assert digest(tmp_path / "a") != digest(tmp_path / "c")


class TestRuns:
    @pytest.mark.parametrize(
        "settings",
        [
            ("model.name=small-cnn", "model.channels_last=true", "scorer.kind=paper"),
            ("model.name=small-cnn", "model.channels_last=true", "scorer.kind=conv+label"),
            ("dds.update_every=6", "dds.replay=4", "dds.alignment=last_layer"),
        ],
    )
    def test_resuming(self, settings: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Files do not keep the layout of tensors in memory, which fused optimizers read; records may be untold."""
        settings = (*settings, "steps=12")
        run(tmp_path / "whole", "dds", *settings)
        noted = Journal.after_step

        def after_step(self: Journal, step: int, *rest: Any, **more: Any) -> None:
            noted(self, step, *rest, **more)
            if step == 9:
                raise KeyboardInterrupt

        monkeypatch.setattr(Journal, "after_step", after_step)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "stopped", "dds", *settings)
        monkeypatch.setattr(Journal, "after_step", noted)
        run(tmp_path / "stopped", "dds", *settings, resume=True)
        assert digest(tmp_path / "stopped") == digest(tmp_path / "whole")

    def test_the_log_has_the_newest_record_of_those_that_come_seldom(self, tmp_path: Path) -> None:
        run(tmp_path / "run", "dds", "dds.update_every=4", "dds.replay=4", "steps=13")
        lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
        told = {line["step"]: line for line in lines if "loss" in line}
        assert list(told) == [5, 10, 13]
        assert all(line["reward_std"] > 0 and 0 <= line["trust"] <= 1 for line in told.values())

    def test_dds_beats_plain_training_on_wrong_labels(self, tmp_path: Path) -> None:
        whole = ["steps=1000", "evaluate_every=500", "checkpoint_every=500"]
        plain = run(tmp_path / "plain", "uniform+dev", *whole)
        dds = run(tmp_path / "dds", "dds", *whole)
        assert dds["test"]["accuracy"] > plain["test"]["accuracy"] + 5
        assert dds["skipped"] == 0
        weights = load_file(tmp_path / "dds/scores/step-000001000.safetensors")["weights"].float()
        damaged = load_file(tmp_path / "dds/damaged.safetensors")["damaged"]
        assert weights[~damaged].mean() > 2 * weights[damaged].mean()

    def test_the_saved_model_is_the_one_that_was_measured(self, tmp_path: Path) -> None:
        result = run(tmp_path / "run", "uniform", "optimizer.average=0.5")
        recipe: Any = recipe_of("digits-noisy", [*SMALL, "optimizer.average=0.5"])
        from gradsieve.images.load import load_splits

        splits = load_splits(recipe, None, 0)
        model = build_model("mlp", shape=(1, 8, 8), num_classes=10)
        prepare = Preparation(recipe, splits, 0, CPU)
        low = torch.autocast("cpu", enabled=False)
        best = f"best/step-{result['best_step']:09}.safetensors"
        for name, key in (("final/model.safetensors", "test"), (best, "test_best_by_dev")):
            model.load_state_dict(load_file(tmp_path / "run" / name))
            assert evaluate(model, splits.test, prepare, low) == pytest.approx(result[key])

    def test_uniform_weights_begin_equal_whatever_the_method(self, tmp_path: Path) -> None:
        """The same seed gives every method the same model and the same batches."""
        losses = set()
        for method in ("uniform", "dds", "mentornet"):
            run(tmp_path / method, method, "steps=1", "log_every=1")
            losses.add(round(json.loads((tmp_path / method / "metrics.jsonl").read_text().splitlines()[0])["loss"], 5))
        assert len(losses) == 1

    @pytest.mark.parametrize("kind", ["signal", "paper", "paper+label", "conv", "conv+label", "mlp", "mlp+label"])
    def test_every_scorer(self, kind: str, tmp_path: Path) -> None:
        run(tmp_path / "a", "dds", f"scorer.kind={kind}", "steps=3")
        init = tmp_path / "a/final/scorer.safetensors"
        run(tmp_path / "b", "dds", f"scorer.kind={kind}", "steps=3", f"scorer.init={init}")
        other = "mlp" if kind != "mlp" else "signal"
        with pytest.raises(GradsieveError, match=r"does not fit|No such file"):
            run(tmp_path / "c", "dds", f"scorer.kind={other}", "steps=3", f"scorer.init={init}")

    @pytest.mark.parametrize(
        "setting",
        [
            "model.precision=bf16",
            "model.channels_last=true",
            "augment=pad-crop-flip",
            "damage.kind=flip",
            "damage.kind=long-tail",
            "optimizer.name=sgd",
        ],
    )
    @pytest.mark.parametrize("method", ["dds", "batchweight", "mentornet"])
    def test_settings(self, setting: str, method: str, tmp_path: Path) -> None:
        result = run(tmp_path / "run", method, "model.name=small-cnn", "steps=4", setting)
        assert result["skipped"] == 0

    def test_a_folder_with_a_run_is_not_overwritten(self, tmp_path: Path) -> None:
        first = run(tmp_path / "run")
        with pytest.raises(GradsieveError, match="holds a run already"):
            run(tmp_path / "run")
        with pytest.raises(GradsieveError, match=r"holds another run: recipe\.steps was 30 and is 31"):
            run(tmp_path / "run", "dds", "steps=31", resume=True)
        with pytest.raises(GradsieveError, match="seed was 0 and is 1"):
            run(tmp_path / "run", seed=1, resume=True)
        assert run(tmp_path / "run", resume=True) == first
        assert run(tmp_path / "run", "dds", "checkpoint_every=9", "data.workers=1", resume=True) == first

    def test_files_of_another_kind_are_not_touched(self, tmp_path: Path) -> None:
        (tmp_path / "run/recipe.json").mkdir(parents=True)
        (tmp_path / "run/recipe.json/precious").touch()
        with pytest.raises(GradsieveError, match="is damaged"):
            run(tmp_path / "run", resume=True)
        (tmp_path / "other").mkdir()
        (tmp_path / "other/metrics.jsonl").write_text("precious")
        with pytest.raises(GradsieveError, match="files of another kind"):
            run(tmp_path / "other")
        with pytest.raises(GradsieveError, match="is a file"):
            run(tmp_path / "other/metrics.jsonl")
        assert (tmp_path / "other/metrics.jsonl").read_text() == "precious"
        assert (tmp_path / "run/recipe.json/precious").exists()

    def test_a_run_that_was_stopped_before_it_wrote_anything_goes_on(self, tmp_path: Path) -> None:
        (tmp_path / "run").mkdir()
        for name in (".lock", ".recipe.json.123"):
            (tmp_path / "run" / name).touch()
        assert run(tmp_path / "run", "uniform", "steps=2", resume=True)["method"] == "uniform"

    def test_two_processes_do_not_share_a_folder(self, tmp_path: Path) -> None:
        directory = RunDirectory(tmp_path / "run", recipe_of("digits"), "dds", 0, "data", resume=True)
        with directory.opened({}), pytest.raises(GradsieveError, match="another process is at work"):
            with directory.opened({}):
                pass

    def test_other_data_is_another_run(self, tmp_path: Path) -> None:
        for name, count in (("a", 4), ("b", 5)):
            make_folder(tmp_path / name, train=(count, 4), dev=(2, 2), test=(2, 2))
        settings = ("data.size=8", "model.name=small-cnn", "steps=2", "batch_size=4", "data.workers=0")
        run(tmp_path / "run", "uniform+dev", *settings, recipe="images", data=tmp_path / "a")
        with pytest.raises(GradsieveError, match="holds another run: data was"):
            run(tmp_path / "run", "uniform+dev", *settings, recipe="images", data=tmp_path / "b", resume=True)

    def test_a_setting_that_is_refused_leaves_no_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "odd.py").write_text(
            "from torch import nn\n"
            "def five(n): return nn.Sequential(nn.Flatten(), nn.Linear(64, 5))\n"
            "def small(n): return nn.Linear(3, n)\n"
            "def fails(n): raise OSError('no luck')\n"
            "def empty(n): return nn.Flatten()\n"
        )
        monkeypatch.chdir(tmp_path)
        for setting, message in (
            ("model.name=odd:five", r"must give logits of shape \(64, 10\) .* not shape \(64, 5\)"),
            ("model.name=odd:small", r"odd:small fails on a batch of images"),
            ("model.name=odd:fails", r"OSError: no luck"),
            ("model.name=odd:empty", r"with parameters"),
            ("model.name=wrn-10-0", r"width 1 or more"),
            ("model.name=none", r"unknown model 'none'"),
            ("scorer.init=nowhere", r"nowhere is no file"),
        ):
            with pytest.raises(GradsieveError, match=message):
                run(tmp_path / "run", "dds", setting)
            assert not (tmp_path / "run").exists()
        with pytest.raises(GradsieveError, match="fails on a batch"):
            run(tmp_path / "run", "uniform", "model.name=small-cnn", "batch_size=1")

    def test_trying_out_leaves_no_trace(self) -> None:
        recipe = recipe_of("digits", ["model.name=small-cnn", "scorer.kind=paper+label"])
        assert isinstance(recipe, ImageRecipe)
        setup = SetUp(recipe, "dds", load_splits(recipe, None, 0), 0, CPU)
        assert isinstance(setup.way, DDS)
        modules = setup.model, setup.way.scorer
        before = [fingerprint(module) for module in modules]
        setup.try_out()
        assert [differences(b, fingerprint(module)) for b, module in zip(before, modules, strict=True)] == [[], []]
        assert any("running_mean" in name for name in before[1])

    @pytest.mark.skipif(not CIFAR10.is_dir(), reason="needs CIFAR-10 in ../shared/data")
    def test_cifar10(self, tmp_path: Path) -> None:
        settings = ("steps=2", "batch_size=16", "dev_batch_size=16", "model.name=small-cnn")
        result = run(tmp_path / "run", "dds", *settings, recipe="cifar10-4k-cpu", data=CIFAR10)
        assert result["recipe"] == "cifar10-4k-cpu"

    @pytest.mark.parametrize("form", ["folder", "shards", "table"])
    @pytest.mark.parametrize("workers", [0, 2])
    def test_images_on_disk(self, form: str, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
        data = tmp_path / "data"
        if form == "folder":
            make_folder(data, train=(20, 20, 20), val=(3, 4, 5))
        elif form == "shards":
            make_shards(data, 20)
        else:
            data.mkdir()
            table([0, 1, 2] * 10).to_parquet(data / "train.parquet")
            table([0, 1, 2], 40).to_parquet(data / "test.parquet")
        settings = (
            "batch_size=8",
            "dev_batch_size=4",
            "data.size=16",
            "model.name=wrn-10-1",
            f"data.workers={workers}",
        )
        recipe = "imagenet-full" if form == "table" else "imagenet-10pct"
        results = [
            run(tmp_path / name, "dds", *settings, "steps=3", recipe=recipe, data=data)["test"] for name in ("a", "b")
        ]
        assert results[0] == results[1]
        assert digest(tmp_path / "a") == digest(tmp_path / "b")

    @pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU")
    @pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch's own
    def test_a_compiled_model_trains_to_the_same_end(self, tmp_path: Path) -> None:
        results = [
            run(tmp_path / value, "dds", "steps=5", f"model.compile={value}")["test"]["loss"]
            for value in ("true", "false")
        ]
        assert results[0] == pytest.approx(results[1], rel=1e-3)


def test_a_run_of_an_older_version_goes_on(tmp_path: Path) -> None:
    """Settings that did not exist then are at their defaults; whatever it had must be the same."""
    run(tmp_path / "run", "dds")
    file = tmp_path / "run/recipe.json"
    settings = json.loads(file.read_text())
    del settings["recipe"]["dds"]["replay"]
    file.write_text(json.dumps(settings))
    assert run(tmp_path / "run", "dds", resume=True)["method"] == "dds"
    with pytest.raises(GradsieveError, match=r"recipe\.dds\.replay was 0 and is 4"):
        run(tmp_path / "run", "dds", "dds.replay=4", resume=True)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "gradsieve", *arguments]


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def end_as_if_never_killed(arguments: tuple[str, ...], folder: Path, kills: int) -> None:
    """Kills a run at random moments, resumes it, and compares its end with that of a run that nobody killed.

    How far a machine comes in 0.3 seconds is not known: a run that ends before it is killed is compared at once and
    begun anew.
    """

    def ended_alike() -> None:
        assert digest(folder / "killed") == digest(folder / "whole")

    def start(name: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command(*arguments, "--out", name, "--resume"), cwd=folder, env=ENVIRONMENT, stdout=subprocess.DEVNULL
        )

    assert start("whole").wait() == 0
    chance = random.Random(0)
    opened = folder / "killed/recipe.json"  # written anew whenever a run goes on
    while kills:
        before = opened.stat().st_mtime_ns if opened.exists() else 0
        process = start("killed")
        while process.poll() is None and (opened.stat().st_mtime_ns if opened.exists() else 0) == before:
            time.sleep(0.005)
        time.sleep(chance.uniform(0, 0.3))  # from the first moments of set-up to some dozens of steps later
        process.kill()
        if process.wait() == -signal.SIGKILL:
            kills -= 1
        else:
            assert process.returncode == 0
            ended_alike()
            shutil.rmtree(folder / "killed")
    assert start("killed").wait() == 0
    ended_alike()


def test_killed_at_20_random_moments_it_ends_as_if_it_had_never_been(tmp_path: Path) -> None:
    settings = [
        part for key in ("steps=400", "checkpoint_every=5", "evaluate_every=20", "scores=40") for part in ("--set", key)
    ]
    end_as_if_never_killed(("train", "digits-noisy", "--method", "dds", "--seed", "3", *settings), tmp_path, kills=20)
    assert not [f for f in (tmp_path / "killed/checkpoints").iterdir() if not f.name.startswith("step-")]


def test_a_full_disk_ends_with_a_message_and_the_last_checkpoint(call: Callable[..., Ended], tmp_path: Path) -> None:
    """A limit on the size of files stands in for the end of the disk: the model fits, the checkpoint does not."""
    arguments = ("train", "digits", "--out", "run", "--set", "steps=20", "--set", "checkpoint_every=5")
    no_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, no_limit[1]))
    try:
        failed = call(*arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, no_limit)
    assert failed.code == 2, failed.err
    assert "cannot write run/checkpoints/step-000000005" in failed.err
    assert "Traceback" not in failed.err
    assert call(*arguments, "--resume").code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "digit", "--out", "x"), "did you mean digits"),
        (("train", "digits", "--method", "magic", "--out", "x"), "unknown method 'magic'"),
        (("train", "digits", "--method", "oracle", "--out", "x"), "no damage is known"),
        (("train", "digits", "--set", "lr=1", "--out", "x"), "unknown key lr"),
        (("train", "digits", "--out", "file/x"), "cannot write"),
        (("train", "digits", "--device", "tpu9", "--out", "x"), "--device tpu9"),
        (("train", "digits"), "--out"),
        (("train", "cifar10-4k", "--out", "x"), "needs CIFAR-10"),
        (("train", "cifar10-4k", "--data", "nowhere", "--out", "x"), "nowhere is no folder"),
        (("train", "cifar10-4k", "--data", ".", "--out", "x"), "lacks data_batch_1.bin"),
        (("compare", "digits", "--methods", "uniform,best", "--out", "x"), "unknown method 'best'"),
        (("compare", "digits", "--methods", "dds,dds", "--out", "x"), "names one twice"),
        (("compare", "digits", "--methods", "dds:colour=red", "--out", "x"), "unknown key colour"),
        (("compare", "digits", "--methods", ",", "--out", "x"), "--methods"),
        (("compare", "digits", "--methods", "uniform,dds,oracle", "--out", "x"), "no damage is known"),
        (("compare", "digits", "--methods", "dds:steps=4", "--out", "x"), "would not be the same for all"),
        (("compare", "digits", "--methods", "dds:model.name=a:b", "--out", "x"), "model a:b cannot be had"),
        (("train", "digits", "--device", "meta", "--out", "x"), "--device meta"),
        (
            ("train", "digits-noisy", "--method", "oracle", "--set", "damage.share=1", "--out", "x"),
            "nothing to train on",
        ),
        (("download", "mnist", "--out", "x"), "no data set 'mnist'"),
        (
            ("train", "digits", "--set", "scorer.kind=paper", "--set", "scorer.shrink=2", "--out", "x"),
            "scorer.kind=paper with scorer.shrink=2 fails on a batch of images (64, 1, 8, 8)",
        ),
        (
            ("compare", "digits", "--methods", "uniform,dds:scorer.kind=conv:scorer.shrink=16", "--out", "x"),
            "scorer.kind=conv with scorer.shrink=16 fails on a batch of images",
        ),
        (("train", "digits", "--overhead", "0", "--out", "x"), "dds.overhead"),
        (("train", "digits", "--overhead", "0.1", "--set", "dds.update_every=2", "--out", "x"), "give one of them"),
        (("recipes", "nothing"), "unknown recipe 'nothing'"),
        (("compare", "digits", "--out", "x", "--frontier", "f.txt"), "ends in .png, .svg or .pdf"),
        (("compare", "digits", "--out", "x", "--frontier", "none/f.png"), "there is no folder none"),
    ],
)
def test_bad_input_is_explained(
    arguments: tuple[str, ...], message: str, call: Callable[..., Ended], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    result = call(*arguments)
    assert result.code == 2, result
    assert message in result.err
    assert "Traceback" not in result.err
    assert not (tmp_path / "x").exists()


def test_compare_from_the_command_line(call: Callable[..., Ended], tmp_path: Path) -> None:
    settings = [part for key in SMALL for part in ("--set", key)]
    methods = "uniform,uniform+dev,dds,dds:scorer.kind=mlp,oracle"
    arguments = ("compare", "digits-noisy", "--methods", methods, "--seeds", "2", "--out", "c", *settings)
    first = call(*arguments, "--jobs", "2")
    assert first.code == 0, first.err
    assert first.err == ""
    for text in ("last", "95%", "best by dev", "gain over uniform", "time", "dds:scorer.kind=mlp", "2 seeds"):
        assert text in first.out
    written = json.loads((tmp_path / "c/comparison.json").read_text())
    assert [row["variant"] for row in written["rows"]] == methods.split(",")
    assert "| dds:scorer.kind=mlp |" in (tmp_path / "c/comparison.md").read_text()
    before = (tmp_path / "c/dds/seed-1/result.json").stat().st_mtime_ns
    again = call(*arguments, "--frontier", "frontier.png")
    assert again.out.splitlines()[-12:] == first.out.splitlines()[-12:]
    assert (tmp_path / "frontier.png").read_bytes().startswith(b"\x89PNG")
    later = (
        "compare",
        "digits-noisy",
        "--methods",
        "dds",
        "--seeds",
        "1",
        "--first-seed",
        "1",
        "--out",
        "c",
        *settings,
    )
    assert call(*later).code == 0
    (row,) = json.loads((tmp_path / "c/comparison.json").read_text())["rows"]
    alone = json.loads((tmp_path / "c/dds/seed-1/result.json").read_text())
    assert (row["seeds"], row["last"]) == (1, alone["test"]["accuracy"])
    assert (tmp_path / "c/dds/seed-1/result.json").stat().st_mtime_ns == before


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_comparison_that_is_stopped_takes_its_workers_with_it(stop: signal.Signals, tmp_path: Path) -> None:
    arguments = ("compare", "digits", "--methods", "uniform,dds", "--out", "c", "--jobs", "2", "--set", "steps=100000")
    process = subprocess.Popen(
        command(*arguments),
        cwd=tmp_path,
        env=ENVIRONMENT,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # which jobs of a shell ignore
    )
    folders = [tmp_path / f"c/{method}/seed-0" for method in ("uniform", "dds")]
    while process.poll() is None and not all((folder / "metrics.jsonl").exists() for folder in folders):
        time.sleep(0.05)
    process.send_signal(stop)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "stopped; what was saved is intact" in errors
    assert "Traceback" not in errors
    for folder in folders:  # nobody holds them any more
        with directory_module._locked(folder):
            pass


def test_what_a_kill_in_the_midst_of_writing_has_left_is_removed(call: Callable[..., Ended], tmp_path: Path) -> None:
    arguments = ("train", "digits", "--method", "uniform", "--out", "run", "--set")
    assert call(*arguments, "steps=4").code == 0
    (tmp_path / "run/result.json").unlink()
    left = [
        tmp_path / "run" / name
        for name in (".recipe.json.7", "scores/.step-000000002.safetensors.12345", "scores/.tmpbBowek")
    ]
    for file in left:
        file.parent.mkdir(exist_ok=True)
        file.write_text("half")
    (tmp_path / "run/checkpoints/.step-000000002.99").mkdir()
    assert call(*arguments, "steps=4", "--resume").code == 0
    assert not [file for file in left if file.exists()]
    assert not list((tmp_path / "run").rglob(".*.*"))


def test_a_budget_from_the_command_line(call: Callable[..., Ended], tmp_path: Path) -> None:
    ended = call("train", "digits", "--overhead", "0.1", "--out", "run", "--set", "steps=90", "--set", "log_every=1")
    assert ended.code == 0, ended.err
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert {16} < {line["update_every"] for line in lines if "update_every" in line}


def test_the_list_of_recipes(call: Callable[..., Ended]) -> None:
    result = call("recipes")
    assert result.code == 0
    assert all(name in result.out for name in (*recipe_names(), *(m for task in TASKS.values() for m in task.methods)))
    shown = json.loads(call("recipes", "digits", "--set", "steps=9").out)
    assert (shown["steps"], shown["model"]["name"]) == (9, "mlp")


def results(**accuracies: list[float]) -> dict[str, dict[int, dict[str, Any]]]:
    def result(value: float, variant: str) -> dict[str, Any]:
        figures = {"accuracy": value}
        return {
            "test": figures,
            "test_best_by_dev": figures,
            "seconds": 2.0 if variant == "uniform" else 6.0,
            "effective_share": 1.0,
        }

    return {
        v.replace("_dev", "+dev"): {i: result(a, v) for i, a in enumerate(values)} for v, values in accuracies.items()
    }


class TestVerdicts:
    def test_a_clear_gain(self) -> None:
        rows = summarize(results(uniform=[50, 52, 51, 53], dds=[53, 55.2, 53.8, 56]), "accuracy")
        assert verdict(rows[1]).startswith("dds helps by 3.0 +- 0.3 points")
        assert rows[1].time_ratio == 3.0
        assert rows[0].gain is None

    def test_a_clear_loss(self) -> None:
        rows = summarize(results(uniform=[50, 52, 51], dds=[45, 47.5, 46]), "accuracy")
        assert "dds hurts by 4.8" in verdict(rows[1])

    def test_no_evidence(self) -> None:
        rows = summarize(results(uniform=[50, 52, 51], dds=[53, 50, 51.5]), "accuracy")
        assert "no evidence that it helps here" in verdict(rows[1])
        assert "use uniform" in verdict(rows[1])

    def test_the_same_everywhere(self) -> None:
        rows = summarize(results(uniform=[50, 52], dds=[50, 52]), "accuracy")
        assert "no evidence" in verdict(rows[1])

    def test_the_same_gain_everywhere(self) -> None:
        rows = summarize(results(uniform=[50, 52, 51], dds=[60, 62, 61]), "accuracy")
        assert verdict(rows[1]).startswith("dds helps by 10.0 +- 0.0")

    def test_one_seed_or_no_uniform(self) -> None:
        rows = summarize(results(uniform=[50], dds=[53]), "accuracy")
        assert "no verdict without more seeds" in verdict(rows[1])
        assert "run uniform too" in verdict(summarize(results(dds=[53, 54]), "accuracy")[0])

    def test_the_interval_is_students(self) -> None:
        assert half_interval([1.0, 2.0, 3.0]) == pytest.approx(4.303 / 3**0.5, rel=1e-3)
        assert half_interval([1.0]) is None

    def test_share_of_the_oracles_gain(self) -> None:
        rows = summarize(results(uniform=[40], uniform_dev=[50], dds=[57.5], oracle=[60]), "accuracy")
        assert oracle_shares(rows)["dds"] == pytest.approx(0.75)

    def test_the_frontier_is_what_nobody_beats_at_its_price(self) -> None:
        rows = summarize(results(spcl=[49], uniform=[50], mentornet=[55], dds=[57]), "accuracy")
        assert [row.variant for row in frontier(rows)] == ["uniform", "dds"]


def test_durations_as_a_person_says_them() -> None:
    assert [duration(s) for s in (0.2, 59, 300, 7300)] == ["1 s", "59 s", "5 min", "2 h 2 min"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="malloc is glibc's on Linux only")
def test_freed_memory_stays_for_the_next_step() -> None:
    code = """
import resource, sys, torch
from gradsieve.runs.memory import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
def step():
    kept = [torch.zeros(2_000_000) for _ in range(30)]  # 8 MB each
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    found = {}
    for how in ("keep", "as it is"):
        done = subprocess.run([sys.executable, "-c", code, how], capture_output=True, text=True, check=True)
        found[how] = int(done.stdout)
    assert found["keep"] < 1_000
    assert found["keep"] <= found["as it is"] + 100  # which may keep it by chance
