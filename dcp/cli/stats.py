"""``dcp stats``: what the values of tensors are like."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Annotated

import typer

from dcp.cli.common import (
    Debug,
    Json,
    Options,
    describe_bytes,
    errors_as_lines,
    print_json,
    print_table,
    printable,
    storage_options,
)
from dcp.cli.pictures import bar, sparkline
from dcp.cli.progress import progress_bar

if TYPE_CHECKING:
    from dcp.statistics import CheckpointStatistics, Histogram, Statistics

__all__ = ["command"]

_HEADER = ("tensor", "dtype", "shape", "min", "max", "mean", "std", "norm", "nan", "inf", "zero", "values")
_RIGHT = ("min", "max", "mean", "std", "norm", "nan", "inf", "zero")
_BAR_CHARACTERS = 40


def command(
    uri: Annotated[str, typer.Argument(help="A checkpoint of any format: path or URL.")],
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="GLOB", help="These tensors, and those below.")
    ] = None,
    exclude: Annotated[list[str] | None, typer.Option("--exclude", metavar="GLOB", help="Not these.")] = None,
    bins: Annotated[int, typer.Option(min=3, help="Bins of a histogram, at most.")] = 32,
    options: Options = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Read tensors and describe their values: range, mean, deviation, norm, NaN, infinities, zeros.

    Histograms are over powers of two: from large negative numbers over zero to large positive ones.
    """
    with errors_as_lines(debug=debug), progress_bar(uri) as progress:
        # here, because a usage message must not wait for numpy
        from dcp.statistics import statistics

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
        _print(found)


def _print(found: CheckpointStatistics) -> None:
    rows = [
        (tensor.fqn, tensor.dtype, "x".join(map(str, tensor.shape)) or "scalar", *_cells(tensor.statistics))
        for tensor in found.tensors
    ]
    rows.append(("total", "", f"{found.total.count:,}", *_cells(found.total)))
    print_table(_HEADER, rows, right=_RIGHT)
    if found.total.histogram is not None:
        print()
        _print_histogram(found.total.histogram)
    print()
    print(printable(f"{found.url}: {describe_bytes(found.bytes_read)} read"))


def _cells(statistics: Statistics | None) -> tuple[str, ...]:
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
