"""The first step of an operation: all ranks say which one it is, in which manner, and where.

Ranks in different operations take different steps, and would wait for each other until their timeout, or
take each other's messages for something else. One small exchange, where all are the same.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack
import torch.distributed as dist

from dcp.calls.plain_errors import warn_caller
from dcp.ranks.failures import RankFailedError, failure_of
from dcp.storage.errors import CheckpointError, PlanError
from dcp.storage.stores.base import TEMPORARY_PREFIX, Store

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from dcp.ranks.collectives import Ranks

logger = logging.getLogger(__name__)

_MAX_VALUE = 1000
"""Characters of an option, and then a digest: patterns may be many."""

__all__ = ["begin", "check_same_checkpoint", "check_same_target", "raise_on_all_ranks", "works_alone"]


def works_alone(process_group: ProcessGroup | None, *, no_dist: bool, operation: str) -> bool:
    """Return whether an ``operation`` is this process's alone: asked for, or without torch.distributed.

    Raises CheckpointError where each rank would save alone to one id: for a process group that was destroyed,
    and for a save by one of several processes (``WORLD_SIZE``) without a group. A load by such a one warns; a
    read gives each of them the same.
    """
    if no_dist:
        return True
    if dist.is_available() and dist.is_initialized():
        return False
    if process_group is not None:
        raise CheckpointError(
            "a process group was given, but torch.distributed is not initialised any more: save before "
            "destroy_process_group(), or pass no_dist=True to work on one rank"
        )
    count = os.environ.get("WORLD_SIZE", "")
    if count.isdecimal() and int(count) > 1 and operation != "read":
        _tell_of_no_group(int(count), operation)
    return True


def _tell_of_no_group(processes: int, operation: str) -> None:
    facts = f"this is one of {processes} processes (WORLD_SIZE), and torch.distributed is not initialised"
    if operation == "load":
        text = f"{facts}: it loads alone, as rank 0; call init_process_group() first, or say no_dist=True"
        warn_caller(text)
        return
    raise CheckpointError(
        f"{facts}: each would {operation} alone, to one place, and replace what the others have written. "
        "Call init_process_group() first; or pass no_dist=True where this process alone is meant to",
    )


class _OperationOfRank(NamedTuple):
    operation: str
    manner: str
    place: str
    options: dict[str, str]
    kinds: dict[str, str]

    def __str__(self) -> str:
        place = f" {self.place}" if self.place else ""
        manner = f" ({self.manner})" if self.manner else ""
        return f"{self.operation}{place}{manner}"


def begin(
    ranks: Ranks,
    place: Callable[[], str],
    *,
    manner: Sequence[str] = (),
    options: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None = None,
    kinds: Callable[[], Mapping[str, str]] | None = None,
) -> tuple[str, ...]:
    """Return what ``place`` gives on each rank: the id. That may differ, where disks have other names on some
    hosts.

    ``manner`` is whatever decides which steps follow, ``options`` what else must be the same for the outcome
    to be one, or gives that. ``kinds`` says what a rank has for a key; keys may differ.
    Raises PlanError on all ranks where they take part in different operations, go about one differently, or
    have other options or kinds, and what ``place`` raises on any of them.
    """

    def part() -> bytes:
        given = options() if callable(options) else options or {}
        if ranks.world_size == 1:
            return place().encode("utf-8", "surrogatepass")
        shown = {name: _shown(value) for name, value in given.items()}
        found = dict(kinds()) if kinds is not None else {}
        own = _OperationOfRank(ranks.operation, ", ".join(manner), place(), shown, found)
        return bytes(msgpack.packb(own, unicode_errors="surrogatepass"))

    found = ranks.compare("begin", part)
    if ranks.world_size == 1:
        return (found[0].decode("utf-8", "surrogatepass"),)
    parts = [_OperationOfRank(*msgpack.unpackb(data, unicode_errors="surrogatepass")) for data in found]
    own = parts[ranks.coordinator]
    if any(part != own for part in parts):  # there may be very many kinds
        _check_alike(ranks, parts)
    return tuple(part.place for part in parts)


def _shown(value: Any) -> str:
    text = repr(value)
    if len(text) <= _MAX_VALUE:
        return text
    digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    return f"{text[:_MAX_VALUE]}... ({digest})"


def _check_alike(ranks: Ranks, parts: Sequence[_OperationOfRank]) -> None:
    own = parts[ranks.coordinator]
    odd = [rank for rank, part in enumerate(parts) if part[:2] != own[:2]]
    if odd:
        raise _not_alike(ranks, parts, odd)
    for name in dict.fromkeys(name for part in parts for name in part.options):
        values = [f"{name}={part.options.get(name, 'not given')}" for part in parts]
        what = f"the option {name!r} is not the same on all ranks"
        _check_same(ranks, values, what, "Give all ranks the same")
    for key in dict.fromkeys(key for part in parts for key in part.kinds):
        values = [part.kinds.get(key, "") for part in parts]
        what = f"{key!r} is not of one kind on all ranks"
        advice = "Give all ranks the same object for it, or leave the key out where a rank has nothing of it"
        _check_same(ranks, values, what, advice, key)


def _check_same(ranks: Ranks, texts: Sequence[str], what: str, advice: str, key: str | None = None) -> None:
    """Raise PlanError where the ranks that have something do not have the same."""
    if len({text for text in texts if text}) < 2:
        return
    common = texts[ranks.coordinator] or next(text for text in texts if text)
    odd = [rank for rank, text in enumerate(texts) if text not in ("", common)]
    facts: dict[str, Any] = {"ranks": odd} if key is None else {"ranks": odd, "fqns": [key]}
    error = PlanError(f"{what}: {_by_rank(texts)}. {advice}", **facts)
    raise failure_of("begin", dict.fromkeys(odd, error), ranks.rank, None)


@contextmanager
def raise_on_all_ranks(ranks: Ranks) -> Iterator[None]:
    """Raise on all ranks, in their `begin`, what this rank raises before it comes there.

    Where they all fail, as by an argument that is wrong everywhere, each raises its own exception.
    """
    try:
        yield
    except Exception as error:
        if ranks.world_size > 1:
            _tell(ranks, error)
        raise


def _tell(ranks: Ranks, error: Exception) -> None:
    def fail() -> str:
        raise error

    try:
        begin(ranks, fail)
    except RankFailedError as failure:
        if len(failure.ranks) < ranks.world_size:
            raise


def _not_alike(ranks: Ranks, parts: Sequence[_OperationOfRank], odd: Collection[int]) -> BaseException:
    what, advice = "called different operations", "All ranks of a process group must call the same function"
    if len({part.operation for part in parts}) == 1:
        what = f"{ranks.operation} in different ways"
        advice = "Give all ranks the same options, and planners and storages of one kind"
    error = PlanError(f"the ranks {what}: {_by_rank([*map(str, parts)])}. {advice}.")
    return failure_of("begin", dict.fromkeys(odd, error), ranks.rank, None)


def check_same_checkpoint(ranks: Ranks, places: Sequence[str], fingerprint: Callable[[], bytes]) -> None:
    """Raise PlanError on all ranks unless the checkpoint that they load is the same on all of them.

    ``places`` is what `begin` gave, ``fingerprint`` what the checkpoint there is known by: asked for only
    where the places differ, because a mount may have another name on another host.
    """
    if len(set(places)) == 1:
        return
    prints = ranks.compare("compare", fingerprint)
    odd = [rank for rank, found in enumerate(prints) if found != prints[ranks.coordinator]]
    if odd:
        error = PlanError(
            f"the ranks load different checkpoints: {_by_rank(places)}. Give all of them one id",
            ranks=odd,
        )
        raise failure_of("compare", dict.fromkeys(odd, error), ranks.rank, None)


def check_same_target(ranks: Ranks, places: Sequence[str], store: Store | None) -> None:
    """Raise PlanError on all ranks unless all of them save to one place.

    ``places`` is what `begin` gave. Where they differ, because a mount may have another name on another host,
    the coordinator leaves an empty file in its ``store``, which the others look for in theirs: a rank that
    has nothing to write would not find out otherwise. It is None for other packages' storages.
    """
    if len(set(places)) == 1:
        return
    made: list[Store] = []
    name = ranks.broadcast("compare", lambda: _leave_file(store, made)).decode()
    if not name:
        return

    def look() -> bytes:
        return b"\x01" if store is None or store.stat(name) is not None else b""

    try:
        found = ranks.all_gather("compare", look)
    finally:
        if ranks.is_coordinator and store is not None:
            _remove_file(store, name, made)
    odd = [rank for rank, there in enumerate(found) if not there]
    if odd:
        error = PlanError(
            f"the ranks do not save to the same place: {_by_rank(places)}. Give all of them one id", ranks=odd
        )
        raise failure_of("compare", dict.fromkeys(odd, error), ranks.rank, None)


def _leave_file(store: Store | None, made: list[Store]) -> bytes:
    if store is None:
        return b""
    if not store.exists():
        made.append(store)
    store.make_root()
    name = f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}"
    store.create(name, durable=False).finish()
    return name.encode()


def _remove_file(store: Store, name: str, made: Sequence[Store]) -> None:
    """Remove it without ever raising, because the other ranks are in the next step already. A save removes
    what stays.

    A folder that was ``made`` for the file goes too: the save makes it again, and takes away what it made.
    """
    try:
        store.delete_all([name])
        for one in made:
            one.remove_root()
    except Exception as error:  # noqa: BLE001 - as said
        logger.warning("%s may stay behind: %s", name, error)


def _by_rank(texts: Sequence[str]) -> str:
    """Return which ranks have which of ``texts``, by the first rank; a few of them."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        if not text:
            continue
        ranks_of.setdefault(text, []).append(rank)
    shown = []
    for text, ranks in [*ranks_of.items()][:6]:
        more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
        shown.append(f"rank {', '.join(map(str, ranks[:4]))}{more}: {text}")
    more = f"; {len(ranks_of) - 6} others" if len(ranks_of) > 6 else ""
    return "; ".join(shown) + more
