"""`dropmatch models`: the demo models, and where a model is on this machine."""

from __future__ import annotations

from typing import Annotated

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from dropmatch.cli.console import output_console
from dropmatch.errors import ModelError

app = typer.Typer(help="List, fetch and find models.", no_args_is_help=True)

Name = Annotated[
    str,
    typer.Argument(metavar="NAME", help="A demo model, a hub id (owner/name), a .gguf file or a local folder."),
]
Names = Annotated[
    list[str],
    typer.Argument(metavar="NAME...", help="Demo models, hub ids (owner/name) or .gguf files."),
]


@app.command("list")
def list_models() -> None:
    """List the demo models, which need no account, and whether they are on this machine."""
    from dropmatch import models
    from dropmatch.models.progress import human

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("model")
    table.add_column("here")
    table.add_column("download", justify="right")
    table.add_column("on disk", justify="right")
    table.add_column("licence")
    for entry in models.catalogue():
        table.add_row(
            Text.assemble(entry.name, "\n", (entry.description, "dim")),
            "yes" if entry.cached else "no",
            human(entry.download_bytes),
            human(entry.dense_bytes),
            entry.licence,
        )
    output_console().print(table)


@app.command("fetch")
def fetch(names: Names) -> None:
    """Download models, and convert them as far as needed; print their folders."""
    from dropmatch import models

    for name in names:
        models.where(name)  # a name of no known form shows before the first download
    for name in names:
        typer.echo(models.fetch(name))


@app.command("where")
def where(name: Name) -> None:
    """Print the folder of a model that is on this machine; exit code 1 if it is not."""
    from dropmatch import models

    path = models.where(name)
    if path is None:
        raise ModelError(f"{name} is not on this machine yet: dropmatch models fetch {name}")
    typer.echo(path)
