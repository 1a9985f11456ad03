"""``dcp ls``: the checkpoints in a folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
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
    printable,
    storage_options,
)
from dcp.cli.tables import counted, print_table

if TYPE_CHECKING:
    from dcp.inspection.checkpoints import CheckpointSummary

__all__ = ["command"]

_HEADER = ("name", "step", "{time}", "format", "tensors", "size", "ranks", "state")
_RIGHT = ("step", "tensors", "size", "ranks")
_NARROW = ("ranks", "format", "name:24", "tensors", "name:10")
_RUNS = ("run", "checkpoints", "newest step", "committed")


def command(
    uri: Annotated[
        str, typer.Argument(help="A folder of checkpoints or of runs, or a checkpoint: path or URL.")
    ],
    recursive: Annotated[
        bool, typer.Option("--recursive", "-r", help="Also the checkpoints of the runs below.")
    ] = False,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Open no checkpoint: without format, tensors and ranks, but at once."),
    ] = False,
    options: Options = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """List the checkpoints in a folder: step, time, format, size, committed or not; and the runs below it."""
    with errors_as_lines(debug=debug):
        # here, because a usage message must not wait for numpy
        from dcp.inspection.checkpoints import list_checkpoints
        from dcp.inspection.runs import list_below, list_runs

        given = storage_options(uri, options)
        listing = list_below if recursive else list_checkpoints
        summaries = listing(uri, quick=quick, storage_options=given)
        # of an object store that is a listing of everything in the checkpoints once more
        is_looked_for = not summaries or "://" not in uri
        runs = list_runs(uri, storage_options=given) if is_looked_for and not recursive else []
    if json:
        print_json([*summaries, *runs])
        return
    if not summaries and not runs:
        print_error(f"{uri}: no checkpoints")
        return
    print(printable(f"{uri}: {_summary(summaries, runs)}"))
    if summaries:
        print()
        header = [column.format(time=_time_of(summaries)) for column in _HEADER]
        print_table(header, [_row(summary) for summary in summaries], right=_RIGHT, narrow=_NARROW)
    if runs:
        print()
        print_table(_RUNS, [_run(run) for run in runs], right=_RUNS[1:3], narrow=("run:20",))
    for summary in summaries:
        if summary.problem:
            print_error(f"{summary.name}: {summary.problem}")


def _summary(summaries: Sequence[CheckpointSummary], runs: Sequence[CheckpointSummary]) -> str:
    states = Counter(summary.state for summary in summaries)
    told = [f"{counted(len(summaries), 'checkpoint')}"] if summaries else []
    told += [f"{states[state]} {state}" for state in ("incomplete", "unreadable") if states[state]]
    sizes = [summary.bytes for summary in summaries if summary.bytes is not None]
    told += [describe_bytes(sum(sizes))] if sizes else []
    told += [f"{counted(len(runs), 'run')} below (-r: with their checkpoints)"] if runs else []
    return ", ".join(told)


def _time_of(summaries: Sequence[CheckpointSummary]) -> str:
    """What the time in the rows is: files without a commit have only that of their last change."""
    kinds = {summary.state == "committed" for summary in summaries if summary.committed_seconds is not None}
    return "written" if len(kinds) > 1 else "modified" if kinds == {False} else "committed"


def _run(run: CheckpointSummary) -> tuple[str, ...]:
    step = "-" if run.step is None else str(run.step)
    return run.name, str(run.checkpoints), step, describe_time(run.committed_seconds)


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
