"""``dcp verify``: whether the bytes are those that were committed."""

from __future__ import annotations

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
from dcp.cli.progress import progress_bar
from dcp.cli.tables import counted

if TYPE_CHECKING:
    from dcp.inspection.verification import VerifyReport

__all__ = ["command"]

_SHOWN_FINDINGS = 100


def command(
    uris: Annotated[list[str], typer.Argument(metavar="URI...", help="Checkpoints: paths or URLs.")],
    against: Annotated[
        str | None,
        typer.Option("--against", metavar="URI", help="One that is to have the same tensors, in any format."),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only", metavar="GLOB", help="Of the one to compare with, as 'model.*'; again for more."
        ),
    ] = None,
    options: Options = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Read every byte of checkpoints and compare with their checksums. Exits with 1 if anything is wrong.

    A file that the checkpoint does not refer to is a note, and nothing wrong: `dcp gc` removes what is left
    of killed saves. --against compares digests, too; where that one's manifest has none its tensors are read.
    """
    reports = []
    failed = False
    for uri in uris:
        try:
            with errors_as_lines(debug=debug), progress_bar(uri) as progress:
                # here, because a usage message must not wait for numpy
                from dcp.inspection.verification import verify

                given = storage_options(uri, options)
                of_against = (
                    None
                    if against is None
                    else storage_options(against, options if "://" in against else None)
                )
                reports.append(
                    verify(
                        uri,
                        against=against,
                        only=only or None,
                        progress=progress,
                        storage_options=given,
                        options_of_against=of_against or {},
                    )
                )
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
        "digest": report.digest,
        "findings": report.findings,
    }


def _print_report(report: VerifyReport) -> None:
    shown = sorted(report.findings, key=lambda finding: finding.is_note)
    for finding in shown[:_SHOWN_FINDINGS]:
        kind = "note" if finding.is_note else finding.kind
        print(printable(f"{kind}: {finding.message}"))
    more = len(shown) - _SHOWN_FINDINGS
    if more > 0:
        print(f"... and {more} more; --json lists all")
    sizes = counted(report.tensors, "tensor"), counted(report.files, "file"), describe_bytes(report.bytes)
    read = f"{', '.join(sizes)} read"
    unchecked = report.unchecked_bytes
    if 0 < unchecked < report.bytes:
        read += f", {describe_bytes(unchecked)} of it without a checksum to compare with"
    if not report.ok:
        verdict = counted(len(report.faults), "finding")
    else:
        verdict = "readable, no checksums" if unchecked and unchecked == report.bytes else "ok"
    print(printable(f"{report.url}: {verdict} ({read})"))
