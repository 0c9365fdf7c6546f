"""The subcommands, as typer reads them."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from . import __version__

if TYPE_CHECKING:
    import torch

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

Data = Annotated[Path | None, typer.Option("--data", help="Folder with the data that the recipe needs.")]
Out = Annotated[Path, typer.Option("--out", help="Folder for the results.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the recipe; may be repeated.")
]
Scores = Annotated[
    Path | None,
    typer.Option(
        "--scores",
        help="For images: train on the best 80% by this file of `gradsieve score`; see selection.keep, selection.use.",
    ),
]
Overhead = Annotated[
    float | None,
    typer.Option("--overhead", help="For images: how much longer than a plain step one of dds may take, such as 0.1."),
]
TensorBoard = Annotated[
    bool, typer.Option("--tensorboard", help="Also write TensorBoard's event files, into each run's folder.")
]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda, ...; by default a GPU if there is one.")]


def _version(show: bool) -> None:
    if show:
        print(f"gradsieve {__version__}")
        raise typer.Exit


@app.callback(help="Learn, while a model trains, which data help it.")
def gradsieve(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command(help="Compare plain training with DDS on digits with wrong labels. Needs no data and about a minute.")
def demo(
    out: Out = Path("gradsieve-demo"),
    seeds: Annotated[int, typer.Option(min=1, help="How often each method is trained.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each run.")] = 1500,
) -> None:
    from .demo import run_demo

    run_demo(out, seeds=seeds, steps=steps, console=Console())


@app.command(help="List the recipes and what each needs; or show one whole, as it would run.")
def recipes(
    name: Annotated[str | None, typer.Argument(help="A recipe to show.")] = None, overrides: Overrides = None
) -> None:
    from .runs.recipe import recipe_names
    from .tasks import TASKS, recipe_of

    console = Console()
    if name is not None:
        console.print_json(recipe_of(name, overrides or []).model_dump_json())
        return
    table = Table("recipe", "what it is", "needs", show_lines=True)
    for each in map(recipe_of, recipe_names()):
        table.add_row(escape(each.name), escape(each.description), escape(each.needs))
    console.print(table)
    for task, kind in TASKS.items():
        console.print(f"Methods for {task}: {', '.join(kind.methods)}", highlight=False)


@app.command(help="Train one model by one method: one run directory.")
def train(
    recipe: Annotated[str, typer.Argument(help="Name of a recipe, or path of a .toml file.")],
    out: Out,
    method: Annotated[str, typer.Option(help="uniform, dds, ...; see `gradsieve recipes`.")] = "dds",
    seed: Annotated[int, typer.Option(min=0, max=2**62)] = 0,
    data: Data = None,
    overrides: Overrides = None,
    scores: Scores = None,
    overhead: Overhead = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run that is in --out.")] = False,
    device: Device = "auto",
    tensorboard: TensorBoard = False,
) -> None:
    from .runs.live import check_tensorboard
    from .runs.progress import Progress, duration
    from .runs.team import Team, joined
    from .tasks import TASKS, recipe_for

    if tensorboard:
        check_tensorboard()
    resolved = recipe_for(method, recipe, _overrides(overrides, scores, overhead))
    task, place = TASKS[resolved.task], _device(device)
    with joined(place):
        first = Team().first
        console = Console(quiet=not first)
        with Progress(console, quiet=not first, tensorboard=tensorboard and first) as progress:
            result = task.train(
                resolved,
                method,
                seed=seed,
                data=data,
                out=out,
                resume=resume,
                device=place,
                progress=progress,
            )
    if not first:
        return
    if task.picture is not None:
        task.picture([out], out / "usage.png", title=f"{resolved.name}: {method}, seed {seed}")
    last, best = result["test"][task.metric], result["test_best_by_dev"][task.metric]
    console.print(
        f"{resolved.name}, {method}, seed {seed}: test {task.metric} {last:.2f} at the end, {best:.2f} at the step "
        f"that dev chose ({result['best_step']:,}); {duration(result['seconds'])} of training. Everything is in {out}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


@app.command(help="Train several methods on the same data with the same budget, and say which one helps.")
def compare(
    recipe: Annotated[str, typer.Argument(help="Name of a recipe, or path of a .toml file.")],
    out: Out,
    methods: Annotated[
        str, typer.Option(help="Separated by commas; each may change keys of the recipe: dds:scorer.kind=paper")
    ] = "uniform,dds",
    seeds: Annotated[int, typer.Option(min=1, help="How often each method is trained.")] = 3,
    first_seed: Annotated[
        int, typer.Option(min=0, max=2**62, help="Seeds count from here: fresh ones, that nothing was chosen by.")
    ] = 0,
    data: Data = None,
    overrides: Overrides = None,
    scores: Scores = None,
    overhead: Overhead = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at the same time, on the CPU's cores.")] = 1,
    device: Device = "auto",
    tensorboard: TensorBoard = False,
    frontier: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw results against time into this PNG, SVG or PDF file.")
    ] = None,
) -> None:
    from .compare import compare as run
    from .runs.live import check_tensorboard
    from .runs.team import joined

    if tensorboard:
        check_tensorboard()

    variants = [name.strip() for name in methods.split(",") if name.strip()]
    place = _device(device)
    with joined(place):
        run(
            recipe,
            variants,
            seeds,
            overrides=_overrides(overrides, scores, overhead),
            data=data,
            out=out,
            device=place,
            jobs=jobs,
            console=Console(),
            first_seed=first_seed,
            tensorboard=tensorboard,
            frontier=frontier,
        )


@app.command(help="Make one HTML page of a run, of several, or of a comparison, ended or not. It needs no network.")
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders of runs or comparisons.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="The file; by default report.html in the first folder.")
    ] = None,
) -> None:
    from .report.page.build import write_report
    from .tasks import TASKS

    place = write_report(folders, out, TASKS)
    Console().print(f"The report is {place}", highlight=False, markup=False, soft_wrap=True)


@app.command(help="Measure what a training step costs by each method, against plain training beside it.")
def bench(
    models: Annotated[
        str, typer.Option(help="Separated by commas: mlp, wrn-16-1, wrn-28-2, transformer, translation.")
    ] = "mlp,wrn-16-1,wrn-28-2,transformer,translation",
    methods: Annotated[str | None, typer.Option(help="Separated by commas; by default all that a model has.")] = None,
    batch_sizes: Annotated[
        str | None, typer.Option(help="Separated by commas, to see growth; by default each model's own.")
    ] = None,
    processes: Annotated[int, typer.Option(min=1, help="Data-parallel ones, on this machine, by torchrun.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="How often all take their turns.")] = 9,
    block: Annotated[float, typer.Option(min=0.0, help="Seconds of a turn, about.")] = 0.5,
    json: Annotated[Path | None, typer.Option("--json", help="File for the rows.")] = None,
    device: Device = "auto",
) -> None:
    from .bench.run import bench as run
    from .errors import GradsieveError
    from .runs.team import Team, joined, start

    def names(text: str) -> list[str]:
        return [name.strip() for name in text.split(",") if name.strip()]

    if processes > 1 and "RANK" not in os.environ:
        raise typer.Exit(start(processes))
    try:
        sizes = [int(size) for size in names(batch_sizes or "")]
    except ValueError:
        raise GradsieveError(f"--batch-sizes {batch_sizes}: give numbers, separated by commas.") from None
    if sizes and min(sizes) < 2:
        raise GradsieveError(f"--batch-sizes {batch_sizes}: a batch has two examples at least.")
    place = _device(device)
    with joined(place):
        run(
            names(models),
            None if methods is None else names(methods),
            batch_sizes=sizes,
            rounds=rounds,
            block=block,
            device=place,
            console=Console(quiet=not Team().first),
            json=json,
        )


@app.command(help="Score a data set by the trained scorer of a run: which examples help, which hurt. Writes Parquet.")
def score(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run of dds on images.")],
    out: Annotated[Path, typer.Option("--out", help="The Parquet file: id, label, score, weight_percentile.")],
    data: Data = None,
    split: Annotated[str, typer.Option(help="train, dev or test, if --data is so divided.")] = "train",
    keep: Annotated[
        float | None, typer.Option(min=0, max=1, help="Also write the ids of the best share, for instance 0.8.")
    ] = None,
    device: Device = "auto",
) -> None:
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    from .images.use import score_run
    from .runs.team import Team, joined

    place = _device(device)
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    with joined(place):
        console = Console(quiet=not Team().first)
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("scoring", total=None)
            lines = score_run(
                run,
                out,
                data=data,
                split=split,
                keep=keep,
                device=place,
                on_rows=lambda done, total: bar.update(task, completed=done, total=total),
            )
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


@app.command(help="Look whether DDS can work with a recipe and its data, before hours are spent. Exit code 1 if not.")
def doctor(
    recipe: Annotated[str, typer.Argument(help="Name of a recipe, or path of a .toml file.")],
    method: Annotated[str, typer.Option(help="One that learns a scorer: dds, dds-retrained, tcs+dds.")] = "dds",
    data: Data = None,
    overrides: Overrides = None,
    device: Device = "auto",
) -> None:
    from rich.progress import Progress

    from .report.diagnosis import diagnosis_table
    from .tasks import TASKS, recipe_for

    console = Console()
    resolved = recipe_for(method, recipe, overrides or [])
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("looking", total=None)
        found = TASKS[resolved.task].doctor(
            resolved,
            method,
            data=data,
            device=_device(device),
            on_rows=lambda done, total: bar.update(task, description="comparing", completed=done, total=total),
        )
    console.print(diagnosis_table(found, f"{resolved.name}, {method}"))
    console.print(found.summary, highlight=False, markup=False, soft_wrap=True)
    if not found.ok:
        raise typer.Exit(1)


@app.command(help="Translate lines of standard input to English by the model of a translation run.")
def translate(
    run: Annotated[Path, typer.Argument(help="Folder of the run.")],
    language: Annotated[str | None, typer.Option(help="Of the input; by default the run's low-resource one.")] = None,
    last: Annotated[bool, typer.Option("--last", help="The last parameters, not those that dev chose.")] = False,
    beam: Annotated[int | None, typer.Option(min=1, help="Width of the search; by default the recipe's.")] = None,
    device: Device = "auto",
) -> None:
    import sys

    from .errors import GradsieveError
    from .translation.use import Trained

    model = Trained(run, "last" if last else "best", _device(device))
    sys.stdin.reconfigure(encoding="utf-8", errors="strict")  # type: ignore[union-attr]
    try:
        for line in model.translate(sys.stdin, language, beam):
            print(line, flush=True)
    except UnicodeDecodeError as error:
        raise GradsieveError(f"standard input is not UTF-8 ({error.reason}). Convert it: iconv -t UTF-8") from error


@app.command(help="Fetch a data set that recipes need: cifar10, or ted (the paper's languages of the TED corpus).")
def download(
    name: Annotated[str, typer.Argument(help="cifar10 or ted")],
    out: Annotated[Path, typer.Option(help="Folder for the data.")],
) -> None:
    from rich.progress import DownloadColumn, Progress, TransferSpeedColumn

    from .errors import GradsieveError
    from .images.download import download_cifar10
    from .translation.download import download_ted

    sets: dict[str, Callable[..., bool]] = {"cifar10": download_cifar10, "ted": download_ted}
    if name not in sets:
        raise GradsieveError(f"there is no data set {name!r} to fetch; there are {' and '.join(sets)}.")
    console = Console()
    with Progress(*Progress.get_default_columns(), DownloadColumn(), TransferSpeedColumn(), console=console) as bar:
        task = bar.add_task(name, total=None)
        fetched = sets[name](out, on_bytes=lambda done, total: bar.update(task, completed=done, total=total or None))
    console.print(f"{name} {'is' if fetched else 'was already'} in {out}.", highlight=False, markup=False)


def _overrides(given: list[str] | None, scores: Path | None, overhead: float | None) -> list[str]:
    """`--scores FILE` and `--overhead SHARE` say for short what `--set` says at length."""
    import json

    short = {
        "selection.file": None if scores is None else json.dumps(str(scores)),
        "dds.overhead": None if overhead is None else str(overhead),
    }
    return [*(given or []), *(f"{key}={value}" for key, value in short.items() if value is not None)]


def _device(name: str) -> "torch.device":
    import torch

    from .errors import GradsieveError

    if name == "auto":
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        if found is None:
            return torch.device("cpu")
        return torch.device(found.type, int(os.environ["LOCAL_RANK"])) if "LOCAL_RANK" in os.environ else found
    try:
        device = torch.device(name)
        torch.ones(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        raise GradsieveError(f"--device {name} is not to be had here: {str(error).splitlines()[0]}") from error
    return device
