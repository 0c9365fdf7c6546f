"""The project itself: one-way imports, a core that needs torch alone, documents that are true."""

import ast
import difflib
import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from snippets import snippets, stand_ins

import gradsieve

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src/gradsieve"

LAYERS = [
    {"errors"},
    {"parallel"},
    {"parameters", "randomness", "record", "kernels"},
    {"reward", "activations", "optimizers", "scorer", "networks", "dev", "gradients", "last_layer", "replay", "budget"},
    {"forward", "joint"},
    {"sampling"},
    {"learner", "agreement"},
    {"turn"},
    {"reweight", "resample"},
    {"baselines", "checkup", "integrations"},
    {"runs"},
    {"images", "translation"},
    {"report"},
    {"tasks"},
    {"compare", "bench"},
    {"demo"},
    {"commands", "cli", "__main__"},
]
"""Each may import what stands above it, and its own layer."""


def modules_imported_by(file: Path) -> set[str]:
    """Names of gradsieve's own modules, first part only."""
    package = ("gradsieve", *file.relative_to(SOURCE).parts[:-1])
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            names = [node.module] if node.module else [a.name for a in node.names]
            found |= {".".join([*base, n]).split(".")[1] for n in names}
    return found


@pytest.mark.parametrize("file", sorted(SOURCE.rglob("*.py")), ids=lambda f: str(f.relative_to(SOURCE)))
def test_imports_go_one_way(file: Path) -> None:
    name = file.relative_to(SOURCE).parts[0].removesuffix(".py")
    if name == "__init__":
        return
    level = next(i for i, layer in enumerate(LAYERS) if name in layer)
    allowed = set().union(*LAYERS[: level + 1]) | ({"__version__"} if level > 5 else set())
    assert modules_imported_by(file) <= allowed


def test_the_core_needs_torch_alone() -> None:
    code = """if True:
        import sys, torch
        before = set(sys.modules)
        import gradsieve
        new = {name.split(".")[0] for name in set(sys.modules) - before}
        print(new - {"torch"} - sys.stdlib_module_names)
    """
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "{'gradsieve'}"


def test_public_names() -> None:
    assert len(gradsieve.__all__) <= 12
    assert all(getattr(gradsieve, name).__doc__ for name in gradsieve.__all__)


def load_example(name: str):  # type: ignore[no-untyped-def]
    spec = importlib.util.spec_from_file_location(name, ROOT / f"examples/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_dds_changes_at_most_five_lines_of_a_loop() -> None:
    example = load_example("plain_loop")
    with_dds = inspect.getsource(example.with_dds).splitlines()
    lines = difflib.ndiff(inspect.getsource(example.plain).splitlines()[1:], with_dds[1:])
    assert len([line for line in lines if line.startswith("+ ") and line.strip() != "+"]) <= 5
    accuracies = example.main(epochs=20)
    assert accuracies["with DDS"] > accuracies["plain"]


def test_the_readmes_snippets_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one namespace, one after the other, on stand-ins for what the reader has."""
    monkeypatch.chdir(tmp_path)
    namespace = stand_ins()
    found = [snippet for snippet in snippets(ROOT / "README.md") if snippet.language == "python"]
    assert len(found) >= 3
    for snippet in found:
        exec(compile(snippet.text, "README.md", "exec"), namespace)


def test_the_paper_map_names_things_that_exist() -> None:
    text = (ROOT / "docs/paper_map.md").read_text()
    tests = "".join(f.read_text() for f in (ROOT / "tests").glob("test_*.py"))
    functions = re.findall(r"`([\w/]+)\.py`: `([\w.]+)`", text)
    assert len(functions) > 10
    for file, name in functions:
        source = (SOURCE / f"{file}.py").read_text()
        for part in name.split("."):
            assert re.search(rf"^\s*(def|class) {part}\b", source, re.MULTILINE), f"{file}.py has no {name}"
    for test in re.findall(r"`(test_\w+)`", text):
        assert f"def {test}(" in tests, test


def run_cli(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    command = [sys.executable, "-m", "gradsieve", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, check=False)


def test_the_demo(tmp_path: Path) -> None:
    result = run_cli("demo", "--out", "here", "--seeds", "2", "--steps", "60", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    for text in ("uniform+dev", "best by dev", "gain over uniform", "time", "here/report.html"):
        assert text in result.stdout
    assert "Against uniform" in (tmp_path / "here/report.html").read_text()
    assert '"verdicts"' in (tmp_path / "here/comparison.json").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("demo", "--out", "file/below"), "cannot write"),
        (("demo", "--seeds", "0"), "--seeds"),
        (("demo", "--steps", "many"), "--steps"),
        (("dance",), "dance"),
    ],
)
def test_bad_input_ends_with_exit_code_2_and_no_traceback(
    arguments: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    result = run_cli(*arguments, cwd=tmp_path)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_the_version() -> None:
    assert run_cli("--version", cwd=ROOT).stdout == f"gradsieve {gradsieve.__version__}\n"


@pytest.mark.parametrize("package", ["typer", "jinja2", "sklearn"])
def test_a_missing_extra_is_named(package: str, tmp_path: Path) -> None:
    code = (
        f"import sys; sys.modules['{package}'] = None; sys.argv = ['gradsieve', 'demo'];"
        "from gradsieve.cli import main; main()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert result.returncode == 2
    assert f"needs the package {package}" in result.stderr
    assert "gradsieve[images,translation,report]" in result.stderr
