"""What ``convert`` and ``merge`` share: options, what these mean to the library, and what is told."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dcp.cli.common import describe_bytes, printable, unwinding_on_sigterm
from dcp.cli.progress import progress_bar
from dcp.cli.tables import counted
from dcp.storage.errors import CheckpointError, OptionError

if TYPE_CHECKING:
    from dcp.conversion.driver import ConversionReport
    from dcp.progress import Progress

__all__ = [
    "Chunks",
    "ChunksOption",
    "DropObjects",
    "Dtype",
    "Exclude",
    "Executor",
    "Files",
    "Hf",
    "HfAlso",
    "NoVerify",
    "Only",
    "Overwrite",
    "Rename",
    "ShardSize",
    "TargetOptions",
    "Workers",
    "options_of",
    "print_report",
    "target_format",
    "target_formats",
    "with_progress",
]

_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_MAX_LISTED = 5


def target_formats() -> list[str]:
    """The formats that can be written. BadParameter where a package that has one cannot be imported."""
    from dcp.storage.formats.registry import target_names  # here, as it reads what is installed

    try:
        return target_names()
    except CheckpointError as error:
        raise typer.BadParameter(str(error)) from error


def target_format(name: str) -> str:
    """One of the formats that can be written; for ours nothing is read of what is installed."""
    from dcp.storage.formats.registry import target_named

    try:
        target_named(name)
    except OptionError:
        known = ", ".join(map(repr, target_formats()))
        raise typer.BadParameter(f"{name!r} is not one of {known}.") from None
    except CheckpointError as error:
        raise typer.BadParameter(str(error)) from error
    return name


class Chunks(StrEnum):
    """How tensors of a dcp target are cut."""

    KEEP = "keep"
    SPLIT = "split"


def _size(text: str | None) -> int | None:
    """Bytes of ``5GB``, ``4GiB`` or a plain number."""
    if text is None:
        return None
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is no size; write 5GB, 500MiB or a number of bytes")
    power = " kmgt".index(match[2].lower() or " ")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


def _pairs(values: list[str] | None, separator: str, what: str) -> dict[str, str]:
    """``left<separator>right`` of each value."""
    found = {}
    for value in values or ():
        left, separated, right = value.partition(separator)
        if not separated or not left:
            raise typer.BadParameter(f"{value!r} is not {what}")
        found[left] = right
    return found


def _dtypes(values: list[str] | None) -> str | dict[str, str] | None:
    """One dtype for all, or dtypes by glob."""
    if not values:
        return None
    if len(values) == 1 and "=" not in values[0]:
        return values[0]
    return _pairs(values, "=", "GLOB=DTYPE; one DTYPE alone is for all tensors")


Only = Annotated[
    list[str] | None, typer.Option("--only", metavar="GLOB", help="These names, and those below.")
]
Exclude = Annotated[list[str] | None, typer.Option("--exclude", metavar="GLOB", help="Not these.")]
Rename = Annotated[
    list[str] | None,
    typer.Option(
        "--rename", metavar="REGEX=>NEW", help=r"Rename, such as '^module\.=>'; one after the other."
    ),
]
Dtype = Annotated[
    list[str] | None,
    typer.Option("--dtype", metavar="[GLOB=]DTYPE", help="Cast floating-point tensors, such as bfloat16."),
]
Files = Annotated[int, typer.Option(min=1, help="Data files of a dcp target.")]
ChunksOption = Annotated[
    Chunks, typer.Option(help="keep: chunks as in the source; split: one a file, for dcp.")
]
ShardSize = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Largest file of a safetensors folder, such as 5GB.")
]
Hf = Annotated[
    str | None,
    typer.Option(
        "--hf", metavar="MODEL", help="Folder or hub name, whose config and tokenizer go with the weights."
    ),
]
HfAlso = Annotated[
    list[str] | None, typer.Option("--hf-also", metavar="GLOB", help="Further files of it, such as '*.py'.")
]
DropObjects = Annotated[
    bool, typer.Option("--drop-objects", help="Leave out values that the format cannot hold.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")]
Executor = Annotated[str, typer.Option(metavar="WHERE", help="processes, inline, or dask://HOST:PORT.")]
Workers = Annotated[int | None, typer.Option(min=1, help="Processes at a time.")]
NoVerify = Annotated[bool, typer.Option("--no-verify", help="Do not compare the source's checksums.")]
TargetOptions = Annotated[
    str | None,
    typer.Option("--target-options", metavar="JSON", help="As --storage-options, for the target's URL."),
]


def options_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `dcp.convert` that those of the command line mean, which are in ``given`` by name."""
    names = ("to", "files", "hf", "drop_objects", "overwrite", "executor", "workers")
    return {name: given[name] for name in names} | {
        "only": given["only"] or None,
        "exclude": given["exclude"] or None,
        "hf_also": tuple(given["hf_also"] or ()),
        "rename": _pairs(given["rename"], "=>", "REGEX=>NEW") or None,
        "dtype": _dtypes(given["dtype"]),
        "shard_bytes": _size(given["shard_size"]),
        "chunks": given["chunks"].value,
        "verify": "none" if given["no_verify"] else "blocks",
    }


@contextmanager
def with_progress(target: str) -> Iterator[Callable[[Progress], None]]:
    """What tells a bar how far it is, where there is one."""
    with unwinding_on_sigterm(), progress_bar(target) as show:

        def progress(done: Progress) -> None:
            if show is not None:
                show(done.bytes_done, done.bytes_total)

        yield progress


def print_report(report: ConversionReport) -> None:
    """What was made, in a few lines."""
    seconds = report.seconds.get("total", 0.0)
    rate = f", {describe_bytes(int(report.bytes_written / seconds))}/s" if seconds > 0 else ""
    resumed = (
        f", {report.tasks_resumed} of {report.tasks} parts had been done before"
        if report.tasks_resumed
        else ""
    )
    tensors, files = counted(report.tensor_count, "tensor"), counted(len(report.files), "file")
    print(
        printable(
            f"{report.target}: {tensors} in {files}, "
            f"{describe_bytes(report.bytes_written)} in {seconds:.1f} s{rate}{resumed}"
        )
    )
    if report.blocks_unverified:
        print(f"{report.blocks_unverified} of the source's blocks have no checksum to compare with")
    if report.dropped_objects:
        names = ", ".join(report.dropped_objects[:_MAX_LISTED])
        more = len(report.dropped_objects) - _MAX_LISTED
        print(printable(f"left out: {names}{f' and {more} more' if more > 0 else ''}"))
