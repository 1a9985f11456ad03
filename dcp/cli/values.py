"""Commands about values: ``cat`` and ``stats`` of tensors, ``diff``, ``digest`` and ``verify``."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import shlex
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import EllipsisType
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import typer
from typer import Argument, Option

from dcp.cli import printing
from dcp.cli.common import (
    EXCLUDE,
    EXIT_FINDINGS,
    ONLY,
    SOURCE,
    STORAGE,
    TOP,
    URIS,
    Answer,
    Call,
    Strings,
    sort_key,
    storage_options,
)
from dcp.cli.printing import counted, largest_first
from dcp.storage.errors import CheckpointError
from dcp.storage.near_names import listed, near_names

if TYPE_CHECKING:
    from dcp.inspection.values.difference import Difference, TensorDifference, TensorFacts
    from dcp.inspection.values.digests import CheckpointDigests
    from dcp.inspection.values.elements import Array
    from dcp.inspection.values.statistics import CheckpointStatistics, ElementStatistics, TensorStatistics
    from dcp.inspection.values.tensor_reading import Slices, TensorReader
    from dcp.inspection.verification import VerifyReport

_PRINTED: Final = 1000
"""Larger tensors are printed with edges only, as by numpy."""
_EDGE: Final = 3
_CHILDREN: Final = 8
_VALUE_CHARACTERS: Final = 60
_BAR_CHARACTERS: Final = 40
_MAX_SHOWN_BYTES: Final = 256 << 20
_SHOWN_FINDINGS: Final = 100
_PART: Final = re.compile(r"\.\.\.|-?\d+|(-?\d+)?:(-?\d+)?(:(-?\d+)?)?")


def cat(
    call: Call,
    uri: str = SOURCE,
    fqn: str = Argument(..., metavar="NAME", help="A tensor or another value, by its flat name."),
    slice_: str | None = Option(None, "--slice", metavar="SLICE", help="Slice in numpy's notation: 0:2,:,3."),
    npy: str | None = Option(None, metavar="FILE", help="Write a .npy file instead; '-' is standard output."),
    options: str | None = STORAGE,
) -> Answer | None:
    """Print the values of a tensor, or of a part, or another value. Only the printed part is read."""
    if call.json and npy is not None:
        raise typer.BadParameter("--json and --npy exclude each other")
    slices = None if slice_ is None else _slices(slice_)
    from dcp.inspection.values.tensor_reading import opened

    with opened(uri, storage_options(uri, options)) as reader:
        row = reader.index.position.get(fqn)
        if row is None:
            return _value(reader, fqn, is_tensor=slices is not None or npy is not None)
        if npy is not None:
            _write_npy(reader, row, slices, npy)
        elif call.json:
            shape = reader.shape_of(row, slices)
            if math.prod(shape) > printing.MAX_JSON_ELEMENTS:
                many = f"{math.prod(shape):,} elements are too many for JSON"
                raise CheckpointError(f"{reader.name}: {many}; pass --slice or --npy")
            values = _decoded(reader, row, reader.read(row, slices)).tolist()
            dtype = reader.index.dtype(row).name
            return Answer({"fqn": fqn, "dtype": dtype, "shape": shape, "values": values})
        else:
            _print_tensor(reader, row, slices)
    return None


def _slices(text: str) -> Slices:
    """Parse ``0:2,:,3`` as a numpy index."""
    parts: list[slice | int | EllipsisType] = []
    for part in map(str.strip, text.split(",")):
        bounds = part.split(":")
        if not _PART.fullmatch(part) or (len(bounds) == 3 and bounds[2] and not int(bounds[2])):
            raise typer.BadParameter(
                f"--slice {text!r}: {part!r} is not an index or slice, such as 3, 0:2, ::-1 or ..."
            )
        numbers = [int(bound) if bound.strip(".") else None for bound in bounds]
        parts.append(... if part == "..." else slice(*numbers) if ":" in part else int(part))
    return tuple(parts)


def _value(reader: TensorReader, fqn: str, *, is_tensor: bool) -> Answer:
    from dcp.inspection.checkpoints import object_rows
    from dcp.storage.formats.torch.python_values import value_text

    index = reader.index
    if fqn not in index.objects.position:
        raise CheckpointError(f"{reader.name}: {_absent(fqn, [*index.fqns, *index.objects.fqns])}", fqn=fqn)
    if is_tensor:
        raise CheckpointError(f"{reader.name}: {fqn!r} is not a tensor: omit --slice and --npy", fqn=fqn)
    (row,) = object_rows(reader.store, index, [fqn], limit_bytes=_MAX_SHOWN_BYTES)
    if not row.is_plain:
        raise CheckpointError(
            f"{reader.name}: {fqn!r} is a pickled object ({row.bytes} bytes), which dcp cat does not "
            "unpickle; if you trust the checkpoint, use dcp.load(..., weights_only=False)",
            fqn=fqn,
        )
    data = {"fqn": fqn, "type": type(row.value).__name__, "value": row.value}
    return Answer(data, lambda: printing.line(value_text(row.value)))


def _absent(fqn: str, names: Sequence[str]) -> str:
    """Return names below a prefix without a value, or similar names."""
    below = [name.removeprefix(f"{fqn}.") for name in names if name.startswith(f"{fqn}.")]
    if below:
        return f"{fqn!r} is a prefix of {len(below):,} values, not a value: {_children(fqn, below)}"
    close = near_names(fqn, names)
    return f"no entry {fqn!r} in the checkpoint; " + (
        f"did you mean {' or '.join(map(repr, close))}?" if close else "dcp show lists all entries"
    )


def _children(fqn: str, below: Sequence[str]) -> str:
    """Return the parts below ``fqn``, descending through single parts, with their numbers of values."""
    counts = Counter(name.partition(".")[0] for name in below)
    if len(counts) == 1 and all("." in name for name in below):
        (only,) = counts
        return _children(f"{fqn}.{only}", [name.partition(".")[2] for name in below])
    values = {name for name in below if "." not in name}
    shown = [
        f"{fqn}.{part}" if part in values else f"{fqn}.{part}.* ({count:,})" for part, count in counts.items()
    ]
    return listed(shown, most=_CHILDREN, show=str)


# -- tensors -------------------------------------------------------------------------------------------------


def _decoded(reader: TensorReader, row: int, array: Array) -> Array:
    from dcp.inspection.values.elements import decode

    return decode(array, reader.index.dtype(row))


def _print_tensor(reader: TensorReader, row: int, slices: Slices | None) -> None:
    import numpy as np

    shape = reader.shape_of(row, slices)
    large = math.prod(shape) > _PRINTED
    array = _edges(reader, row, slices, shape) if large else reader.read(row, slices)
    with np.errstate(invalid="ignore"):
        values = _decoded(reader, row, array)
    threshold = 0 if large else sys.maxsize
    print(np.array2string(values, 100, separator=", ", threshold=threshold, edgeitems=_EDGE))
    print(f"{reader.index.dtype(row).name} {printing.shape(shape)}")


def _edges(reader: TensorReader, row: int, slices: Slices | None, shape: tuple[int, ...]) -> Array:
    """Return an array that prints like the whole: first and last elements of long dimensions, and one hidden
    element."""
    import numpy as np

    def ends(size: int) -> list[slice]:
        return [slice(0, _EDGE), slice(size - _EDGE, size)] if size > 2 * _EDGE else [slice(None)]

    sizes = [min(size, 2 * _EDGE + 1) for size in shape]
    parts = [reader.read(row, slices, part) for part in itertools.product(*map(ends, shape))]
    # hidden elements must not change the format of shown ones
    result = np.full(sizes, parts[0].reshape(-1)[0], parts[0].dtype)
    for place, part in zip(itertools.product(*map(ends, sizes)), parts, strict=True):
        result[place] = part
    return result


def _write_npy(reader: TensorReader, row: int, slices: Slices | None, target: str) -> None:
    """Write an array; dtypes unknown to numpy become float32, without loss."""
    import numpy as np

    from dcp.inspection.values.elements import stored_dtype

    shape = reader.shape_of(row, slices)
    sample = _decoded(reader, row, np.zeros((1,) * len(shape), stored_dtype(reader.index.dtype(row))))
    if reader.index.dtype(row).name == "float4_e2m1fn_x2":
        shape = (*shape[:-1], 2 * shape[-1]) if shape else (2,)
    kind = np.lib.format.dtype_to_descr(sample.dtype)
    header = {"descr": kind, "fortran_order": False, "shape": shape}
    with _output(target) as file, printing.progress_bar() as show:
        np.lib.format.write_array_header_1_0(file, header)
        done, total = 0, math.prod(shape) * sample.itemsize
        for slab in reader.slabs(row, slices):
            data = np.ascontiguousarray(_decoded(reader, row, slab))
            file.write(data.data.cast("B") if data.nbytes else b"")
            done += data.nbytes
            if show is not None:
                show(done, total)


@contextlib.contextmanager
def _output(target: str) -> Iterator[BinaryIO]:
    """Yield standard output, or a file that becomes visible when complete."""
    if target == "-":
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    path = Path(target)
    aside = path.with_name(f".tmp-{uuid.uuid4().hex}")
    try:
        with aside.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # otherwise a power cut may leave an empty file
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


# -- stats ---------------------------------------------------------------------------------------------------

_SORTED: Final = ("size", "min", "max", "mean", "std", "norm", "nan", "inf", "zero")
_FIELDS: Final = {"size": "count", "nan": "nans", "inf": "infs", "zero": "zeros"}
_NARROW: Final = ("values", "tensor:32", "norm", "std", "shape", "dtype", "tensor:16")
_SORTS: dict[str, Callable[[TensorStatistics], Any]] = {
    **{name: largest_first("statistics", _FIELDS.get(name, name)) for name in _SORTED},
    "name": lambda tensor: tensor.fqn,
}


def stats(
    uri: str = SOURCE,
    only: Strings = ONLY,
    exclude: Strings = EXCLUDE,
    bins: int = Option(32, min=3, help="Largest number of histogram bins."),
    sort: str = Option("", metavar="COLUMN", help=f"The largest first: {', '.join(_SORTED)}; or name."),
    top: int | None = TOP,
    options: str | None = STORAGE,
) -> Answer:
    """Read tensors and describe their values: range, mean, deviation, norm, NaN, infinities, zeros.

    Histogram bins are powers of two, from large negative to large positive numbers.
    """
    by = sort_key(sort, _SORTS)
    from dcp.inspection.values.statistics import statistics

    given = storage_options(uri, options)
    with printing.progress_bar() as progress:
        found = statistics(
            uri, only=only, exclude=exclude, bins=bins, storage_options=given, progress=progress
        )
    tensors = found.tensors if by is None else sorted(found.tensors, key=by)
    return Answer(
        found, lambda: _print_statistics(found, tensors, top, [step for step in _NARROW if step != sort])
    )


def _print_statistics(
    found: CheckpointStatistics, tensors: Sequence[TensorStatistics], top: int | None, narrow: Sequence[str]
) -> None:
    total = found.total
    values = counted(sum(math.prod(tensor.shape) for tensor in tensors), "value")
    sizes = f"{counted(len(tensors), 'tensor')}, {values}, {printing.size(found.bytes_read)}"
    printing.line(f"{found.url}: {sizes} read, {total.nans:,} NaN, {total.infs:,} infinite")
    if total.nans + total.infs:
        print("min, max, mean, std, norm and values cover finite elements; nan and inf count all others")
    print()
    rows = [(one.fqn, one.dtype, printing.shape(one.shape), *_cells(one.statistics)) for one in tensors]
    header = ("tensor", "dtype", "shape", *(f">{name}" for name in _SORTED[1:]), "values")
    whole = ("total", "", f"{total.count:,}", *_cells(total))
    printing.table(header, rows, narrow=narrow, top=top, what="tensor", total=whole)
    if (histogram := total.histogram) is not None:
        print()
        largest = max(histogram.counts)
        edges = itertools.pairwise(f"{edge:.4g}" for edge in histogram.edges)
        bars = ((f"{count:,}", printing.bar(count, largest, _BAR_CHARACTERS)) for count in histogram.counts)
        printing.table(
            (">from", ">to", ">values", ""), [(*edge, *bar) for edge, bar in zip(edges, bars, strict=True)]
        )


def _cells(statistics: ElementStatistics | None) -> tuple[str | None, ...]:
    if statistics is None:
        return (None,) * 9
    numbers = (statistics.min, statistics.max, statistics.mean, statistics.std, statistics.norm)
    counts = (statistics.nans, statistics.infs, statistics.zeros)
    histogram = statistics.histogram
    return (
        *(None if number is None else f"{number:.4g}" for number in numbers),
        *(f"{count:,}" if count else "" for count in counts),
        "" if histogram is None else printing.sparkline(histogram.counts),
    )


# -- diff ----------------------------------------------------------------------------------------------------

_DIFF_SORTS: dict[str, Callable[[TensorDifference], Any]] = {
    "differ": largest_first("values", "differing"),
    "max": largest_first("values", "max_abs"),
    "l2": largest_first("values", "relative_l2"),
    "name": lambda tensor: tensor.fqn,
}


def diff(
    a: str = SOURCE,
    b: str = Argument(..., help="Another checkpoint of any format and sharding."),
    values: bool = Option(True, help="Read values if checksums do not decide (default)."),
    only: Strings = ONLY,
    exclude: Strings = EXCLUDE,
    rename: Strings = Option(None, metavar="REGEX=>NEW", help="Rename in A before the comparison."),
    sort: str = Option("", metavar="COLUMN", help="The largest first: differ, max, l2; or name."),
    top: int | None = TOP,
    options: str | None = STORAGE,
) -> Answer:
    """Compare checkpoint B with A. Exits with 1 if anything differs.

    Tensors with equal checksums or digests are not read, but their files must exist; `dcp verify` reads them.
    """
    from dcp.inspection.values.difference import diff

    by, renames = sort_key(sort, _DIFF_SORTS), dict(map(_rename, rename or ()))
    with printing.progress_bar() as progress:
        found = diff(
            a,
            b,
            values=values,
            only=only,
            exclude=exclude,
            rename=renames or None,
            storage_options=storage_options(a, options if "://" in a else None),
            options_of_b=storage_options(b, options if "://" in b else None) or {},
            progress=progress,
        )
    if not renames and (rule := _renaming(found)):
        printing.error(f"the names differ by a prefix: compare with --rename {rule}")
    tensors = found.tensors if by is None else sorted(found.tensors, key=by)
    return Answer(
        found, lambda: _print_difference(found, tensors, top), 0 if found.is_empty else EXIT_FINDINGS
    )


def _rename(rule: str) -> tuple[str, str]:
    """Parse a rule as `dcp convert`; ``REGEX=NEW`` is the older form for rules without ``=>``."""
    regex, separator, text = rule.partition("=>" if "=>" in rule else "=")
    if not separator:
        raise typer.BadParameter(f"--rename {rule!r} is not of the form REGEX=>NEW")
    return regex, text


def _renaming(found: Difference) -> str:
    """Suggest a rule for ``--rename`` that turns names of A alone into names of B alone, or ""."""
    from dcp.planners.load.plan import rename_for_missing

    added = [tensor.fqn for tensor in found.tensors if tensor.kind == "added"]
    groups: dict[str, list[str]] = {}
    for name in (tensor.fqn for tensor in found.tensors if added and tensor.kind == "removed"):
        for depth in (1, 2):  # prefixes of models have one level, those in optimizers two
            groups.setdefault(".".join(name.split(".")[:depth]), []).append(name)
    best, most = "", 0
    for names in groups.values():
        rules, renamed = rename_for_missing(names, added, found.equal)
        if rules and len(rules) == 1 and len(renamed) > most:
            best, most = "{}=>{}".format(*next(iter(rules.items()))), len(renamed)
    return best and shlex.quote(best)


def _print_difference(found: Difference, tensors: Sequence[TensorDifference], top: int | None) -> None:
    counts = (("tensor", len(tensors)), ("object", len(found.objects)))
    differing = " and ".join(counted(count, name) for name, count in counts if count)
    verdict = f"{differing} differ{'s' * (len(tensors) + len(found.objects) == 1)}" if differing else "equal"
    same = f"{counted(len(found.equal), 'tensor')} and {counted(found.equal_objects, 'object')} equal"
    printing.line(f"{found.a} and {found.b}: {verdict} ({same}, {printing.size(found.bytes_read)} read)")
    if found.equal and not found.bytes_read:
        printing.line("compared by checksums, without reading tensors; dcp verify reads every byte")
    header = ["tensor", "what", "before", "after", ">differ", ">max abs", ">relative L2"]
    if tensors:
        print()
        narrow = ["tensor:28", "before:12", "after:12", "tensor:12", "before", "after"]
        printing.table(header, [*map(_difference_cells, tensors)], narrow=narrow, top=top, what="tensor")
    if found.objects:
        print()
        rows = []
        for one in found.objects:
            sides = (one.before, one.after)
            shown = (
                None if side is None else printing.shown_value(side, _VALUE_CHARACTERS) for side in sides
            )
            rows.append((one.fqn, one.kind, *shown))
        narrow = ["before:20", "after:20", "object:24", "before:8", "after:8"]
        printing.table(["object", *header[1:4]], rows, narrow=narrow, top=top, what="object")


def _difference_cells(tensor: TensorDifference) -> tuple[str | None, ...]:
    facts, values = (tensor.fqn, tensor.kind, _type(tensor.before), _type(tensor.after)), tensor.values
    if values is None:
        return *facts, "", "", ""
    odd = f" ({values.nonfinite:,} nan or inf)" if values.nonfinite else ""
    distances = (values.max_abs, values.relative_l2)
    return (
        *facts,
        f"{values.differing:,}{odd}",
        *(None if one is None else f"{one:.4g}" for one in distances),
    )


def _type(facts: TensorFacts | None) -> str | None:
    return None if facts is None else f"{facts.dtype} {printing.shape(facts.shape)}"


# -- digest and verify ---------------------------------------------------------------------------------------


def digest(
    uri: str = SOURCE,
    names: Strings = Argument(None, metavar="[NAME]...", help="Tensor names or globs, with all names below."),
    recompute: bool = Option(False, "--recompute", help="Read the tensors; ignore the manifest's digests."),
    options: str | None = STORAGE,
) -> Answer:
    """Print a digest of each tensor: equal for equal bytes, dtype and shape, in any sharding and format.

    Digests in the manifest are free; other tensors are read. Digests detect accidents, not forgeries.
    """
    from dcp.inspection.values.digests import digests

    given = storage_options(uri, options)
    with printing.progress_bar() as progress:
        found = digests(uri, only=names, recompute=recompute, storage_options=given, progress=progress)
    return Answer(found, lambda: _print_digests(found))


def _print_digests(found: CheckpointDigests) -> None:
    rows = [(one.digest, one.dtype, printing.shape(one.shape), one.fqn) for one in found.tensors]
    narrow = ("tensor:32", "shape", "dtype", "tensor:16")
    printing.table(("digest", "dtype", "shape", "tensor"), rows, narrow=narrow)
    read = printing.size(found.bytes_read)
    print()
    printing.line(f"{found.digest}  {found.url}: {counted(len(rows), 'tensor')}, {read} read")


def verify(
    call: Call,
    uris: list[str] = URIS,
    against: str | None = Option(None, metavar="URI", help="Compare the tensors with this checkpoint."),
    only: Strings = Option(None, metavar="GLOB", help="Names in the other checkpoint, as 'model.*'."),
    options: str | None = STORAGE,
) -> Answer:
    """Read every byte of checkpoints and compare the checksums. Exits with 1 for any damage.

    Unreferenced files are reported as notes; `dcp gc` removes leftovers of killed saves. --against compares
    digests, reading the tensors if the manifest has none.
    """
    of_against = storage_options(against or "", options if "://" in (against or "") else None) or {}

    def verified(uri: str) -> VerifyReport:
        from dcp.inspection.verification import verify

        with printing.progress_bar() as progress:
            return verify(
                uri,
                against=against,
                only=only,
                progress=progress,
                storage_options=storage_options(uri, options),
                options_of_against=of_against,
            )

    reports = call.each(uris, verified, _print_report)
    data = [{"url": report.url, "ok": report.ok} | asdict(report) for report in reports]
    return Answer(data, status=0 if all(report.ok for report in reports) else EXIT_FINDINGS)


def _print_report(report: VerifyReport) -> None:
    shown = sorted(report.findings, key=lambda finding: finding.is_note)
    for finding in shown[:_SHOWN_FINDINGS]:
        printing.line(f"{'note' if finding.is_note else finding.kind}: {finding.message}")
    if len(shown) > _SHOWN_FINDINGS:
        print(f"... and {len(shown) - _SHOWN_FINDINGS} more; --json lists all")
    tensors, files = counted(report.tensors, "tensor"), counted(report.files, "file")
    read = f"{tensors}, {files}, {printing.size(report.bytes)} read"
    unchecked = report.unchecked_bytes
    if 0 < unchecked < report.bytes:
        read += f", {printing.size(unchecked)} of them without a checksum"
    verdict = "readable, no checksums" if unchecked and unchecked == report.bytes else "ok"
    verdict = verdict if report.ok else counted(len(report.faults), "finding")
    printing.line(f"{report.url}: {verdict} ({read})")
