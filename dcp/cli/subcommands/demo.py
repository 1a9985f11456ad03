"""``dcp demo``: train, kill, resume and reshard a small model on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dcp.cli.common import Debug, errors_as_lines

__all__ = ["command"]


def command(
    root: Annotated[
        Path | None, typer.Option(help="Keep everything in this folder, which must be empty.")
    ] = None,
    save_every: Annotated[int, typer.Option(min=1, help="Steps between saves; a run has four saves.")] = 10,
    s3: Annotated[
        bool, typer.Option("--s3", help="Save to an S3 server, which is started here (SeaweedFS).")
    ] = False,
    serve: Annotated[
        bool, typer.Option("--serve", help="Keep the catalog up at the end, for a browser, until Ctrl-C.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Train a small model, kill it in a save, resume it on other numbers of ranks, and check every claim."""
    with errors_as_lines(debug=debug):
        # here, because a usage message must not wait for numpy
        from dcp.demo.command import run_to_exit_status

        status = run_to_exit_status(root, save_every, s3, serve)
    raise typer.Exit(status)
