"""Subcommands that free space: ``rm``, ``prune`` of parts, and ``gc`` of what killed saves have left."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

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
from dcp.cli.tables import counted
from dcp.storage.errors import CheckpointError, CheckpointNotFoundError

if TYPE_CHECKING:
    from dcp.manager.dropping import Drop
    from dcp.manager.removal import Leftovers
    from dcp.manager.retention import Part, Retention
    from dcp.storage.stores.base import FileInfo, Store

__all__ = ["gc", "prune", "rm"]


Yes = Annotated[bool, typer.Option("--yes", help="Do it. Without it the command says what it would do.")]


@dataclass(frozen=True, slots=True)
class _Done:
    url: str
    removed: bool
    files: int
    bytes: int
    names: tuple[str, ...]
    left: tuple[str, ...] = ()


def rm(
    uris: Annotated[list[str], typer.Argument(metavar="URI...", help="Checkpoints: paths or URLs.")],
    yes: Yes = False,
    options: Options = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Remove checkpoints, the commit object first: at any crash all of one is there, or nothing.

    Lists the files that would go, unless --yes is given. Pinned checkpoints and other files stay.
    """
    done: list[_Done] = []
    failed = False
    for uri in uris:
        try:
            with errors_as_lines(debug=debug):
                done.append(_remove_checkpoint(uri, storage_options(uri, options), yes=yes))
        except typer.Exit:  # the error has been printed; the other checkpoints are still to go
            failed = True
        else:
            if not json:
                _print_removed(done[-1])
    if json:
        print_json(done)
    elif done and not yes:
        print_error("nothing was removed: --yes does it")
    if failed:
        raise typer.Exit(EXIT_FAILURE)


def _remove_checkpoint(uri: str, options: dict[str, Any] | None, *, yes: bool) -> _Done:
    # here, because a usage message must not wait for numpy
    from dcp.manager.removal import files_to_remove, remove_checkpoint
    from dcp.steps import read_notes
    from dcp.storage.formats.opening import naming_near_places
    from dcp.storage.stores.opening import OpenWith

    opener = OpenWith(options)
    store = opener(uri)
    now_seconds = time.time()
    files = files_to_remove(store, now_seconds)
    if not files:
        with naming_near_places(uri, opener):
            raise CheckpointNotFoundError(
                f"{store.url} holds no checkpoint that was committed; what killed saves left is for dcp gc.",
                path=store.url,
            )
    if read_notes(store).pinned:
        raise CheckpointError(f"{store.url} is pinned and stays; CheckpointManager.unpin releases it")
    if not yes:
        return _planned_removal(store, files)
    removed = remove_checkpoint(store, now_seconds)
    if removed.outcome != "deleted":
        raise CheckpointError(
            f"{store.url} was not removed: " + _REASONS.get(removed.outcome, "it is not there any more")
        )
    names = tuple(info.name for info in files)
    return _Done(store.url, True, len(files), sum(info.size_bytes for info in files), names, removed.left)


_REASONS = {
    "pinned": "it was pinned meanwhile",
    "replaced": "another save has taken its place meanwhile",
}


def _planned_removal(store: Store, files: list[FileInfo]) -> _Done:
    names = {info.name for info in files}
    left = tuple(info.name for info in store.list() if info.name not in names)
    size_bytes = sum(info.size_bytes for info in files)
    return _Done(store.url, False, len(files), size_bytes, tuple(info.name for info in files), left)


def _print_removed(done: _Done) -> None:
    if not done.removed:
        for name in done.names:
            print(printable(f"{done.url}/{name}"))
    verb = "removed" if done.removed else "would remove"
    stays = f"; {len(done.left)} other files stay" if done.left else ""
    print(printable(f"{done.url}: {verb} {counted(done.files, 'file')}, {describe_bytes(done.bytes)}{stays}"))


