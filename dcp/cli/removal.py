"""Commands that free space: ``rm`` for checkpoints, ``prune`` for parts, ``gc`` for leftovers of killed
saves.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from typer import Argument, Option

from dcp.cli import printing
from dcp.cli.common import STORAGE, URIS, Answer, Call, Strings, storage_options
from dcp.cli.printing import counted
from dcp.storage.errors import CheckpointError, CheckpointNotFoundError

if TYPE_CHECKING:
    from dcp.manager.dropping import Drop
    from dcp.manager.removal import Leftovers
    from dcp.manager.retention import Part, Retention
    from dcp.storage.stores.base import Store

_YES: Final = Option(False, "--yes", help="Carry out the changes; default: a dry run.")
_REASONS: Final = {
    "pinned": "it was pinned during the removal",
    "replaced": "another save replaced the checkpoint during the removal",
}
_KINDS: Final = {
    "abandoned": "a save that never committed",
    "removal": "an interrupted removal",
    "strays": "files that the checkpoint does not reference",
    "conversion": "a killed conversion that can still be resumed",
    "replacement": "a conversion killed while replacing a folder; the old folder is restored",
    "uploads": "unfinished uploads",
}


def rm(call: Call, uris: list[str] = URIS, yes: bool = _YES, options: str | None = STORAGE) -> Answer:
    """Remove checkpoints, the commit object first: a crash leaves a checkpoint whole or gone.

    Lists the files unless --yes is given. Pinned checkpoints and other files stay.
    """
    done = call.each(uris, lambda uri: _remove(uri, storage_options(uri, options), yes=yes), _print_removed)
    if done and not yes and not call.json:
        printing.error("dry run, nothing removed: pass --yes to remove")
    return Answer(done)


def _remove(uri: str, options: dict[str, Any] | None, *, yes: bool) -> dict[str, Any]:
    """Return the removed files, or without ``yes`` the candidates, in the form of --json."""
    from dcp.manager.removal import files_to_remove, remove_checkpoint
    from dcp.steps import read_notes
    from dcp.storage.formats.opening import naming_near_places
    from dcp.storage.stores.opening import OpenWith

    opener, now_seconds = OpenWith(options), time.time()
    store = opener(uri)
    files = files_to_remove(store, now_seconds)
    if not files:
        with naming_near_places(uri, opener):
            raise CheckpointNotFoundError(
                f"{store.url} holds no committed checkpoint; dcp gc removes leftovers of killed saves.",
                path=store.url,
            )
    if read_notes(store).pinned:
        raise CheckpointError(
            f"{store.url} is pinned and was not removed; unpin it first with CheckpointManager.unpin"
        )
    names = tuple(info.name for info in files)
    if yes:
        removed = remove_checkpoint(store, now_seconds)
        if removed.outcome != "deleted":
            why = _REASONS.get(removed.outcome, "it no longer exists")
            raise CheckpointError(f"{store.url} was not removed: {why}")
        left = removed.left
    else:
        left = tuple(info.name for info in store.list() if info.name not in names)
    size_bytes = sum(info.size_bytes for info in files)
    counts = {"files": len(files), "bytes": size_bytes}
    return {"url": store.url, "removed": yes, **counts, "names": names, "left": left}


def _print_removed(done: dict[str, Any]) -> None:
    for name in () if done["removed"] else done["names"]:
        printing.line(f"{done['url']}/{name}")
    verb = "removed" if done["removed"] else "would remove"
    stays = f"; {len(done['left'])} other files stay" if done["left"] else ""
    files = f"{counted(done['files'], 'file')}, {printing.size(done['bytes'])}"
    printing.line(f"{done['url']}: {verb} {files}{stays}")


# -- prune ---------------------------------------------------------------------------------------------------


def prune(
    call: Call,
    uris: list[str] = Argument(..., metavar="URI...", help="Checkpoints, or runs: paths or URLs."),
    part: Strings = Option(None, metavar="NAME", help="optimizer, or a glob on names, as 'ema.*'."),
    last: int | None = Option(None, min=1, help="Of a run: number of newest steps that keep the part."),
    every_steps: int | None = Option(None, min=1, help="Of a run: multiples of this step keep the part."),
    rewrite: bool = Option(False, "--rewrite", help="Rewrite files that hold other tensors too."),
    dry_run: bool = Option(False, "--dry-run", help="List savings only (the default)."),
    yes: bool = _YES,
    options: str | None = STORAGE,
) -> Answer:
    """Drop the optimizer, or another part, of checkpoints. The rest stays readable, also for stock torch.

    In a run the newest --last steps keep the part. Lists the savings unless --yes is given. Pinned
    checkpoints stay whole. A crash leaves a checkpoint either unchanged or without the part.
    """
    from dcp.manager.dropping import drop_parts

    yes = yes and not dry_run
    retention = _retention(part or ["optimizer"], last, every_steps)

    def dropped(place: tuple[Store, tuple[Part, ...]]) -> tuple[Drop, bool]:
        found = drop_parts(*place, time.time(), rewrite=rewrite, dry_run=not yes)
        return found, yes and (found.outcome == "dropped" or bool(found.files))

    def pruned(uri: str) -> list[tuple[Drop, bool]]:
        places = _places(uri, retention, options, has_rules=bool(last or every_steps))
        if not places and not call.json:
            printing.line(f"{uri}: nothing to drop")
        return call.each(places, dropped, partial(_print_drop, part or []))

    found = [one for some in call.each(uris, pruned, lambda _: None) for one in some]
    if any(one.outcome == "dropped" for one, _ in found) and not (yes or call.json):
        printing.error("dry run, nothing dropped: pass --yes to drop")
    outcomes = {} if yes else {"dropped": "would drop"}
    return Answer(
        [
            asdict(one) | {"outcome": outcomes.get(one.outcome, one.outcome), "done": is_done}
            for one, is_done in found
        ]
    )


def _retention(parts: list[str], last: int | None, every_steps: int | None) -> Retention:
    from dcp.manager.retention import Keep, Retention

    # Without rules only single checkpoints are accepted; runs are refused.
    keep = Keep(last=last if last or every_steps else 1, every_steps=every_steps)
    globs = {name: keep for name in parts if name != "optimizer"}
    return Retention(optimizer=keep if "optimizer" in parts else None, parts=globs or None)


def _places(
    uri: str, retention: Retention, options: str | None, *, has_rules: bool
) -> list[tuple[Store, tuple[Part, ...]]]:
    from dcp.manager.dropping import to_prune
    from dcp.storage.formats.opening import has_checkpoint, naming_near_places
    from dcp.storage.stores.opening import OpenWith

    opener = OpenWith(storage_options(uri, options))
    with naming_near_places(uri, opener):
        if has_rules:
            return to_prune(uri, retention, open_store=opener)
        store = opener(uri)
        if not has_checkpoint(store):
            raise CheckpointNotFoundError(
                f"{uri} is not a checkpoint. To prune a run, pass the steps that keep the part, such as "
                "--last 2.",
                path=store.url,
            )
        return [(store, retention.dropping)]


def _print_drop(wanted: list[str], dropped: tuple[Drop, bool]) -> None:
    from dcp.steps import patterns_of_part

    found, is_done = dropped
    names, files = ", ".join(part.name for part in found.parts), counted(len(found.files), "file")
    shared = printing.size(found.shared_bytes)
    if found.outcome == "pinned":
        shown = "is pinned and was not changed; unpin it first with CheckpointManager.unpin"
    elif found.outcome == "absent":
        globs = [glob for name in wanted for glob in patterns_of_part(name)]
        shown = "nothing to drop" + (f": no name matches {', '.join(globs)}" if globs else "")
        shown += f"; removed {files} of an earlier prune" if found.files else ""
    elif found.outcome == "shared":
        shown = f"{names} not dropped: {shared} are in files shared with other tensors; pass --rewrite"
    else:
        verb, freed = "dropped" if is_done else "would drop", printing.size(found.freed_bytes)
        shown = f"{verb} {names}, {files}, {freed} freed"
        if found.rewritten_bytes:
            shown += f", {printing.size(found.rewritten_bytes)} rewritten"
        if found.shared_bytes:
            shown += f"; {shared} stay in files shared with other tensors (pass --rewrite)"
    printing.line(f"{found.url}: {shown}")


# -- gc ------------------------------------------------------------------------------------------------------


def gc(
    call: Call,
    root: str = Argument(..., help="A folder of checkpoints, or a checkpoint: path or URL."),
    yes: bool = _YES,
    hours: float = Option(24.0, min=0, help="Keep younger files, which a running save may need."),
    uploads: bool = Option(False, "--uploads", help="End all unfinished uploads; running saves fail."),
    options: str | None = STORAGE,
) -> Answer:
    """Remove leftovers of killed saves: files without a checkpoint, one day old or more.

    Lists the files unless --yes is given. Committed checkpoints, and files with other names than those of
    saves, are never touched.
    """
    from dcp.manager.removal import find_leftovers, remove_leftovers
    from dcp.storage.stores.opening import OpenWith

    before_seconds = time.time() - hours * 3600
    opener = OpenWith(storage_options(root, options))

    def removed(found: tuple[Store, Leftovers]) -> dict[str, Any]:
        store, left = found
        gone = 0
        if yes and left.problem is None:
            gone = remove_leftovers(store, left, before_seconds, uploads=uploads)
        names = tuple(info.name for info in left.files)
        return asdict(left) | {"files": names, "bytes": left.size_bytes, "removed": gone > 0}

    def show(row: dict[str, Any]) -> None:
        if row["problem"] is not None:
            printing.error(f"{row['url']}: not removed: {row['problem']}")
            return
        stays = "; not removed, because in use" if yes and row["files"] and not row["removed"] else ""
        printing.line(f"{row['url']}: {_KINDS[row['kind']]}{stays}")
        for name in row["files"]:
            printing.line(f"  {name}")
        for name in row["uploads"]:
            kept = "" if uploads else "; kept without --uploads"
            printing.line(f"  {name} (unfinished upload{kept})")

    found = find_leftovers(root, before_seconds, open_store=opener)
    rows = call.each(found, removed, show)
    done = [row for row in rows if row["removed"] or not yes]
    files, size = sum(len(row["files"]) for row in done), printing.size(sum(row["bytes"] for row in done))

    def show_sum() -> None:
        printing.line(f"{root}: {'removed' if yes else 'would remove'} {counted(files, 'file')}, {size}")
        if files and not yes:
            printing.error("dry run, nothing removed: pass --yes to remove")

    return Answer(rows, show_sum)
