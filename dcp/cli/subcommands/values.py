"""Subcommands that read tensors: ``cat`` prints them, ``stats`` describes them."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import EllipsisType
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Final

import typer

from dcp.cli.common import (
    Debug,
    Exclude,
    Json,
    Only,
    Options,
    Source,
    describe_bytes,
    describe_shape,
    errors_as_lines,
    print_json,
    printable,
    storage_options,
)
from dcp.cli.tables import (
    Top,
    bar,
    counted,
    largest_first,
    print_rest,
    print_table,
    progress_bar,
    sort_key,
    sparkline,
    top_of,
)
from dcp.storage.errors import CheckpointError
from dcp.storage.near_names import listed, near_names

if TYPE_CHECKING:
    from dcp.inspection.values.elements import Array
    from dcp.inspection.values.statistics import (
        CheckpointStatistics,
        ElementStatistics,
        Histogram,
        TensorStatistics,
    )
    from dcp.inspection.values.tensor_reading import Slices, TensorReader

__all__ = ["cat", "stats"]


_PRINTED: Final = 1000
"""Of tensors with more elements only the edges are printed, as numpy does it."""
_EDGE: Final = 3
_CHILDREN: Final = 8
_MAX_JSON_ELEMENTS: Final = 1_000_000
_PART: Final = re.compile(
    r"(?P<start>-?\d+)?(?P<is_slice>:)?(?(is_slice)(?P<stop>-?\d+)?(?::(?P<step>-?\d+)?)?)"
)


def cat(
    uri: Source,
    fqn: Annotated[str, typer.Argument(metavar="NAME", help="A tensor or another value, by its flat name.")],
    slice_: Annotated[
        str | None,
        typer.Option("--slice", metavar="SLICE", help="A part of a tensor, as numpy has it: '0:2,:,3'."),
    ] = None,
    npy: Annotated[
        str | None,
        typer.Option("--npy", metavar="FILE", help="Write a .npy file instead; '-' is standard output."),
    ] = None,
    options: Options = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Print the values of a tensor, or of a part of it, or another value. Only what is shown is read."""
    if json and npy is not None:
        raise typer.BadParameter("--json and --npy exclude each other")
    slices = None if slice_ is None else _slices(slice_)
    with errors_as_lines(debug=debug):
        # here, because a usage message must not wait for numpy
        from dcp.inspection.values.tensor_reading import open_tensors

        given = storage_options(uri, options)
        with open_tensors(uri, storage_options=given, verify="full") as reader:
            row = reader.index.position.get(fqn)
            if row is None:
                _cat_value(reader, fqn, is_tensor=slices is not None or npy is not None, json=json)
            elif npy is not None:
                _write_npy(reader, row, slices, npy)
            elif json:
                print_json(_as_json(reader, row, slices))
            else:
                _print_tensor(reader, row, slices)


def _slices(text: str) -> Slices:
    """Return ``0:2,:,3`` as numpy would take it."""
    parts: list[slice | int | EllipsisType] = []
    for part in text.split(","):
        stripped = part.strip()
        match = _PART.fullmatch(stripped)
        if stripped == "...":
            parts.append(...)
        elif match is None or not stripped or match["step"] == "0":
            raise typer.BadParameter(f"{part!r} of --slice {text!r} is none of 3, 0:2, ::-1 and ...")
        elif match["is_slice"]:
            numbers = (match["start"], match["stop"], match["step"])
            parts.append(slice(*(None if number is None else int(number) for number in numbers)))
        else:
            parts.append(int(match["start"]))
    return tuple(parts)


def _cat_value(reader: TensorReader, fqn: str, *, is_tensor: bool, json: bool) -> None:
    from dcp.inspection.entries import object_row

    index = reader.index
    if fqn not in index.objects.position:
        raise CheckpointError(f"{reader.name}: {_absent(fqn, [*index.fqns, *index.objects.fqns])}", fqn=fqn)
    if is_tensor:
        raise CheckpointError(f"{reader.name}: {fqn!r} is no tensor, and has no slices and no .npy", fqn=fqn)
    value = object_row(reader.store, index, fqn)
    if not value.is_plain:
        raise CheckpointError(
            f"{reader.name}: {fqn!r} is pickled ({value.bytes} bytes), and pickles are not run; load it with "
            "dcp.load(..., weights_only=False) if you trust the checkpoint",
            fqn=fqn,
        )
    if json:
        print_json({"fqn": fqn, "type": type(value.value).__name__, "value": value.value})
    else:
        from dcp.storage.formats.torch.python_values import value_text

        print(printable(value_text(value.value)))


