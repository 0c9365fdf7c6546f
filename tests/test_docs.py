"""The documentation site: it builds, asks nothing of a network, and what it shows is true."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import dropwhile
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import torch.distributed as dist
from snippets import Snippet, snippets, stand_ins

from gradsieve import DDS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
DOCUMENTS = [*PAGES, *(ROOT / name for name in ("README.md", "RESULTS.md", "CONTRIBUTING.md"))]
PACKAGES = ("mkdocs", "material", "mkdocstrings", "mkdocstrings_handlers.python", "latex2mathml")

OPTIONAL = ("accelerate", "lightning", "transformers")
"""Packages that a page may be about and that need not be here."""


def name_of(document: Path) -> str:
    return str(document.relative_to(ROOT))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package in PACKAGES:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed; it is in the dependency group docs")
    place = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(place)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert result.returncode == 0, result.stderr
    return place


class Page(HTMLParser):
    """What a built page refers to, and what can be referred to in it."""

    def __init__(self, file: Path):
        super().__init__()
        self.links: set[str] = set()
        self.fetched: set[str] = set()
        """What a browser asks for by itself."""
        self.ids: set[str] = set()
        self.tags: list[str] = []
        self.feed(file.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attributes}
        self.tags.append(tag)
        self.ids |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.add(found["href"])
        else:
            self.fetched |= {found[name] for name in ("src", "href", "srcset", "data", "poster") if name in found}


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {file: Page(file) for file in site.rglob("*.html")}


def test_the_site_builds_without_a_warning(pages: dict[Path, Page]) -> None:
    assert len(pages) > len(PAGES)  # and the page for those that are not found


def test_no_page_asks_for_anything_from_elsewhere(site: Path, pages: dict[Path, Page]) -> None:
    for file, page in pages.items():
        outside = {url for url in page.fetched if urlsplit(url).netloc or urlsplit(url).scheme not in ("", "data")}
        assert not outside, file
    for file in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*[\"']?(https?:)?//", file.read_text()), file


def test_links_within_the_site_lead_somewhere(site: Path, pages: dict[Path, Page]) -> None:
    for file, page in pages.items():
        if file.name == "404.html":  # it is shown at any depth, so its links begin at the root
            continue
        for url in page.links | page.fetched:
            parts = urlsplit(url)
            if parts.scheme or parts.netloc:
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            assert target.is_relative_to(site.resolve()), f"{file}: {url}"
            assert target.exists(), f"{file}: {url}"
            if parts.fragment and target in pages and not parts.fragment.startswith("__"):
                assert unquote(parts.fragment) in pages[target].ids, f"{file}: {url}"


def test_equations_are_drawn(site: Path, pages: dict[Path, Page]) -> None:
    assert pages[site / "paper_map.html"].tags.count("math") > 20
    assert pages[site / "api/mathematics.html"].tags.count("math") > 8
    for file in pages:
        text = file.read_text()
        assert "arithmatex" not in text, file
        assert "<msqrt>" not in text, f"{file}: browsers leave the sign out where no font for mathematics is installed"
        assert not re.search(r"<mtext>\\|<mi>\\", text), file  # a command that the converter does not know


def test_the_reference_names_all_that_is_public(site: Path, pages: dict[Path, Page]) -> None:
    import gradsieve

    ids = set().union(*(page.ids for file, page in pages.items() if file.parent.name == "api"))
    assert {f"gradsieve.{name}" for name in gradsieve.__all__} <= ids


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """As torchrun starts the only process of a program."""
    start = dist.init_process_group
    monkeypatch.setattr(
        dist,
        "init_process_group",
        lambda backend: start(backend, init_method=f"file://{tmp_path}/meet", rank=0, world_size=1),
    )
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("page", [p for p in PAGES if p.name != "integrations.md"], ids=name_of)
def test_snippets_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: None) -> None:
    """Those of a page in one namespace, one after the other; one with a title is a program of its own.

    test_integrations.py runs those of integrations.md.
    """
    monkeypatch.chdir(tmp_path)
    namespace = stand_ins()
    own = {name: namespace[name] for name in ("model", "loss_fn", "optimizer", "dev_loader")}
    namespace |= {"DDS": DDS, "dds": DDS(own["model"], None, own["loss_fn"], own["optimizer"], own["dev_loader"])}
    namespace["batch"] = next(iter(namespace["train_loader"]))
    for snippet in snippets(page):
        if snippet.language == "python":
            code = compile(snippet.text, name_of(page), "exec")
            try:
                exec(code, {"__name__": "__main__"} if snippet.title else namespace)
            except ModuleNotFoundError as error:
                if error.name not in OPTIONAL:
                    raise
                pytest.skip(f"{error.name} is not installed")


def commands(snippet: Snippet) -> Iterator[list[str]]:
    """Of a shell, word by word; without comments, redirections and variables that are set before."""
    for line in snippet.text.replace("\\\n", "").splitlines():
        for part in re.split(r"&&|\|", line):
            words = shlex.split(part.split(" < ")[0], comments=True)
            if words := list(dropwhile(lambda word: re.match(r"[A-Z_]+=", word), words)):
                yield words


SHELL = [
    (name_of(document), words)
    for document in DOCUMENTS
    for snippet in snippets(document)
    if snippet.language in ("sh", "")
    for words in commands(snippet)
]


@pytest.mark.parametrize(("document", "words"), SHELL, ids=[f"{name}: {shlex.join(words)}" for name, words in SHELL])
def test_commands_can_be_given(document: str, words: list[str]) -> None:
    program, *arguments = words
    checks = {
        "gradsieve": check_gradsieve,
        "torchrun": check_torchrun,
        "python": check_python,
        "make": check_make,
        "pip": check_pip,
        "py-spy": lambda words: check_gradsieve(words[words.index("gradsieve") + 1 :]),
    }
    checks[program](arguments)


def check_python(arguments: list[str]) -> None:
    """The script exists and takes these options."""
    script, *rest = arguments
    text = (ROOT / script).read_text()
    for option in (word for word in rest if word.startswith("--")):
        assert f'"{option}"' in text, option


def check_gradsieve(arguments: list[str]) -> None:
    """Subcommand and options exist, and where there is a recipe, its keys and the methods do."""
    import typer

    from gradsieve.commands import app
    from gradsieve.compare import split
    from gradsieve.tasks import recipe_for

    name, *rest = arguments
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    given = command.make_context(name, rest).params
    if name not in ("train", "compare", "doctor") or given["recipe"].endswith(".toml"):
        return
    methods = given["methods"].split(",") if name == "compare" else [given["method"]]
    for method, *own in map(split, methods):
        recipe_for(method, given["recipe"], [*settings(given), *own])


def settings(given: dict[str, Any]) -> list[str]:
    from gradsieve.commands import _overrides

    return _overrides(given["overrides"], given.get("scores"), given.get("overhead"))


def check_torchrun(arguments: list[str]) -> None:
    from torch.distributed.run import get_args_parser

    given = get_args_parser().parse_args(arguments)
    if given.module:
        assert given.training_script == "gradsieve"
        check_gradsieve(given.training_script_args)
        return
    titles = {snippet.title for page in PAGES for snippet in snippets(page)}
    assert given.training_script in titles or (ROOT / given.training_script).is_file()


def check_make(arguments: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{name}:", makefile, re.MULTILINE) for name in arguments)


def check_pip(arguments: list[str]) -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name for word in arguments for name in re.findall(r"[\w-]+", "".join(re.findall(r"\[(.*)\]", word)))}
    assert arguments[0] == "install"
    assert extras <= project["optional-dependencies"].keys()


def test_recipes_can_be_read(tmp_path: Path) -> None:
    from gradsieve.tasks import recipe_of

    found = [snippet for page in PAGES for snippet in snippets(page) if snippet.language == "toml"]
    assert found
    for snippet in found:
        file = tmp_path / (snippet.title or "recipe.toml")
        file.write_text(snippet.text)
        recipe_of(str(file))


def test_the_figures_of_the_page_about_scale() -> None:
    """Passes and bytes, which are the same on every machine."""
    spec = importlib.util.spec_from_file_location("scale", ROOT / "benchmarks/scale.py")
    assert spec is not None
    assert spec.loader is not None
    scale = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(scale)
    page = (DOCS / "scale.md").read_text()

    assert {name: (round(f, 3), round(b, 3)) for name, (f, b) in scale.passes(16).items()} == {
        "default": (3.5, 1.5),
        "scorer of the example alone": (2.5, 1.5),
        "last-layer alignment": (2.5, 1.5),
        "last-layer alignment, every 16th step": (1.094, 1.031),
        "default, bf16 autocast": (5.5, 1.5),
    }
    assert {name: round(copies, 1) for name, copies in scale.memory().items()} == {
        "plain training at its peak": 3.0,
        "with DDS at its peak": 8.0,
        "DDS's own after step()": 1.0,
        "DDS's own after loss()": 2.0,
    }
    assert scale.ring()["signals only"] == 32 * 12 * scale.BATCH
    for held, _ in scale.store().values():
        assert f"| {held:,} |" in page
