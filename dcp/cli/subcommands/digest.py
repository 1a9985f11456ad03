"""``dcp digest``: one digest a tensor, whatever its layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

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
from dcp.cli.progress import progress_bar
from dcp.cli.tables import counted, print_table

if TYPE_CHECKING:
    from dcp.inspection.values.digests import CheckpointDigests

__all__ = ["command"]


def command(
    uri: Annotated[str, typer.Argument(help="A checkpoint of any format: path or URL.")],
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="These tensors, or globs, and those below."),
    ] = None,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Read the tensors, whatever the manifest says.")
    ] = False,
    options: Options = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Print a digest of each tensor: equal for equal bytes, dtype and shape, in any sharding and format.

    Those in the manifest cost nothing; for others the tensors are read. They tell accidents, not forgeries.
    """
    with errors_as_lines(debug=debug), progress_bar(uri) as progress:
        # here, because a usage message must not wait for numpy
        from dcp.inspection.values.digests import digests

        found = digests(
            uri,
            only=names or None,
            recompute=recompute,
            storage_options=storage_options(uri, options),
            progress=progress,
        )
    if json:
        print_json(found)
    else:
        _print(found)


def _print(found: CheckpointDigests) -> None:
    rows = [
        (tensor.digest, tensor.dtype, "x".join(map(str, tensor.shape)) or "scalar", tensor.fqn)
        for tensor in found.tensors
    ]
    print_table(
        ("digest", "dtype", "shape", "tensor"), rows, narrow=("tensor:32", "shape", "dtype", "tensor:16")
    )
    print()
    told = counted(len(rows), "tensor"), describe_bytes(found.bytes_read)
    print(printable(f"{found.digest}  {found.url}: {told[0]}, {told[1]} read"))
