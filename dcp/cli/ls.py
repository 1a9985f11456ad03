"""``dcp ls``: the checkpoints in a folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dcp.cli.common import (
    Debug,
    Json,
    Options,
    describe_bytes,
    describe_time,
    errors_as_lines,
    print_error,
    print_json,
    print_table,
    storage_options,
)

if TYPE_CHECKING:
    from dcp.inspection import CheckpointSummary

__all__ = ["command"]

_HEADER = ("name", "step", "committed", "format", "tensors", "size", "ranks", "state")
_RIGHT = ("step", "tensors", "size", "ranks")


def command(
    uri: Annotated[str, typer.Argument(help="A folder of checkpoints, or a checkpoint: path or URL.")],
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Open no checkpoint: without format, tensors and ranks, but at once."),
    ] = False,
    options: Options = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """List the checkpoints in a folder: step, time, format, size, committed or not."""
    with errors_as_lines(debug=debug):
        # here, because a usage message must not wait for numpy
        from dcp.inspection import list_checkpoints

        given = storage_options(uri, options)
        summaries = list_checkpoints(uri, quick=quick, storage_options=given)
    if json:
        print_json(summaries)
        return
    if not summaries:
        print_error(f"{uri}: no checkpoints")
        return
    print_table(_HEADER, [_row(summary) for summary in summaries], right=_RIGHT)
    for summary in summaries:
        if summary.problem:
            print_error(f"{summary.name}: {summary.problem}")


def _row(summary: CheckpointSummary) -> tuple[str, ...]:
    def text(value: object) -> str:
        return "-" if value is None else str(value)

    return (
        summary.name,
        text(summary.step),
        describe_time(summary.committed_seconds),
        text(summary.format),
        text(summary.tensors),
        describe_bytes(summary.bytes),
        text(summary.world_size),
        summary.state,
    )