def _absent(fqn: str, names: Sequence[str]) -> str:
    """Return names below one that has no value of its own, or names that may have been meant."""
    below = [name.removeprefix(f"{fqn}.") for name in names if name.startswith(f"{fqn}.")]
    if below:
        return f"{fqn!r} is not a value, {len(below):,} are below it: {_children(fqn, below)}"
    close = near_names(fqn, names)
    return f"there is no {fqn!r}; " + (
        f"did you mean {' or '.join(map(repr, close))}?" if close else "dcp show lists all"
    )


def _children(fqn: str, below: Sequence[str]) -> str:
    """Return the parts directly below ``fqn``, or those below the only one, with how many values each has."""
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
    print(
        np.array2string(
            values,
            separator=", ",
            threshold=0 if large else sys.maxsize,
            edgeitems=_EDGE,
            max_line_width=100,
        )
    )
    described = describe_shape(shape)
    print(f"{reader.index.dtype(row).name} {described}")


def _edges(reader: TensorReader, row: int, slices: Slices | None, shape: tuple[int, ...]) -> Array:
    """Return an array that prints as the whole would: of long dimensions the first and last elements, and
    one that is not shown."""
    import numpy as np

    long = [size > 2 * _EDGE for size in shape]
    sizes = [2 * _EDGE + 1 if cut else size for cut, size in zip(long, shape, strict=True)]
    result: Array | None = None
    for ends in itertools.product(*([False, True] if cut else [None] for cut in long)):
        places = [_end(end, size) for end, size in zip(ends, sizes, strict=True)]
        part = reader.read_part(row, slices, [_end(e, n) for e, n in zip(ends, shape, strict=True)])
        if result is None:
            result = np.zeros(sizes, part.dtype)
            result[...] = part.reshape(-1)[0]  # what is not shown must not change how the others are printed
        result[tuple(places)] = part
    assert result is not None
    return result


def _end(is_last: bool | None, size: int) -> slice:
    if is_last is None:
        return slice(None)
    return slice(size - _EDGE, size) if is_last else slice(0, _EDGE)


def _as_json(reader: TensorReader, row: int, slices: Slices | None) -> dict[str, Any]:
    shape = reader.shape_of(row, slices)
    if math.prod(shape) > _MAX_JSON_ELEMENTS:
        raise CheckpointError(
            f"{reader.name}: {math.prod(shape):,} elements are too many for JSON; take a --slice, or --npy"
        )
    return {
        "fqn": reader.index.fqns[row],
        "dtype": reader.index.dtype(row).name,
        "shape": shape,
        "values": _decoded(reader, row, reader.read(row, slices)).tolist(),
    }


def _write_npy(reader: TensorReader, row: int, slices: Slices | None, target: str) -> None:
    """Write an array; types that numpy lacks are written as float32, which has all their values."""
    import numpy as np

    from dcp.inspection.values.elements import stored_dtype

    shape = reader.shape_of(row, slices)
    sample = _decoded(reader, row, np.zeros((1,) * len(shape), stored_dtype(reader.index.dtype(row))))
    if reader.index.dtype(row).name == "float4_e2m1fn_x2":
        shape = (*shape[:-1], 2 * shape[-1]) if shape else (2,)
    header = {
        "descr": np.lib.format.dtype_to_descr(sample.dtype),
        "fortran_order": False,
        "shape": shape,
    }
    with _output(target) as file, progress_bar(target) as show:
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
    """Yield standard output, or a file that appears when it is complete."""
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
            os.fsync(file.fileno())  # else a power cut may leave the name, and nothing under it
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


