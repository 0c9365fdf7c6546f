"""Every test starts from the same random state, whatever ran before it."""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import settings

from gradsieve.cli import main
from gradsieve.runs.journal import Journal

settings.register_profile("gradsieve", deadline=None, max_examples=12, derandomize=True)
settings.load_profile("gradsieve")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three languages to English, a word for a word; their sentences overlap."""
    folder, chance = tmp_path_factory.mktemp("text"), random.Random(0)
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "day", "night", "sun"]
    english = sorted({" ".join(chance.choices(words, k=chance.randint(1, 6))) for _ in range(150)})
    chance.shuffle(english)
    sizes = {"dev.az": (0, 8), "test.az": (8, 18), "train.az": (18, 40), "train.tr": (25, 110), "train.ru": (60, 130)}
    for name, (first, last) in sizes.items():
        suffix = {"az": "ak", "tr": "ek", "ru": "oj"}[name[-2:]]
        lines = [f"{' '.join(word + suffix for word in line.split())}\t{line}\n" for line in english[first:last]]
        (folder / f"{name}-en.tsv").write_text("".join(lines))
    return folder


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], AbstractContextManager[None]]:
    """A block in which a run is stopped after the given step, as by Ctrl-C."""

    @contextmanager
    def at(last: int) -> Iterator[None]:
        def after_step(self: Journal, step: int, *rest: Any, **more: Any) -> None:
            noted(self, step, *rest, **more)
            if step == last:
                raise KeyboardInterrupt

        noted = Journal.after_step
        with monkeypatch.context() as patch:
            patch.setattr(Journal, "after_step", after_step)
            with pytest.raises(KeyboardInterrupt):
                yield

    return at


class Ended(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """The command line in this process, in a folder of its own: starting torch anew takes seconds."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def called(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["gradsieve", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return Ended(int(ended.value.code or 0), *capsys.readouterr())

    return called