def prune(
    uris: Annotated[list[str], typer.Argument(metavar="URI...", help="Checkpoints, or runs: paths or URLs.")],
    part: Annotated[
        list[str] | None,
        typer.Option(
            "--part", metavar="NAME", help="optimizer, or a glob on names, as 'ema.*'. May be repeated."
        ),
    ] = None,
    last: Annotated[int | None, typer.Option(min=1, help="Of a run: the newest so many keep it.")] = None,
    every_steps: Annotated[
        int | None, typer.Option(min=1, help="Of a run: steps that are multiples of it keep it.")
    ] = None,
    rewrite: Annotated[
        bool,
        typer.Option("--rewrite", help="Write files anew that hold the part and others: frees all of it."),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only tell; so it is without --yes.")] = False,
    yes: Yes = False,
    options: Options = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Drop the optimizer, or another part, of checkpoints; what stays is as it was, also for stock torch.

    Of a run the newest ones keep it: --last says how many. Tells what would be freed, unless --yes is given.
    Pinned checkpoints stay whole. At any crash a checkpoint is as before or without the part.
    """
    yes = yes and not dry_run
    with errors_as_lines(debug=debug):
        retention = _retention(part or ["optimizer"], last, every_steps)
    found: list[tuple[Drop, bool]] = []
    failed = False
    for uri in uris:
        try:
            with errors_as_lines(debug=debug):
                planned = _find_parts(uri, retention, options, last or every_steps, tell=not json)
        except typer.Exit:  # printed; the others are still to go
            failed = True
            continue
        for store, parts in planned:
            try:
                with errors_as_lines(debug=debug):
                    found.append(_prune(store, parts, yes=yes, rewrite=rewrite, tell=not json))
            except typer.Exit:
                failed = True
    if json:
        print_json([asdict(one) | _outcome(one, yes=yes) | {"done": is_done} for one, is_done in found])
    elif any(one.outcome == "dropped" for one, _ in found) and not yes:
        print_error("nothing was dropped: --yes does it")
    if failed:
        raise typer.Exit(EXIT_FAILURE)


def _retention(parts: list[str], last: int | None, every_steps: int | None) -> Retention:
    # here, because a usage message must not wait for numpy
    from dcp.manager.retention import Keep, Retention

    # Without rules it is asked for checkpoints, which are named: of a run it would be refused.
    keep = Keep(last=last if last or every_steps else 1, every_steps=every_steps)
    globs = {name: keep for name in parts if name != "optimizer"}
    return Retention(optimizer=keep if "optimizer" in parts else None, parts=globs or None)


def _find_parts(
    uri: str, retention: Retention, options: str | None, rules: int | None, *, tell: bool
) -> list[tuple[Store, tuple[Part, ...]]]:
    from dcp.manager.dropping import to_prune
    from dcp.storage.errors import OptionError
    from dcp.storage.formats.opening import has_checkpoint
    from dcp.storage.stores.opening import OpenWith

    opener = OpenWith(storage_options(uri, options))
    if rules is None and not has_checkpoint(opener(uri)):
        raise OptionError(
            f"{uri} is no checkpoint; of a run say how many steps keep the part, as by --last 2"
        )
    found = to_prune(uri, retention, open_store=opener)
    if tell and not found:
        print(printable(f"{uri}: has nothing to drop"))
    return found


def _prune(
    store: Store, parts: tuple[Part, ...], *, yes: bool, rewrite: bool, tell: bool
) -> tuple[Drop, bool]:
    """Return the outcome, and whether anything was changed."""
    from dcp.manager.dropping import drop_parts, plan_drop

    found = (
        drop_parts(store, parts, time.time(), rewrite=rewrite)
        if yes
        else plan_drop(store, parts, rewrite=rewrite)
    )
    is_done = yes and (found.outcome == "dropped" or bool(found.files))
    if tell:
        _print_drop(found, is_done=is_done)
    return found, is_done


def _outcome(found: Drop, *, yes: bool) -> dict[str, str]:
    return {"outcome": "would drop" if found.outcome == "dropped" and not yes else found.outcome}


def _print_drop(found: Drop, *, is_done: bool) -> None:
    names = ", ".join(part.name for part in found.parts)
    if found.outcome == "pinned":
        shown = "is pinned and stays whole; CheckpointManager.unpin releases it"
    elif found.outcome == "absent":
        left = f"; removed {counted(len(found.files), 'file')} of an earlier prune" if found.files else ""
        shown = f"has nothing to drop{left}"
    elif found.outcome == "shared":
        shared = describe_bytes(found.shared_bytes)
        shown = f"keeps its {names}: {shared} in files with what stays; --rewrite frees them"
    else:
        verb = "dropped" if is_done else "would drop"
        wrote = f", {describe_bytes(found.rewritten_bytes)} written anew" if found.rewritten_bytes else ""
        stay = (
            f"; {describe_bytes(found.shared_bytes)} stay in files with others (--rewrite)"
            if found.shared_bytes
            else ""
        )
        freed = describe_bytes(found.freed_bytes)
        shown = f"{verb} {names}, {counted(len(found.files), 'file')}, {freed} freed{wrote}{stay}"
    print(printable(f"{found.url}: {shown}"))


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


def gc(
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
        from dcp.manager.removal import find_leftovers
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
            removed = (
                yes and left.problem is None and _remove_leftovers(store, left, now_seconds, age, uploads)
            )
            rows.append(_leftover(left, removed=removed))
    if json:
        print_json(rows)
    else:
        _print_leftovers(root, rows, yes=yes, uploads=uploads)
    if len(rows) < len(found):
        raise typer.Exit(EXIT_FAILURE)


def _remove_leftovers(
    store: Store, left: Leftovers, now_seconds: float, age_seconds: float, uploads: bool
) -> bool:
    from dcp.manager.removal import remove_leftovers

    return remove_leftovers(store, left, now_seconds, older_than_seconds=age_seconds, uploads=uploads) > 0


def _leftover(left: Leftovers, *, removed: bool) -> _Leftover:
    names = tuple(info.name for info in left.files)
    return _Leftover(left.url, left.kind, names, left.size_bytes, left.uploads, left.problem, removed)


def _print_leftovers(root: str, rows: list[_Leftover], *, yes: bool, uploads: bool) -> None:
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
