"""``dcp rm``: checkpoints that are not wanted any more."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

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
    from dcp.storage.stores.base import FileInfo, Store

__all__ = ["Yes", "command"]

Yes = Annotated[bool, typer.Option("--yes", help="Do it. Without this it is only told what would be done.")]


@dataclass(frozen=True, slots=True)
class _Done:
    url: str
    removed: bool
    files: int
    bytes: int
    names: tuple[str, ...]
    left: tuple[str, ...] = ()


def command(
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
                done.append(_remove(uri, storage_options(uri, options), yes=yes))
        except typer.Exit:  # the error has been printed; the other checkpoints are still to go
            failed = True
        else:
            if not json:
                _print(done[-1])
    if json:
        print_json(done)
    elif done and not yes:
        print_error("nothing was removed: --yes does it")
    if failed:
        raise typer.Exit(EXIT_FAILURE)


def _remove(uri: str, options: dict[str, Any] | None, *, yes: bool) -> _Done:
    # here, because a usage message must not wait for numpy
    from dcp.manager.cleanup.removal import files_to_remove, remove_checkpoint
    from dcp.steps.notes import read_notes
    from dcp.storage.formats.opening.places_near import near_places_told
    from dcp.storage.stores.opening import OpenWith

    opener = OpenWith(options)
    store = opener(uri)
    now_seconds = time.time()
    files = files_to_remove(store, now_seconds)
    if not files:
        with near_places_told(uri, opener):
            raise CheckpointNotFoundError(
                f"{store.url} holds no checkpoint that was committed; what killed saves left is for dcp gc",
                path=store.url,
            )
    if read_notes(store).pinned:
        raise CheckpointError(f"{store.url} is pinned and stays; CheckpointManager.unpin releases it")
    if not yes:
        return _planned(store, files)
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


def _planned(store: Store, files: list[FileInfo]) -> _Done:
    names = {info.name for info in files}
    left = tuple(info.name for info in store.list() if info.name not in names)
    size_bytes = sum(info.size_bytes for info in files)
    return _Done(store.url, False, len(files), size_bytes, tuple(info.name for info in files), left)


def _print(done: _Done) -> None:
    if not done.removed:
        for name in done.names:
            print(printable(f"{done.url}/{name}"))
    verb = "removed" if done.removed else "would remove"
    stays = f"; {len(done.left)} other files stay" if done.left else ""
    print(printable(f"{done.url}: {verb} {counted(done.files, 'file')}, {describe_bytes(done.bytes)}{stays}"))
