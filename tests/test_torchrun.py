"""`gradsieve train` and `compare` under torchrun: two processes, one run."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from pyarrow import parquet
from safetensors.torch import load_file
from test_runs import ENVIRONMENT, SMALL_TEXT, command

torch.distributed.is_available() or pytest.skip("no torch.distributed in this build", allow_module_level=True)

SMALL = tuple(
    part
    for key in ("steps=20", "evaluate_every=10", "checkpoint_every=5", "scores=4", "log_every=5")
    for part in ("--set", key)
)


def torchrun(*arguments: str, restarts: int = 0) -> list[str]:
    options = ("--standalone", "--nproc-per-node=2", f"--max-restarts={restarts}")
    return [sys.executable, "-m", "torch.distributed.run", *options, "-m", "gradsieve", *arguments]


def ran(arguments: list[str], folder: Path) -> str:
    done = subprocess.run(arguments, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_two_processes_train_what_one_does(tmp_path: Path) -> None:
    arguments = ("train", "digits-noisy", "--method", "dds", *SMALL)
    settings = ("--set", "scorer.kind=mlp+label", "--set", "steps=6")
    said = ran(torchrun(*arguments, *settings, "--out", "two"), tmp_path)
    ran(command(*arguments, *settings, "--out", "one"), tmp_path)
    assert said.count("test accuracy") == 1  # only the first one speaks
    two, one = (load_file(tmp_path / name / "final/model.safetensors") for name in ("two", "one"))
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-3, atol=1e-4)
    weights = [load_file(sorted((tmp_path / n / "scores").iterdir())[-1])["weights"] for n in ("two", "one")]
    assert torch.equal(weights[0].isnan(), weights[1].isnan())
    files = [{str(f.relative_to(tmp_path / n)) for f in (tmp_path / n).rglob("*")} for n in ("two", "one")]
    assert files[0] == files[1]


def test_a_comparison_and_both_phases(tmp_path: Path) -> None:
    arguments = ("compare", "digits-noisy", "--methods", "uniform,dds-retrained", "--seeds", "1", *SMALL)
    said = ran(torchrun(*arguments, "--out", "c"), tmp_path)
    assert said.count("no verdict without more seeds") == 1
    rows = json.loads((tmp_path / "c/comparison.json").read_text())["rows"]
    assert [row["variant"] for row in rows] == ["uniform", "dds-retrained"]


def test_translation(text: Path, tmp_path: Path) -> None:
    settings = [part for key in SMALL_TEXT for part in ("--set", key)]
    arguments = ("train", "translation", "--data", str(text), "--method", "tcs+dds", *settings)
    ran(torchrun(*arguments, "--out", "two"), tmp_path)
    result = json.loads((tmp_path / "two/result.json").read_text())
    assert result["test"]["bleu"] >= 0
    assert result["skipped"] == 0


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds its processes in /proc")
@pytest.mark.parametrize("whom", ["one process", "all"])
def test_killed_it_goes_on(whom: str, tmp_path: Path) -> None:
    """One process by torchrun's restart; all of them by hand, with one process instead of two."""
    arguments = ("train", "digits-noisy", *SMALL, "--set", "steps=400", "--out", "run", "--resume")
    process = subprocess.Popen(
        torchrun(*arguments, restarts=1), cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    )
    while process.poll() is None and not list((tmp_path / "run/checkpoints").glob("step-*")):
        time.sleep(0.01)
    workers = children(process.pid)
    assert len(workers) == 2
    if whom == "all":
        process.kill()
    for worker in workers if whom == "all" else workers[1:]:
        os.kill(worker, signal.SIGKILL)
    said, _ = process.communicate(timeout=200)
    if whom == "all":
        said = ran(command(*arguments), tmp_path)
    else:
        assert process.returncode == 0
    assert "going on from step" in said
    assert json.loads((tmp_path / "run/result.json").read_text())["steps"] == 400


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("--set", "batch_size=63"), "batch_size is 63, which 2 processes cannot share evenly"),
        (("--set", "dev_batch_size=33"), "dev_batch_size, or the whole dev set, is 33"),
    ],
)
def test_batches_that_cannot_be_shared_are_refused(settings: tuple[str, ...], message: str, tmp_path: Path) -> None:
    arguments = torchrun("train", "digits", *settings, "--out", "run")
    done = subprocess.run(arguments, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=200)
    assert done.returncode != 0
    assert message in done.stderr
    assert not (tmp_path / "run").exists()


def test_jobs_of_its_own_are_refused(tmp_path: Path) -> None:
    arguments = torchrun("compare", "digits", "--jobs", "2", "--out", "c")
    done = subprocess.run(arguments, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=200)
    assert "under torchrun leave it at 1" in done.stderr


def test_scores_in_parts(tmp_path: Path) -> None:
    """Each process writes its own; a part that is there is not made again; the end is that of one process."""
    ran(command("train", "digits", *SMALL, "--set", "scorer.kind=mlp", "--out", "run"), tmp_path)
    small = tmp_path / "small.py"
    small.write_text("from gradsieve.images import parts\nfrom gradsieve.cli import main\nparts.PART = 100\nmain()\n")
    arguments = ["score", "run", "--out"]
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(small)]
    assert "scores from" in ran([*run, *arguments, "two.parquet"], tmp_path)
    assert "scores from" in ran(command(*arguments, "one.parquet"), tmp_path)
    two, one = (parquet.read_table(tmp_path / f"{name}.parquet").to_pydict() for name in ("two", "one"))
    assert two["id"] == one["id"]
    assert two["score"] == pytest.approx(one["score"], abs=1e-4)
    assert not (tmp_path / "two.parts").exists()


def test_the_bench_in_two_processes(tmp_path: Path) -> None:
    arguments = ("bench", "--models", "mlp", "--processes", "2", "--rounds", "1", "--block", "0", "--json", "rows.json")
    assert "in each of 2 processes" in ran(command(*arguments), tmp_path)
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert {row["method"] for row in rows} >= {"uniform", "dds", "batchweight"}
    assert {row["processes"] for row in rows} == {2}
