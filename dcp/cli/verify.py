"""``dcp verify``: whether the bytes are those that were committed."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dcp.cli.common import (
    EXIT_FAILURE,
    EXIT_FINDINGS,
    Debug,
    Json,
    Options,
    describe_bytes,
    errors_as_lines,
    print_json,
    printable,
    storage_options,
)

if TYPE_CHECKING:
    from dcp.verification import Progress, VerifyReport

__all__ = ["command"]

_SHOWN_FINDINGS = 100
_UPDATE_SECONDS = 0.1


def command(
    uris: Annotated[list[str], typer.Argument(metavar="URI...", help="Checkpoints: paths or URLs.")],
    options: Options = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Read every byte of checkpoints and compare with their checksums. Exits with 1 if anything is wrong."""
    reports = []
    failed = False
    for uri in uris:
        try:
            with errors_as_lines(debug=debug), _progress_bar(uri) as progress:
                # here, because a usage message must not wait for numpy
                from dcp.verification import verify

                given = storage_options(uri, options)
                reports.append(verify(uri, progress=progress, storage_options=given))
        except typer.Exit:  # the error has been printed; the other checkpoints are still worth a look
            failed = True
        else:
            if not json:
                _print_report(reports[-1])
    if json:
        print_json([_as_json(report) for report in reports])
    if failed:
        raise typer.Exit(EXIT_FAILURE)
    if not all(report.ok for report in reports):
        raise typer.Exit(EXIT_FINDINGS)


def _as_json(report: VerifyReport) -> dict[str, Any]:
    return {
        "url": report.url,
        "ok": report.ok,
        "files": report.files,
        "tensors": report.tensors,
        "blocks": report.blocks,
        "bytes": report.bytes,
        "unchecked_bytes": report.unchecked_bytes,
        "findings": report.findings,
    }


def _print_report(report: VerifyReport) -> None:
    for finding in report.findings[:_SHOWN_FINDINGS]:
        print(printable(f"{finding.kind}: {finding.message}"))
    more = len(report.findings) - _SHOWN_FINDINGS
    if more > 0:
        print(f"... and {more} more; --json lists all")
    read = f"{report.tensors} tensors, {report.files} files, {describe_bytes(report.bytes)} read"
    if report.unchecked_bytes:
        read += f", {describe_bytes(report.unchecked_bytes)} of it without a checksum to compare with"
    verdict = (
        "ok" if report.ok else f"{len(report.findings)} finding{'s' if len(report.findings) > 1 else ''}"
    )
    print(printable(f"{report.url}: {verdict} ({read})"))


@contextmanager
def _progress_bar(uri: str) -> Iterator[Progress | None]:
    """Rate and time left on stderr; nothing when that is not a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(printable(uri), total=None)
        shown_seconds = 0.0

        def show(done: int, total: int) -> None:
            nonlocal shown_seconds
            now = time.monotonic()
            if now - shown_seconds > _UPDATE_SECONDS:  # small blocks come faster than the bar can be drawn
                shown_seconds = now
                bar.update(task, completed=done, total=total)

        yield show
