"""Commands that list: ``ls`` for checkpoints of a folder, ``show`` for entries of a checkpoint."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from typer import Argument, Option

from dcp.cli import printing
from dcp.cli.common import STORAGE, TOP, Answer, sort_key, storage_options
from dcp.cli.printing import counted

if TYPE_CHECKING:
    from dcp.inspection import checkpoints
    from dcp.inspection.checkpoints import CheckpointSummary

_VALUE_CHARACTERS: Final = 100
_FACT_COLUMNS: Final = 12
_BAR_CHARACTERS: Final = 24


def ls(
    uri: str = Argument(..., help="A folder of checkpoints or of runs, or a checkpoint: path or URL."),
    recursive: bool = Option(False, "--recursive", "-r", help="Include the checkpoints of runs below."),
    quick: bool = Option(False, "--quick", help="Open no checkpoint: faster, with fewer columns."),
    options: str | None = STORAGE,
) -> Answer:
    """List the checkpoints in a folder (step, time, format, size, state, metrics) and the runs below."""
    from dcp.inspection.checkpoints import list_below, list_checkpoints, list_runs

    given = storage_options(uri, options)
    listing = list_below if recursive else list_checkpoints
    found = listing(uri, quick=quick, storage_options=given)
    # a search for runs in an object store would list all objects of the checkpoints again
    is_looked_for = not found or "://" not in uri
    runs = list_runs(uri, storage_options=given) if is_looked_for and not recursive else []
    return Answer([*found, *runs], lambda: _print_list(uri, found, runs))


def _print_list(uri: str, found: list[CheckpointSummary], runs: list[CheckpointSummary]) -> None:
    if not found and not runs:
        printing.error(f"{uri}: no checkpoints")
        return
    printing.line(f"{uri}: {', '.join(_sums(found, runs))}")
    if found:
        print()
        header = ["name", ">step", _time_of(found), "format", ">tensors", ">size", ">ranks", "state"]
        header += ["metrics"] if any(one.metrics for one in found) else []
        rows: list[tuple[object, ...]] = []
        for one in found:
            facts = one.format, one.tensors, printing.size(one.bytes), one.world_size, one.state
            metrics = " ".join(f"{name}={value:.6g}" for name, value in one.metrics.items()) or None
            rows.append((one.name, one.step, _time(one), *facts, metrics)[: len(header)])
        narrow = ("ranks", "format", "metrics:24", "name:24", "tensors", "name:10", "metrics")
        printing.table(header, rows, narrow=narrow)
    if runs:
        print()
        rows = [(one.name, one.checkpoints, one.step, _time(one)) for one in runs]
        printing.table(("run", ">checkpoints", ">newest step", "committed"), rows, narrow=("run:20",))
    for one in found:
        if one.problem:
            printing.error(f"{one.name}: {one.problem}")


def _sums(found: Sequence[CheckpointSummary], runs: Sequence[CheckpointSummary]) -> Iterator[str]:
    states = Counter(one.state for one in found)
    if found:
        yield counted(len(found), "checkpoint")
    yield from (f"{states[state]} {state}" for state in ("incomplete", "unreadable") if states[state])
    if sizes := [one.bytes for one in found if one.bytes is not None]:
        yield f"{printing.size(sum(sizes))}"
    if runs:
        yield f"{counted(len(runs), 'run')} below (-r: with their checkpoints)"


def _time_of(found: Sequence[CheckpointSummary]) -> str:
    """Return the heading of the time column: files without a commit have only a modification time."""
    kinds = {one.state == "committed" for one in found if one.committed_seconds is not None}
    return "written" if len(kinds) > 1 else "modified" if kinds == {False} else "committed"


def _time(one: CheckpointSummary) -> str:
    return printing.describe_time(one.committed_seconds)


# -- show ----------------------------------------------------------------------------------------------------

_SORTS: dict[str, Callable[[checkpoints.TensorRow], Any]] = {
    "name": lambda row: row.fqn,
    "size": lambda row: -row.bytes,
    "dtype": lambda row: (row.dtype, row.fqn),
}


def show(
    uri: str = Argument(..., help="A checkpoint: path or URL."),
    tree: bool = Option(False, "--tree", help="Group tensors by module, with a chart of sizes."),
    objects: bool = Option(False, "--objects", help="List other values too."),
    sort: str = Option("", metavar="COLUMN", help="Tensors by name, dtype or size."),
    top: int | None = TOP,
    options: str | None = STORAGE,
) -> Answer:
    """Show a checkpoint's provenance and tensors, and with --objects its other values."""
    by = sort_key(sort, _SORTS)
    from dcp.inspection.checkpoints import header_of, module_tree, object_rows, tensor_rows
    from dcp.storage.formats.opening import open_source
    from dcp.storage.stores.opening import OpenWith

    source = open_source(uri, open_store=OpenWith(storage_options(uri, options)))
    header = header_of(source.store, source.index, url=source.name)
    tensors = tensor_rows(source.index)
    data: dict[str, Any] = {"checkpoint": header, "tensors": tensors}
    data |= {"modules": module_tree(tensors)} if tree else {}
    data |= {"objects": object_rows(source.store, source.index)} if objects else {}

    def print_all() -> None:
        _print_header(header)
        if tensors or tree:
            print()
        if tree:
            _print_tree(data["modules"])
        elif tensors:
            _print_tensors(tensors if by is None else sorted(tensors, key=by), top)
        if data.get("objects"):
            print()
            rows = []
            for row in data["objects"]:
                kind, shown = "pickled", f"{printing.size(row.bytes)} in {row.file}"
                if row.is_plain:
                    kind = type(row.value).__name__
                    shown = printing.shown_value(row.value, _VALUE_CHARACTERS)
                rows.append((row.fqn, kind, shown))
            narrow = ("value:30", "object:24", "value:10")
            printing.table(("object", "type", "value"), rows, narrow=narrow)

    return Answer(data, print_all)


