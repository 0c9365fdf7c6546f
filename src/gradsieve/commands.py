"""The subcommands, as typer reads them."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from . import __version__

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


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
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("gradsieve-demo"),
    seeds: Annotated[int, typer.Option(min=1, help="How often each method is trained.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each run.")] = 1500,
) -> None:
    from .demo import run_demo

    run_demo(out, seeds=seeds, steps=steps, console=Console())
