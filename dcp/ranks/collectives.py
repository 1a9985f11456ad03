"""Steps that the ranks of a save or load take together.

Payloads are packed bytes in uint8 tensors, on gloo or on any other backend. Every exchange carries each
rank's outcome, so one rank's exception becomes the same typed error on all of them.

In the first step of an operation (`begin`) all ranks say which one it is, in which manner, and where: ranks
in different operations take different steps, and would wait for each other until their timeout, or take each
other's messages for something else.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgpack
import torch.distributed as dist

from dcp.calls.plain_errors import warn_caller
from dcp.ranks.exchanges import (
    STAMP_BYTES,
    Exchanges,
    RankFailedError,
    decode_failure,
    failure_of,
    pack_failure,
    pack_failures,
)
from dcp.storage.errors import CheckpointError, PlanError
from dcp.storage.stores.base import TEMPORARY_PREFIX, Store

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")


class Codec(NamedTuple):
    """Packs values for the way between ranks, and unpacks them."""

    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]


BYTES = Codec(lambda value: value, lambda data: data)
"""Values that are bytes already."""

_OK, _FAILED = b"\x00", b"\x01"


class Ranks(Exchanges):
    """The ranks that take part in one save or load, and the steps they take together.

    Steps raise on all ranks alike (see `dcp.ranks.exchanges`): the failing rank's own exception there, its
    description elsewhere. Once ``abort`` is set, the next step fails on this rank, and so on all; the
    coordinator looks whether it is set on any rank before it reduces. With one rank nothing is packed: a step
    returns what its functions return.
    """

    # -- steps -----------------------------------------------------------------------------------------------

    def reduce_scatter(
        self,
        step: str,
        local: Callable[[], Any],
        reduce: Callable[[list[Any]], Sequence[Any]],
        *,
        sent: Codec = BYTES,
        reply: Codec = BYTES,
    ) -> Callable[[], Any]:
        """Run ``local`` everywhere, ``reduce`` on the coordinator, and give each rank a function that gives
        its part of the result.

        It is to be called in the next step, because a part that this rank cannot unpack must fail on all.
        """
        channel = self._channel
        if channel is None:
            return partial(next, iter(self._alone(step, local, reduce)))
        message, own_error = self._attempt(step, local, sent)
        answers, error = self._reduce(step, message, lambda parts: [*map(reply.encode, reduce(parts))], sent)
        if isinstance(answers, bytes):
            answers = [answers] * self.world_size
        received = self._guard(step, lambda: channel.scatter(answers, self.coordinator, self._wait))
        return partial(reply.decode, self._unwrap(step, received, own_error or error))

    def reduce_broadcast(
        self,
        step: str,
        local: Callable[[], Any],
        reduce: Callable[[list[Any]], Any],
        *,
        sent: Codec = BYTES,
    ) -> Any:
        """Run ``local`` everywhere, ``reduce`` on the coordinator, and give its result, bytes, to every
        rank."""
        if self._channel is None:
            return self._alone(step, local, reduce)
        return self._reduce_broadcast(step, *self._attempt(step, local, sent), reduce, sent)

    def reduce_alike(
        self, step: str, local: Callable[[], bytes], reduce: Callable[[list[bytes]], bytes]
    ) -> bytes:
        """Do the same with a ``reduce`` whose result, or error, is the same on every rank.

        Where all messages are short (`channel.HEAD_BYTES`) each rank runs it itself: one exchange is enough.
        """
        channel = self._channel
        if channel is None:
            alone: bytes = self._alone(step, local, reduce)
            return alone
        message, own_error = self._attempt(step, local)
        messages = self._collect(step, message, lambda: channel.all_gather_short(message, self._wait))
        if messages is None:
            return self._reduce_broadcast(step, message, own_error, reduce)
        parts = self._parts(step, messages, own_error)

        def run() -> tuple[bytes, CheckpointError | None]:
            try:
                return reduce(parts), None
            except CheckpointError as error:
                return b"", error

        result, error = self._guard(step, run)
        if error is not None:
            raise failure_of(step, {self.coordinator: error}, self.rank, error)
        return result

    def all_gather(self, step: str, local: Callable[[], bytes]) -> list[bytes]:
        """Run ``local`` everywhere; every rank gets every rank's result."""
        channel = self._channel
        if channel is None:
            return [self._alone(step, local)]
        message, own_error = self._attempt(step, local)
        try:
            messages = self._collect(step, message, lambda: channel.all_gather(message, self._wait))
        except CheckpointError as error:
            if own_error is not None:  # which may be why the others are not there
                error.add_note(f"before, rank {self.rank} failed itself: {own_error}")
            raise
        return self._parts(step, messages, own_error)

    def compare(self, step: str, local: Callable[[], bytes]) -> list[bytes]:
        """Do as `all_gather` with what is mostly the same on all ranks: then a digest travels alone. What
        operation the ranks are in is for the caller to compare."""
        channel = self._channel
        if channel is None:
            return [self._alone(step, local)]
        message, own_error = self._attempt(step, local, operation="any")
        messages: list[bytes] | None = [message] * self.world_size
        if not self._guard(step, lambda: channel.is_same(message, self._wait)):
            messages = self._collect(step, message, lambda: channel.all_gather(message, self._wait))
        return self._parts(step, messages, own_error)

    def broadcast(self, step: str, local: Callable[[], bytes]) -> bytes:
        """Run ``local`` on the coordinator; every rank gets its result."""
        channel = self._channel
        if channel is None:
            alone: bytes = self._alone(step, local)
            return alone
        message: bytes | None = None
        error: BaseException | None = None
        if self.is_coordinator:
            own, error = self._attempt(step, local)
            failed = error is not None
            message = _FAILED + pack_failures({self.rank: _content(own)}) if failed else own[STAMP_BYTES:]
        received = self._guard(step, lambda: channel.broadcast(message, self.coordinator, self._wait))
        return self._unwrap(step, received, error)

    def barrier(self, step: str) -> None:
        """Return when every rank has come this far."""
        self.all_gather(step, lambda: b"")

    # -- outcomes --------------------------------------------------------------------------------------------

    def _alone(
        self, step: str, local: Callable[[], Any], reduce: Callable[[list[Any]], Any] | None = None
    ) -> Any:
        """Take the step of one rank; its error is the same as it would be among several."""
        try:
            self.check_called_off()
            result = local()
            if reduce is None:
                return result
            self.check_called_off()
            return reduce([result])
        except BaseException as error:  # noqa: BLE001 - raised below, where it keeps its cause
            failure = failure_of(step, {0: decode_failure(pack_failure(error))}, 0, error)
        raise failure

    def _attempt(
        self, step: str, local: Callable[[], Any], sent: Codec = BYTES, operation: str = ""
    ) -> tuple[bytes, BaseException | None]:
        """Make this rank's message: a stamp, the outcome, and the packed result or failure."""
        name = f"{operation or self.operation}/{step}"
        stamp = blake2b(name.encode(), digest_size=STAMP_BYTES).digest()
        try:
            self.check_called_off()
            return b"".join((stamp, _OK, sent.encode(local()))), None
        except BaseException as error:  # noqa: BLE001 - travels to every rank and is raised there
            return stamp + _FAILED + pack_failure(error), error

    def _collect(
        self, step: str, message: bytes, exchange: Callable[[], list[bytes] | None]
    ) -> list[bytes] | None:
        """Return what ``exchange`` gives, all of one step with ``message``."""

        def run() -> list[bytes] | None:
            messages = exchange()
            return None if messages is None else self._of_one_step(message, messages)

        return self._guard(step, run)

    def _reduce(
        self, step: str, message: bytes, reduce: Callable[[list[Any]], list[bytes]], sent: Codec
    ) -> tuple[list[bytes] | bytes | None, BaseException | None]:
        """Make the coordinator's answers, or one answer of packed failures of ranks (its own exception
        beside). None on other ranks."""
        channel = self._connected
        gathered = self._collect(step, message, lambda: channel.gather(message, self.coordinator, self._wait))
        if gathered is None:
            return None, None
        if failed := _failures(gathered):
            return _FAILED + pack_failures(failed), None
        try:
            self.check_called_off(look=True)
            return [_OK + part for part in reduce([sent.decode(_content(one)) for one in gathered])], None
        except BaseException as error:  # noqa: BLE001 - travels to every rank and is raised there
            return _FAILED + pack_failures({self.rank: pack_failure(error)}), error

    def _reduce_broadcast(
        self,
        step: str,
        message: bytes,
        own_error: BaseException | None,
        reduce: Callable[[list[Any]], bytes],
        sent: Codec = BYTES,
    ) -> bytes:
        channel = self._connected
        answers, error = self._reduce(step, message, lambda parts: [reduce(parts)], sent)
        answer = answers[0] if isinstance(answers, list) else answers
        received = self._guard(step, lambda: channel.broadcast(answer, self.coordinator, self._wait))
        return self._unwrap(step, received, own_error or error)

    def _parts(self, step: str, messages: list[bytes] | None, own_error: BaseException | None) -> list[bytes]:
        if failures := _failures(messages or ()):
            raise failure_of(step, {r: decode_failure(w) for r, w in failures.items()}, self.rank, own_error)
        return [*map(_content, messages or ())]

    def _unwrap(self, step: str, reply: bytes, own_error: BaseException | None) -> bytes:
        if reply[:1] == _OK:
            return reply[1:]
        failures = msgpack.unpackb(reply[1:], strict_map_key=False).items()
        raise failure_of(step, {int(r): decode_failure(w) for r, w in failures}, self.rank, own_error)