def _print_header(header: checkpoints.CheckpointHeader) -> None:
    from dcp.storage.formats.registry import is_of_files

    of_files = is_of_files(header.format)  # files without a commit have the time of their last change
    versions = (("dcphub", header.dcphub_version), ("torch", header.torch_version))
    chunks, size = counted(header.chunks, "chunk"), printing.size(header.bytes)
    facts = (
        ("checkpoint", header.url),
        ("format", header.format),
        ("save id", header.save_id),
        ("modified" if of_files else "committed", printing.describe_time(header.committed_seconds)),
        ("written by", ", ".join(f"{name} {version}" for name, version in versions if version) or None),
        ("ranks", header.world_size),
        ("tensors", f"{header.tensors:,} in {chunks}, {size}"),
        ("objects", header.objects),
        ("files", f"{header.files}, {printing.size(header.file_bytes)}"),
        ("seconds", _phases(header.rank_seconds)),
        *_traffic(header.rank_traffic),
        *(("dropped", f"{part}: {_dropped(part)}") for part in header.dropped),
        *((f"user.{key}", repr(value)) for key, value in header.user.items()),
    )
    for name, value in facts:
        text = printing.printable("-" if value is None else str(value))
        print(f"{printing.printable(name):<10}  {_wrapped(text)}")


def _dropped(part: Any) -> str:
    values = f" and {counted(part.objects, 'value')}" if part.objects else ""
    return f"{counted(part.tensors, 'tensor')}{values}, {printing.size(part.bytes)}"


def _wrapped(value: str) -> str:
    """Wrap long text between words; paths stay whole for copying."""
    columns = printing.output_columns()
    if columns is None or columns <= 2 * _FACT_COLUMNS:
        return value
    width, between = columns - _FACT_COLUMNS, f"\n{' ' * _FACT_COLUMNS}"
    return between.join(textwrap.wrap(value, width, break_long_words=False, break_on_hyphens=False))


def _phases(ranks: Sequence[Mapping[str, float]]) -> str | None:
    """Return the phases of a save with the longest duration, and its rank if there were several."""
    shown = []
    for phase in dict.fromkeys(phase for seconds in ranks for phase in seconds):
        slowest = max(range(len(ranks)), key=lambda rank: ranks[rank].get(phase, 0.0))
        by = f" (rank {slowest})" if len(ranks) > 1 else ""
        shown.append(f"{phase} {ranks[slowest][phase]:.3g}{by}")
    return ", ".join(shown) or None


def _traffic(ranks: Sequence[Mapping[str, float]]) -> Iterator[tuple[str, str]]:
    """Yield recorded requests of all ranks to the object store."""
    total: Counter[str] = Counter()
    for rank in ranks:
        total.update({name: int(count) for name, count in rank.items()})
    if total:
        again = f", {total['retries']} of them again" if total["retries"] else ""
        yield "requests", f"{total['requests']}{again}, {printing.size(total['bytes_sent'])} sent"


def _print_tensors(tensors: Sequence[checkpoints.TensorRow], top: int | None) -> None:
    rows = [
        (row.fqn, row.dtype, printing.shape(row.shape), row.chunks, printing.size(row.bytes), len(row.files))
        for row in tensors
    ]
    header = ("tensor", "dtype", "shape", ">chunks", ">size", ">files")
    narrow = ("files", "chunks", "tensor:24", "shape", "tensor:10")
    printing.table(header, rows, narrow=narrow, top=top, what="tensor")


def _print_tree(root: checkpoints.ModuleNode) -> None:
    rows: list[tuple[object, ...]] = []

    def visit(node: checkpoints.ModuleNode, indent: str) -> None:
        for child in sorted(node.children, key=lambda child: child.tensor is not None):
            kind = f"{child.tensor.dtype} {printing.shape(child.tensor.shape)}" if child.tensor else ""
            count = "" if child.tensor and not child.children else child.tensors
            share = printing.bar(child.bytes, root.bytes, _BAR_CHARACTERS)
            size = printing.size(child.bytes)
            rows.append((indent + child.name, count, f"{child.elements:,}", size, kind, share))
            visit(child, indent + "  ")

    visit(root, "")
    total = ("total", root.tensors, f"{root.elements:,}", printing.size(root.bytes), "", "")
    header = ("module", ">tensors", ">elements", ">size", "tensor", "of all bytes")
    narrow = ("of all bytes", "tensor:20", "module:20", "elements", "tensor")
    printing.table(header, rows, narrow=narrow, total=total)
