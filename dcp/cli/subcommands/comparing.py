"""Subcommands that compare: ``diff`` two checkpoints, ``digest`` of all tensors, ``verify`` of all bytes."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dcp.cli.common import (
    EXIT_FAILURE,
    EXIT_FINDINGS,
    Debug,
    Exclude,
    Json,
    Only,
    Options,
    Source,
    describe_bytes,
    describe_shape,
    describe_value,
    errors_as_lines,
    print_error,
    print_json,
    printable,
    storage_options,
)
from dcp.cli.tables import (
    Top,
    counted,
    largest_first,
    print_rest,
    print_table,
    progress_bar,
    sort_key,
    top_of,
)

if TYPE_CHECKING:
    from dcp.inspection.values.difference import Difference, TensorDifference, TensorFacts
    from dcp.inspection.values.digests import CheckpointDigests
    from dcp.inspection.verification import VerifyReport

__all__ = ["diff", "digest", "verify"]


_HEADER = ("tensor", "what", "before", "after", "differ", "max abs", "relative L2")
_RIGHT = ("differ", "max abs", "relative L2")
_NARROW = ("tensor:28", "before:12", "after:12", "tensor:12", "before", "after")
_VALUE_CHARACTERS = 60


_SORTS: dict[str, Callable[[TensorDifference], Any]] = {
    "differ": largest_first(lambda tensor: None if tensor.values is None else tensor.values.differing),
    "max": largest_first(lambda tensor: None if tensor.values is None else tensor.values.max_abs),
    "l2": largest_first(lambda tensor: None if tensor.values is None else tensor.values.relative_l2),
    "name": lambda tensor: tensor.fqn,
}


def diff(
    a: Source,
    b: Annotated[str, typer.Argument(help="Another one, of any format and sharding.")],
    values: Annotated[
        bool, typer.Option("--values/--no-values", help="Read what checksums do not tell. By default.")
    ] = True,
    only: Only = None,
    exclude: Exclude = None,
    rename: Annotated[
        list[str] | None,
        typer.Option("--rename", metavar="REGEX=>NEW", help="Replace this in the names of A before."),
    ] = None,
    sort: Annotated[
        str, typer.Option("--sort", metavar="COLUMN", help="The largest first: differ, max, l2; or name.")
    ] = "",
    top: Top = None,
    options: Options = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Compare checkpoint B with A. Equal tensors are found by checksums. Exits with 1 if anything differs."""
    by = sort_key(sort, _SORTS) if sort else None
    renames = dict(_rename(rule) for rule in rename or ())
    with errors_as_lines(debug=debug), progress_bar(f"{a} {b}") as progress:
        # here, because a usage message must not wait for numpy
        from dcp.inspection.values.difference import diff

        found = diff(
            a,
            b,
            values=values,
            only=only or None,
            exclude=exclude or None,
            rename=renames or None,
            storage_options=storage_options(a, options if "://" in a else None),
            options_of_b=storage_options(b, options if "://" in b else None) or {},
            progress=progress,
        )
    if json:
        print_json(found)
    else:
        _print(found, list(found.tensors) if by is None else sorted(found.tensors, key=by), top)
    if (shown := _renaming(found)) and not renames:
        print_error(f"the same names with another prefix: --rename {shown} compares these")
    if not found.is_empty:
        raise typer.Exit(EXIT_FINDINGS)


def _rename(rule: str) -> tuple[str, str]:
    """Parse a rule as `dcp convert` has it; ``REGEX=NEW`` is how it was before, for rules without ``=>``."""
    regex, separator, text = rule.partition("=>" if "=>" in rule else "=")
    if not separator:
        raise typer.BadParameter(f"--rename {rule!r} is not of the form REGEX=>NEW")
    return regex, text


def _renaming(found: Difference) -> str:
    """Return a rule for ``--rename`` by which tensors that A alone has are some that B alone has; ""
    without any."""
    # here, because a usage message must not wait for numpy
    from dcp.planners.load.plan import rename_for_missing

    alone: dict[str, list[str]] = {"removed": [], "added": []}
    for tensor in found.tensors:
        if tensor.kind in alone:
            alone[tensor.kind].append(tensor.fqn)
    groups: dict[str, list[str]] = {}
    for name in alone["removed"]:  # the model's, beside those of an optimizer
        for depth in (1, 2):
            groups.setdefault(".".join(name.split(".")[:depth]), []).append(name)
    best, most = "", 0
    for names in groups.values() if alone["added"] else ():
        rules, count = rename_for_missing(names, alone["added"], found.equal)
        if rules and len(rules) == 1 and count > most:
            ((regex, text),) = rules.items()
            best, most = shlex.quote(f"{regex}=>{text}"), count
    return best


def _print(found: Difference, tensors: list[TensorDifference], top: int | None) -> None:
    verdict = "equal" if found.is_empty else f"{_differing(found)}"
    equal = len(found.equal), found.equal_objects
    same = f"{counted(equal[0], 'tensor')} and {counted(equal[1], 'object')} equal"
    print(printable(f"{found.a} and {found.b}: {verdict} ({same}, {describe_bytes(found.bytes_read)} read)"))
    if tensors:
        print()
        print_table(_HEADER, [_row(tensor) for tensor in top_of(tensors, top)], right=_RIGHT, narrow=_NARROW)
        print_rest(tensors, top, "tensor")
    if found.objects:
        print()
        values = list(found.objects)
        rows = [(v.fqn, v.kind, _shown(v.before), _shown(v.after)) for v in top_of(values, top)]
        narrow = ("before:20", "after:20", "object:24", "before:8", "after:8")
        print_table(("object", "what", "before", "after"), rows, narrow=narrow)
        print_rest(values, top, "object")


def _differing(found: Difference) -> str:
    counts = (("tensor", len(found.tensors)), ("object", len(found.objects)))
    shown = " and ".join(counted(count, name) for name, count in counts if count)
    return f"{shown} differ{'s' if sum(count for _, count in counts) == 1 else ''}"


def _row(tensor: TensorDifference) -> tuple[str, ...]:
    values = tensor.values
    if values is None:
        figures: tuple[str, ...] = ("", "", "")
    else:
        odd = f" ({values.nonfinite:,} nan or inf)" if values.nonfinite else ""
        figures = (
            f"{values.differing:,}{odd}",
            "-" if values.max_abs is None else f"{values.max_abs:.4g}",
            "-" if values.relative_l2 is None else f"{values.relative_l2:.4g}",
        )
    return tensor.fqn, tensor.kind, _type(tensor.before), _type(tensor.after), *figures


def _type(facts: TensorFacts | None) -> str:
    return "-" if facts is None else f"{facts.dtype} {describe_shape(facts.shape)}"


def _shown(value: object) -> str:
    return "-" if value is None else describe_value(value, _VALUE_CHARACTERS)


def digest(
    uri: Source,
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
        _print_digest(found)


def _print_digest(found: CheckpointDigests) -> None:
    rows = [
        (tensor.digest, tensor.dtype, describe_shape(tensor.shape), tensor.fqn) for tensor in found.tensors
    ]
    print_table(
        ("digest", "dtype", "shape", "tensor"), rows, narrow=("tensor:32", "shape", "dtype", "tensor:16")
    )
    print()
    shown = counted(len(rows), "tensor"), describe_bytes(found.bytes_read)
    print(printable(f"{found.digest}  {found.url}: {shown[0]}, {shown[1]} read"))


_SHOWN_FINDINGS = 100


def verify(
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
