"""``dcp stats``: what the values of tensors are like."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dcp.cli.common import (
    Debug,
    Json,
    Options,
    describe_bytes,
    errors_as_lines,
    print_json,
    printable,
    storage_options,
)
from dcp.cli.pictures import bar, sparkline
from dcp.cli.progress import progress_bar
from dcp.cli.tables import Top, counted, largest_first, print_rest, print_table, sort_key, top_of

if TYPE_CHECKING:
    from dcp.inspection.values.statistics import (
        CheckpointStatistics,
        ElementStatistics,
        Histogram,
        TensorStatistics,
    )

__all__ = ["command"]

_HEADER = ("tensor", "dtype", "shape", "min", "max", "mean", "std", "norm", "nan", "inf", "zero", "values")
_RIGHT = ("min", "max", "mean", "std", "norm", "nan", "inf", "zero")
_SORTED = ("size", "min", "max", "mean", "std", "norm", "nan", "inf", "zero")
_NARROW = ("values", "tensor:32", "norm", "std", "shape", "dtype", "tensor:16")
_BAR_CHARACTERS = 40


def command(
    uri: Annotated[str, typer.Argument(help="A checkpoint of any format: path or URL.")],
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="GLOB", help="These tensors, and those below.")
    ] = None,
    exclude: Annotated[list[str] | None, typer.Option("--exclude", metavar="GLOB", help="Not these.")] = None,
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
    """What to sort by."""

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
        (tensor.fqn, tensor.dtype, "x".join(map(str, tensor.shape)) or "scalar", *_cells(tensor.statistics))
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
