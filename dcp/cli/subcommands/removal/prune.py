"""``dcp prune``: a part of checkpoints goes, such as the optimizer, and the rest stays."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

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
    from dcp.manager.cleanup.dropping import Drop
    from dcp.manager.cleanup.retention import Part, Retention
    from dcp.storage.stores.base import Store

__all__ = ["command"]


def command(
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
                planned = _find(uri, retention, options, last or every_steps, tell=not json)
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
    from dcp.manager.cleanup.retention import Keep, Retention

    # Without rules it is asked for checkpoints, which are named: of a run it would be refused.
    keep = Keep(last=last if last or every_steps else 1, every_steps=every_steps)
    globs = {name: keep for name in parts if name != "optimizer"}
    return Retention(optimizer=keep if "optimizer" in parts else None, parts=globs or None)


def _find(
    uri: str, retention: Retention, options: str | None, rules: int | None, *, tell: bool
) -> list[tuple[Store, tuple[Part, ...]]]:
    from dcp.manager.cleanup.dropping import to_prune
    from dcp.storage.errors import OptionError
    from dcp.storage.formats.opening.folder import has_checkpoint
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
    """What it came to, and whether anything was changed."""
    from dcp.manager.cleanup.dropping import drop_parts, plan_drop

    found = (
        drop_parts(store, parts, time.time(), rewrite=rewrite)
        if yes
        else plan_drop(store, parts, rewrite=rewrite)
    )
    is_done = yes and (found.outcome == "dropped" or bool(found.files))
    if tell:
        _print(found, is_done=is_done)
    return found, is_done


def _outcome(found: Drop, *, yes: bool) -> dict[str, str]:
    return {"outcome": "would drop" if found.outcome == "dropped" and not yes else found.outcome}


def _print(found: Drop, *, is_done: bool) -> None:
    names = ", ".join(part.name for part in found.parts)
    if found.outcome == "pinned":
        told = "is pinned and stays whole; CheckpointManager.unpin releases it"
    elif found.outcome == "absent":
        left = f"; removed {counted(len(found.files), 'file')} of an earlier prune" if found.files else ""
        told = f"has nothing to drop{left}"
    elif found.outcome == "shared":
        shared = describe_bytes(found.shared_bytes)
        told = f"keeps its {names}: {shared} in files with what stays; --rewrite frees them"
    else:
        verb = "dropped" if is_done else "would drop"
        wrote = f", {describe_bytes(found.rewritten_bytes)} written anew" if found.rewritten_bytes else ""
        stay = (
            f"; {describe_bytes(found.shared_bytes)} stay in files with others (--rewrite)"
            if found.shared_bytes
            else ""
        )
        freed = describe_bytes(found.freed_bytes)
        told = f"{verb} {names}, {counted(len(found.files), 'file')}, {freed} freed{wrote}{stay}"
    print(printable(f"{found.url}: {told}"))
