"""``dcp gc``: what killed saves have left."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final

import typer

from dcp.cli.common import (
    EXIT_FAILURE,
    Debug,
    Json,
    Options,
    describe_bytes,
    errors_as_lines,
    print_error,
    print_json,
    printable,
    storage_options,
)
from dcp.cli.subcommands.removal.rm import Yes
from dcp.cli.tables import counted

if TYPE_CHECKING:
    from dcp.manager.cleanup.leftovers import Leftovers
    from dcp.storage.stores.base import Store

__all__ = ["command"]

_WHAT: Final = {
    "abandoned": "a save that never committed",
    "removal": "a removal that was interrupted",
    "strays": "files that the checkpoint does not refer to",
    "conversion": "a conversion that was killed, and can still be resumed",
    "replacement": "a conversion that was killed while it replaced a folder, which is put back",
    "uploads": "uploads that were not finished",
}


@dataclass(frozen=True, slots=True)
class _Leftover:
    url: str
    kind: str
    files: tuple[str, ...]
    bytes: int
    uploads: tuple[str, ...]
    problem: str | None
    removed: bool


def command(
    root: Annotated[str, typer.Argument(help="A folder of checkpoints, or a checkpoint: path or URL.")],
    yes: Yes = False,
    hours: Annotated[
        float, typer.Option(min=0, help="What is younger stays: it may be of a save that still runs.")
    ] = 24.0,
    uploads: Annotated[
        bool,
        typer.Option(
            "--uploads", help="End all unfinished uploads, too. A save that is at work on one fails."
        ),
    ] = False,
    options: Options = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Remove what killed saves have left: files that no checkpoint refers to, a day old or more.

    Lists them, unless --yes is given. Committed checkpoints, and files that are not named as saves name
    theirs, are never touched.
    """
    with errors_as_lines(debug=debug):
        # here, because a usage message must not wait for numpy
        from dcp.manager.cleanup.leftovers import find_leftovers
        from dcp.storage.stores.opening import OpenWith

        now_seconds, age = time.time(), hours * 3600
        found = find_leftovers(
            root,
            now_seconds,
            older_than_seconds=age,
            open_store=OpenWith(storage_options(root, options)),
        )
    rows = []
    for store, left in found:
        with suppress(typer.Exit), errors_as_lines(debug=debug):  # printed; the others are still to go
            removed = yes and left.problem is None and _remove(store, left, now_seconds, age, uploads)
            rows.append(_row(left, removed=removed))
    if json:
        print_json(rows)
    else:
        _print(root, rows, yes=yes, uploads=uploads)
    if len(rows) < len(found):
        raise typer.Exit(EXIT_FAILURE)


def _remove(store: Store, left: Leftovers, now_seconds: float, age_seconds: float, uploads: bool) -> bool:
    from dcp.manager.cleanup.leftovers import remove_leftovers

    gone, _ = remove_leftovers(store, left, now_seconds, older_than_seconds=age_seconds, uploads=uploads)
    return gone > 0


def _row(left: Leftovers, *, removed: bool) -> _Leftover:
    names = tuple(info.name for info in left.files)
    return _Leftover(left.url, left.kind, names, left.size_bytes, left.uploads, left.problem, removed)


def _print(root: str, rows: list[_Leftover], *, yes: bool, uploads: bool) -> None:
    for row in rows:
        if row.problem is not None:
            print_error(f"{row.url} is left alone: {row.problem}")
            continue
        stays = "; in use now, it stays" if yes and row.files and not row.removed else ""
        print(printable(f"{row.url}: {_WHAT[row.kind]}{stays}"))
        for name in row.files:
            print(printable(f"  {name}"))
        for name in row.uploads:
            fate = "" if uploads else "; stays, unless --uploads"
            print(printable(f"  {name} (unfinished upload{fate})"))
    done = [row for row in rows if row.removed or not yes]
    files, size_bytes = sum(len(row.files) for row in done), sum(row.bytes for row in done)
    verb = "removed" if yes else "would remove"
    print(printable(f"{root}: {verb} {counted(files, 'file')}, {describe_bytes(size_bytes)}"))
    if files and not yes:
        print_error("nothing was removed: --yes does it")