_HEADER = ("tensor", "dtype", "shape", "min", "max", "mean", "std", "norm", "nan", "inf", "zero", "values")
_RIGHT = ("min", "max", "mean", "std", "norm", "nan", "inf", "zero")
_SORTED = ("size", "min", "max", "mean", "std", "norm", "nan", "inf", "zero")
_NARROW = ("values", "tensor:32", "norm", "std", "shape", "dtype", "tensor:16")
_BAR_CHARACTERS = 40


def stats(
    uri: Source,
    only: Only = None,
    exclude: Exclude = None,
    bins: Annotated[int, typer.Option(min=3, help="Bins of a histogram, at most.")] = 32,
    sort: Annotated[
        str,
        typer.Option("--sort", metavar="COLUMN", help=f"The largest first: {', '.join(_SORTED)}; or name."),
    ] = "",
    top: Top = None,
    options: Options = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Read tensors and describe their values: range, mean, deviation, norm, NaN, infinities, zeros.

    Histograms are over powers of two: from large negative numbers over zero to large positive ones.
    """
    by = sort_key(sort, _sorts()) if sort else None
    with errors_as_lines(debug=debug), progress_bar(uri) as progress:
        # here, because a usage message must not wait for numpy
        from dcp.inspection.values.statistics import statistics

        found = statistics(
            uri,
            only=only or None,
            exclude=exclude or None,
            bins=bins,
            storage_options=storage_options(uri, options),
            progress=progress,
        )
    if json:
        print_json(found)
    else:
        _print(found, list(found.tensors) if by is None else sorted(found.tensors, key=by), top, kept=sort)


def _sorts() -> dict[str, Callable[[TensorStatistics], Any]]:
    """Return the key to sort by."""

    def figure(name: str, tensor: TensorStatistics) -> float | None:
        return None if tensor.statistics is None else getattr(tensor.statistics, name)

    fields = {"size": "count", "nan": "nans", "inf": "infs", "zero": "zeros"}
    keys: dict[str, Callable[[TensorStatistics], Any]] = {
        name: largest_first(partial(figure, fields.get(name, name))) for name in _SORTED
    }
    return keys | {"name": lambda tensor: tensor.fqn}


def _print(
    found: CheckpointStatistics, tensors: list[TensorStatistics], top: int | None, *, kept: str
) -> None:
    total = found.total
    sizes = (
        counted(len(tensors), "tensor"),
        counted(sum(math.prod(tensor.shape) for tensor in tensors), "value"),
        describe_bytes(found.bytes_read),
    )
    print(printable(f"{found.url}: {', '.join(sizes)} read, {total.nans:,} NaN, {total.infs:,} infinite"))
    if total.nans + total.infs:
        print("min, max, mean, std, norm and values are of the finite elements; nan and inf count the others")
    print()
    rows = [
        (tensor.fqn, tensor.dtype, describe_shape(tensor.shape), *_cells(tensor.statistics))
        for tensor in top_of(tensors, top)
    ]
    rows.append(("total", "", f"{found.total.count:,}", *_cells(found.total)))
    print_table(_HEADER, rows, right=_RIGHT, narrow=[step for step in _NARROW if step != kept])
    print_rest(tensors, top, "tensor")
    if found.total.histogram is not None:
        print()
        _print_histogram(found.total.histogram)


def _cells(statistics: ElementStatistics | None) -> tuple[str, ...]:
    if statistics is None:
        return ("-",) * 9
    numbers = (statistics.min, statistics.max, statistics.mean, statistics.std, statistics.norm)
    counts = (statistics.nans, statistics.infs, statistics.zeros)
    histogram = statistics.histogram
    return (
        *("-" if number is None else f"{number:.4g}" for number in numbers),
        *("" if count == 0 else f"{count:,}" for count in counts),
        sparkline(histogram.counts) if histogram is not None else "",
    )


def _print_histogram(histogram: Histogram) -> None:
    largest = max(histogram.counts)
    rows = [
        (f"{low:.4g}", f"{high:.4g}", f"{count:,}", bar(count, largest, _BAR_CHARACTERS))
        for (low, high), count in zip(pairwise(histogram.edges), histogram.counts, strict=True)
    ]
    print_table(("from", "to", "values", ""), rows, right=("from", "to", "values"))