class LocalSteps(Ranks):
    """Steps of one rank that goes its own way within a step that all take, which carries what it raises."""

    def __init__(self) -> None:
        super().__init__(use_dist=False)

    def _alone(
        self, step: str, local: Callable[[], Any], reduce: Callable[[list[Any]], Any] | None = None
    ) -> Any:
        result = local()
        return result if reduce is None else reduce([result])


def _failures(messages: Sequence[bytes]) -> dict[int, bytes]:
    """Return the packed failures of the ranks that failed, by rank."""
    at = slice(STAMP_BYTES, STAMP_BYTES + 1)
    return {rank: _content(message) for rank, message in enumerate(messages) if message[at] == _FAILED}


def _content(message: bytes) -> bytes:
    """Without stamp and outcome."""
    return message[STAMP_BYTES + 1 :]


logger = logging.getLogger(__name__)

_MAX_VALUE = 1000
"""Characters of an option, and then a digest: patterns may be many."""


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
    if not count.isdecimal() or int(count) < 2 or operation == "read":
        return True
    facts = f"this is one of {count} processes (WORLD_SIZE), and torch.distributed is not initialised"
    if operation != "load":
        raise CheckpointError(
            f"{facts}: each would {operation} alone, to one place, and replace what the others have written. "
            "Call init_process_group() first; or pass no_dist=True where this process alone is meant to",
        )
    warn_caller(f"{facts}: it loads alone, as rank 0; call init_process_group() first, or say no_dist=True")
    return True


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
    what, advice = "called different operations", "All ranks of a process group must call the same function"
    if len({part.operation for part in parts}) == 1:
        what = f"{ranks.operation} in different ways"
        advice = "Give all ranks the same options, and planners and storages of one kind"
    odd = [rank for rank, part in enumerate(parts) if part[:2] != own[:2]]
    _refuse(ranks, "begin", odd, f"the ranks {what}: {_by_rank([*map(str, parts)])}. {advice}.")
    for name in dict.fromkeys(name for part in parts for name in part.options):
        values = [f"{name}={part.options.get(name, 'not given')}" for part in parts]
        what = f"the option {name!r} is not the same on all ranks"
        _check_same(ranks, values, what, "Give all ranks the same")
    for key in dict.fromkeys(key for part in parts for key in part.kinds):
        values = [part.kinds.get(key, "") for part in parts]
        what = f"{key!r} is not of one kind on all ranks"
        advice = "Give all ranks the same object for it, or leave the key out where a rank has nothing of it"
        _check_same(ranks, values, what, advice, fqns=[key])


