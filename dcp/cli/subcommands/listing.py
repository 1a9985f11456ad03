"""Subcommands that list: ``ls`` the checkpoints of a folder, ``show`` the entries of one."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dcp.cli.common import (
    Debug,
    Json,
    Options,
    describe_bytes,
    describe_shape,
    describe_time,
    describe_value,
    errors_as_lines,
    print_error,
    print_json,
    printable,
    storage_options,
)
from dcp.cli.tables import Top, bar, counted, output_columns, print_rest, print_table, sort_key, top_of

if TYPE_CHECKING:
    from dcp.inspection.checkpoints import CheckpointHeader, CheckpointSummary
    from dcp.inspection.entries import ModuleNode, ObjectRow, TensorRow
    from dcp.storage.formats.views import DroppedPart

__all__ = ["ls", "show"]


_HEADER = ("name", "step", "{time}", "format", "tensors", "size", "ranks", "state")
_RIGHT = ("step", "tensors", "size", "ranks")
_NARROW = ("ranks", "format", "name:24", "tensors", "name:10")
_RUNS = ("run", "checkpoints", "newest step", "committed")


def ls(
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
        from dcp.inspection.checkpoints import list_below, list_checkpoints, list_runs

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
    shown = [f"{counted(len(summaries), 'checkpoint')}"] if summaries else []
    shown += [f"{states[state]} {state}" for state in ("incomplete", "unreadable") if states[state]]
    sizes = [summary.bytes for summary in summaries if summary.bytes is not None]
    shown += [describe_bytes(sum(sizes))] if sizes else []
    shown += [f"{counted(len(runs), 'run')} below (-r: with their checkpoints)"] if runs else []
    return ", ".join(shown)


def _time_of(summaries: Sequence[CheckpointSummary]) -> str:
    """Return the meaning of the time in the rows: files without a commit have only that of their last
    change."""
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


_VALUE_CHARACTERS = 100
_FACT_COLUMNS = 12

_SORTS: dict[str, Callable[[TensorRow], Any]] = {
    "name": lambda row: row.fqn,
    "size": lambda row: -row.bytes,
    "dtype": lambda row: (row.dtype, row.fqn),
}
_BAR_CHARACTERS = 24


def show(
    uri: Annotated[str, typer.Argument(help="A checkpoint: path or URL.")],
    tree: Annotated[
        bool, typer.Option("--tree", help="Group the tensors by module, with a picture of their sizes.")
    ] = False,
    objects: Annotated[bool, typer.Option("--objects", help="List the other values, too.")] = False,
    sort: Annotated[
        str,
        typer.Option("--sort", metavar="COLUMN", help="Tensors by name, dtype or size."),
    ] = "",
    top: Top = None,
    options: Options = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what is in a checkpoint: where it comes from, its tensors, with --objects its other values."""
    by = sort_key(sort, _SORTS) if sort else None
    with errors_as_lines(debug=debug):
        # here, because a usage message must not wait for numpy
        from dcp.inspection.checkpoints import header_of
        from dcp.inspection.entries import module_tree, object_rows, tensor_rows
        from dcp.storage.formats.opening import open_source
        from dcp.storage.stores.opening import OpenWith

        source = open_source(uri, open_store=OpenWith(storage_options(uri, options)))
        store, index = source.store, source.index
        header = header_of(store, index, url=source.name)
        tensors = tensor_rows(index)
        values = object_rows(store, index) if objects else []
        modules = module_tree(tensors) if tree else None
    if json:
        print_json(_as_json(header, tensors, modules, values if objects else None))
        return
    _print_header(header)
    if modules is not None:
        print()
        _print_tree(modules)
    elif tensors:
        print()
        tensors = tensors if by is None else sorted(tensors, key=by)
        _print_tensors(top_of(tensors, top))
        print_rest(tensors, top, "tensor")
    if values:
        print()
        _print_objects(values)


def _as_json(
    header: CheckpointHeader,
    tensors: list[TensorRow],
    modules: ModuleNode | None,
    values: list[ObjectRow] | None,
) -> dict[str, Any]:
    result: dict[str, Any] = {"checkpoint": header, "tensors": tensors}
    if modules is not None:
        result["modules"] = _module_as_json(modules)
    if values is not None:
        result["objects"] = values
    return result


def _module_as_json(node: ModuleNode) -> dict[str, Any]:
    return {
        "name": node.name,
        "tensors": node.tensors,
        "elements": node.elements,
        "bytes": node.bytes,
        "children": [_module_as_json(child) for child in node.children.values()],
    }


