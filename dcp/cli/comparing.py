"""Commands that compare: ``diff`` two checkpoints, ``digest`` of all tensors, ``verify`` of all bytes."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

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
from dcp.cli.printing import counted

if TYPE_CHECKING:
    from dcp.inspection.findings import VerifyReport
    from dcp.inspection.values.difference import Difference, TensorDifference, TensorFacts
    from dcp.inspection.values.digests import CheckpointDigests

_VALUE_CHARACTERS: Final = 60
_SHOWN_FINDINGS: Final = 100


def _figure(name: str) -> Callable[[TensorDifference], Any]:
    return printing.largest_first(lambda tensor: getattr(tensor.values, name, None))


_SORTS: dict[str, Callable[[TensorDifference], Any]] = {
    "differ": _figure("differing"),
    "max": _figure("max_abs"),
    "l2": _figure("relative_l2"),
    "name": lambda tensor: tensor.fqn,
}


def diff(
    a: str = SOURCE,
    b: str = Argument(..., help="Another one, of any format and sharding."),
    values: bool = Option(True, help="Read what checksums do not tell. By default."),
    only: Strings = ONLY,
    exclude: Strings = EXCLUDE,
    rename: Strings = Option(None, metavar="REGEX=>NEW", help="Replace this in the names of A before."),
    sort: str = Option("", metavar="COLUMN", help="The largest first: differ, max, l2; or name."),
    top: int | None = TOP,
    options: str | None = STORAGE,
) -> Answer:
    """Compare checkpoint B with A. Equal tensors are found by checksums. Exits with 1 if anything differs."""
    from dcp.inspection.values.difference import diff

    by, renames = sort_key(sort, _SORTS), dict(map(_rename, rename or ()))
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
        printing.error(f"the same names with another prefix: --rename {rule} compares these")
    tensors = found.tensors if by is None else sorted(found.tensors, key=by)
    return Answer(found, lambda: _print(found, tensors, top), 0 if found.is_empty else EXIT_FINDINGS)


def _rename(rule: str) -> tuple[str, str]:
    """Parse a rule as `dcp convert` has it; ``REGEX=NEW`` is how it was before, for rules without ``=>``."""
    regex, separator, text = rule.partition("=>" if "=>" in rule else "=")
    if not separator:
        raise typer.BadParameter(f"--rename {rule!r} is not of the form REGEX=>NEW")
    return regex, text


def _renaming(found: Difference) -> str:
    """Return a rule for ``--rename`` by which tensors that A alone has are some that B alone has; ""
    without any."""
    from dcp.planners.load.plan import rename_for_missing

    added = [tensor.fqn for tensor in found.tensors if tensor.kind == "added"]
    groups: dict[str, list[str]] = {}
    for name in (tensor.fqn for tensor in found.tensors if added and tensor.kind == "removed"):
        for depth in (1, 2):  # the model's, beside those of an optimizer
            groups.setdefault(".".join(name.split(".")[:depth]), []).append(name)
    best, most = "", 0
    for names in groups.values():
        rules, count = rename_for_missing(names, added, found.equal)
        if rules and len(rules) == 1 and count > most:
            best, most = "{}=>{}".format(*next(iter(rules.items()))), count
    return best and shlex.quote(best)


def _print(found: Difference, tensors: Sequence[TensorDifference], top: int | None) -> None:
    counts = (("tensor", len(tensors)), ("object", len(found.objects)))
    differing = " and ".join(counted(count, name) for name, count in counts if count)
    verdict = f"{differing} differ{'s' * (len(tensors) + len(found.objects) == 1)}" if differing else "equal"
    same = f"{counted(len(found.equal), 'tensor')} and {counted(found.equal_objects, 'object')} equal"
    printing.line(f"{found.a} and {found.b}: {verdict} ({same}, {printing.size(found.bytes_read)} read)")
    header = ["tensor", "what", "before", "after", ">differ", ">max abs", ">relative L2"]
    if tensors:
        print()
        narrow = ["tensor:28", "before:12", "after:12", "tensor:12", "before", "after"]
        printing.table(header, [*map(_row, tensors)], narrow=narrow, top=top, what="tensor")
    if found.objects:
        print()
        rows = [(one.fqn, one.kind, _shown(one.before), _shown(one.after)) for one in found.objects]
        narrow = ["before:20", "after:20", "object:24", "before:8", "after:8"]
        printing.table(["object", *header[1:4]], rows, narrow=narrow, top=top, what="object")


def _row(tensor: TensorDifference) -> tuple[str | None, ...]:
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


def _shown(value: object) -> str | None:
    return None if value is None else printing.shown_value(value, _VALUE_CHARACTERS)


def digest(
    uri: str = SOURCE,
    names: Strings = Argument(None, metavar="[NAME]...", help="These tensors, or globs, and those below."),
    recompute: bool = Option(False, "--recompute", help="Read the tensors, whatever the manifest says."),
    options: str | None = STORAGE,
) -> Answer:
    """Print a digest of each tensor: equal for equal bytes, dtype and shape, in any sharding and format.

    Those in the manifest cost nothing; for others the tensors are read. They tell accidents, not forgeries.
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
    against: str | None = Option(None, metavar="URI", help="One that is to have the same tensors."),
    only: Strings = Option(None, metavar="GLOB", help="Of the one to compare with, as 'model.*'."),
    options: str | None = STORAGE,
) -> Answer:
    """Read every byte of checkpoints and compare with their checksums. Exits with 1 if anything is wrong.

    A file that the checkpoint does not refer to is a note, and nothing wrong: `dcp gc` removes what is left
    of killed saves. --against compares digests, too; where that one's manifest has none its tensors are read.
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
    data = [asdict(report) | {"ok": report.ok} for report in reports]
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
        read += f", {printing.size(unchecked)} of it without a checksum to compare with"
    verdict = "readable, no checksums" if unchecked and unchecked == report.bytes else "ok"
    verdict = verdict if report.ok else counted(len(report.faults), "finding")
    printing.line(f"{report.url}: {verdict} ({read})")