def _check_same(ranks: Ranks, texts: Sequence[str], what: str, advice: str, **facts: Any) -> None:
    """Raise PlanError where the ranks that have something do not have the same."""
    common = texts[ranks.coordinator] or next(filter(None, texts), "")
    odd = [rank for rank, text in enumerate(texts) if text not in ("", common)]
    if odd:
        _refuse(ranks, "begin", odd, f"{what}: {_by_rank(texts)}. {advice}", **facts)


def _refuse(ranks: Ranks, step: str, odd: Sequence[int], text: str, **facts: Any) -> None:
    """Raise PlanError on all ranks if there are ``odd`` ones."""
    if odd:
        error = PlanError(text, ranks=[*odd], **facts)
        raise failure_of(step, dict.fromkeys(odd, error), ranks.rank, None)


@contextmanager
def raise_on_all_ranks(ranks: Ranks) -> Iterator[None]:
    """Raise on all ranks, in their `begin`, what this rank raises before it comes there.

    Where they all fail, as by an argument that is wrong everywhere, each raises its own exception.
    """
    try:
        yield
    except Exception as error:
        own = error
        if ranks.world_size > 1:

            def fail() -> str:
                raise own

            try:
                begin(ranks, fail)
            except RankFailedError as failure:
                if len(failure.ranks) < ranks.world_size:
                    raise
        raise


def check_same_checkpoint(ranks: Ranks, places: Sequence[str], fingerprint: Callable[[], bytes]) -> None:
    """Raise PlanError on all ranks unless the checkpoint that they load is the same on all of them.

    ``places`` is what `begin` gave, ``fingerprint`` what the checkpoint there is known by: asked for only
    where the places differ, because a mount may have another name on another host.
    """
    if len(set(places)) > 1:
        prints = ranks.compare("compare", fingerprint)
        odd = [rank for rank, found in enumerate(prints) if found != prints[ranks.coordinator]]
        text = f"the ranks load different checkpoints: {_by_rank(places)}. Give all of them one id"
        _refuse(ranks, "compare", odd, text)


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
    text = f"the ranks do not save to the same place: {_by_rank(places)}. Give all of them one id"
    _refuse(ranks, "compare", odd, text)


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


def retried(
    attempt: Callable[[int], T],
    what: str,
    *,
    retries: int,
    pause_seconds: float,
    is_passing: Callable[[CheckpointError], bool],
    wait: Callable[[float], object] = time.sleep,
) -> T:
    """Return what ``attempt`` gives, which is called with its number, from 1 on; ``what`` names it in the
    log.

    ``retries`` further ones follow on errors that are passing, each after a ``wait`` of ``pause_seconds``,
    doubled each time. Raises the last one's error.
    """
    number = 1
    while True:
        try:
            return attempt(number)
        except CheckpointError as error:
            if number > retries or not is_passing(error):
                raise
            logger.warning("%s failed and is tried again in %g s: %s", what, pause_seconds, error)
        wait(pause_seconds)
        number, pause_seconds = number + 1, pause_seconds * 2