def _print_header(header: CheckpointHeader) -> None:
    from dcp.storage.formats.registry import is_of_files

    of_files = is_of_files(header.format)  # without a commit, whose time is that of their last change
    facts = (
        ("checkpoint", header.url),
        ("format", header.format),
        ("save id", header.save_id),
        ("modified" if of_files else "committed", describe_time(header.committed_seconds)),
        ("written by", _writer(header)),
        ("ranks", header.world_size),
        (
            "tensors",
            f"{header.tensors:,} in {counted(header.chunks, 'chunk')}, {describe_bytes(header.bytes)}",
        ),
        ("objects", header.objects),
        ("files", f"{header.files}, {describe_bytes(header.file_bytes)}"),
        ("seconds", _describe_phases(header.rank_seconds)),
        *_describe_traffic(header.rank_traffic),
        *(("dropped", f"{part}: {_describe_dropped(part)}") for part in header.dropped),
        *((f"user.{key}", repr(value)) for key, value in header.user.items()),
    )
    for name, value in facts:
        _print_fact(printable(name), printable("-" if value is None else str(value)))


def _describe_dropped(part: DroppedPart) -> str:
    values = f" and {counted(part.objects, 'value')}" if part.objects else ""
    return f"{counted(part.tensors, 'tensor')}{values}, {describe_bytes(part.bytes)}"


def _print_fact(name: str, value: str) -> None:
    """Wrapped between words where it is too long; a path has none, and is to be copied."""
    columns = output_columns()
    lines = [value]
    if columns is not None and columns > 2 * _FACT_COLUMNS:
        lines = textwrap.wrap(
            value, columns - _FACT_COLUMNS, break_long_words=False, break_on_hyphens=False
        ) or [value]
    print(f"{name:<10}  " + f"\n{' ' * _FACT_COLUMNS}".join(lines))


def _describe_phases(ranks: Sequence[Mapping[str, float]]) -> str | None:
    """Return each phase of the save with its longest duration, and the rank that took it where there are
    several."""
    phases = dict.fromkeys(phase for seconds in ranks for phase in seconds)
    shown = []
    for phase in phases:
        slowest = max(range(len(ranks)), key=lambda rank: ranks[rank].get(phase, 0.0))
        by = f" (rank {slowest})" if len(ranks) > 1 else ""
        shown.append(f"{phase} {ranks[slowest][phase]:.3g}{by}")
    return ", ".join(shown) or None


def _describe_traffic(ranks: Sequence[Mapping[str, float]]) -> list[tuple[str, str]]:
    """Return the requests that all ranks together made of the storage's service, where that was noted."""
    total = {name: sum(rank.get(name, 0.0) for rank in ranks) for rank in ranks for name in rank}
    if not total:
        return []
    sent, retries = describe_bytes(int(total.get("bytes_sent", 0))), int(total.get("retries", 0))
    again = f", {retries} of them again" if retries else ""
    return [("requests", f"{int(total.get('requests', 0))}{again}, {sent} sent")]


def _writer(header: CheckpointHeader) -> str | None:
    versions = (("dcphub", header.dcphub_version), ("torch", header.torch_version))
    return ", ".join(f"{name} {version}" for name, version in versions if version) or None


def _print_tensors(tensors: list[TensorRow]) -> None:
    print_table(
        ("tensor", "dtype", "shape", "chunks", "size", "files"),
        [
            (
                row.fqn,
                row.dtype,
                describe_shape(row.shape),
                str(row.chunks),
                describe_bytes(row.bytes),
                str(len(row.files)),
            )
            for row in tensors
        ],
        right=("chunks", "size", "files"),
        narrow=("files", "chunks", "tensor:24", "shape", "tensor:10"),
    )


def _print_tree(root: ModuleNode) -> None:
    rows: list[tuple[str, ...]] = []

    def visit(node: ModuleNode, indent: str) -> None:
        for child in sorted(node.children.values(), key=lambda child: child.tensor is not None):
            kind = f"{child.tensor.dtype} {describe_shape(child.tensor.shape)}" if child.tensor else ""
            counted = "" if child.tensor and not child.children else str(child.tensors)
            share = bar(child.bytes, root.bytes, _BAR_CHARACTERS)
            rows.append(
                (
                    indent + child.name,
                    counted,
                    f"{child.elements:,}",
                    describe_bytes(child.bytes),
                    kind,
                    share,
                )
            )
            visit(child, indent + "  ")

    visit(root, "")
    rows.append(("total", str(root.tensors), f"{root.elements:,}", describe_bytes(root.bytes), "", ""))
    header = ("module", "tensors", "elements", "size", "tensor", "of all bytes")
    narrow = ("of all bytes", "tensor:20", "module:20", "elements", "tensor")
    print_table(header, rows, right=("tensors", "elements", "size"), narrow=narrow)


def _print_objects(values: list[ObjectRow]) -> None:
    rows = [(row.fqn, *_describe_value(row)) for row in values]
    print_table(("object", "type", "value"), rows, narrow=("value:30", "object:24", "value:10"))


def _describe_value(row: ObjectRow) -> tuple[str, str]:
    if not row.is_plain:
        return "pickled", f"{describe_bytes(row.bytes)} in {row.file}"
    return type(row.value).__name__, describe_value(row.value, _VALUE_CHARACTERS)
