"""Recipes and examples: what docs/integrations.md shows runs, and adopting DDS takes few lines."""

import difflib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
QUIET = [
    "ignore:.*does not have many workers",
    "ignore:.*`isinstance.treespec, LeafSpec.`",
    "ignore:The number of training batches",
    "ignore:'pin_memory' argument is set as true",
]
pytestmark = [pytest.mark.filterwarnings(text) for text in QUIET]


def recipes() -> dict[str, list[str]]:
    """Heading -> blocks of code."""
    parts = re.split(r"^#+ (.*)\n", (ROOT / "docs/integrations.md").read_text(), flags=re.MULTILINE)[1:]
    found = {
        title: re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        for title, text in zip(parts[::2], parts[1::2], strict=True)
    }
    return {title: blocks for title, blocks in found.items() if blocks}


NEEDS = {"accelerate": "accelerate", "Hugging Face Trainer": "transformers", "Lightning": "lightning"}
SETUP, *TITLES = recipes()


@pytest.mark.parametrize("title", TITLES)
def test_recipes_run(title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if title in NEEDS:
        pytest.importorskip(NEEDS[title], reason=f"needs {NEEDS[title]}")
    monkeypatch.chdir(tmp_path)
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    namespace: dict[str, Any] = {"__name__": "recipe"}
    plain = [] if title == "A plain loop" else recipes()["A plain loop"]
    for block in (*recipes()[SETUP], *plain, *recipes()[title]):
        exec(compile(block, f"docs/integrations.md, {title}", "exec"), namespace)
    dds = namespace["dds"]
    assert dds.steps >= 2
    assert dds.skipped == 0


def example(name: str) -> Any:
    sys.path.insert(0, str(ROOT / "examples"))  # as python examples/NAME.py does
    try:
        spec = importlib.util.spec_from_file_location(name, ROOT / f"examples/{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module


def changed_lines(before: Callable[..., Any], after: Callable[..., Any]) -> list[str]:
    """New or different lines of two functions that do the same, but for their names."""
    one, two = (inspect.getsource(function).splitlines()[1:] for function in (before, after))
    return [line for line in difflib.ndiff(one, two) if line.startswith("+ ") and line.strip() != "+"]


@pytest.mark.parametrize(
    ("name", "package", "most"),
    [("plain_loop", "sklearn", 5), ("hf_noisy_labels", "transformers", 3), ("lightning_digits", "lightning", 3)],
)
def test_adoption_takes_few_lines(name: str, package: str, most: int) -> None:
    pytest.importorskip(package, reason=f"needs {package}")
    found = example(name)
    assert 0 < len(changed_lines(found.plain, found.with_dds)) <= most


def test_the_lightning_example() -> None:
    pytest.importorskip("lightning", reason="needs gradsieve[lightning]")
    accuracies = example("lightning_digits").main(epochs=20)
    assert accuracies["with DDS"] > accuracies["plain"]


def test_the_example_with_wrong_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="needs gradsieve[hf]")
    found = example("hf_noisy_labels")
    monkeypatch.setattr(found, "TRAIN", 40)
    monkeypatch.setattr(found, "TEST", 20)
    assert set(found.main(epochs=1)) == {"right labels", "plain", "plain, dev too", "DDS"}


def test_the_example_that_mixes_domains(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", reason="needs gradsieve[hf]")
    found = example("hf_domain_mixing").main(steps=40, seeds=1)
    assert all(0 < loss < 6 for loss in found.values())
    assert re.search(r"step \d+: gl \d+%, pt \d+%", capsys.readouterr().out)


def test_weighted_loss_is_that_of_the_whole_batch() -> None:
    """However many micro-batches there are."""
    from torch import nn
    from torch.nn import functional as F

    from gradsieve import DDS, MLPScorer

    x, y = torch.randn(8, 4), torch.randint(3, (8,))
    model, scorer = nn.Linear(4, 3), MLPScorer(4, 3)
    nn.init.normal_(scorer.body[-1].weight)  # type: ignore[index]

    def new() -> DDS:
        def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
            return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

        return DDS(model, scorer, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), [(x, y)])

    whole, parts = new(), new()
    assert whole.weighted_loss == 0
    loss = whole.loss((x, y))
    assert float(whole.weighted_loss) == pytest.approx(float(loss.detach()))
    for batch in zip(x.split(2), y.split(2), strict=True):
        parts.loss(batch).backward()
    assert float(parts.weighted_loss) == pytest.approx(float(loss.detach()))
