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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
from dcp.storage.stores.base import Store
from dcp.storage.stores.names import TEMPORARY_PREFIX

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
        if self._channel is None:
            return partial(next, iter(self._alone(step, local, reduce)))
        message, own_error = self._attempt(step, local, sent)
        gathered = self._guard(step, lambda: self._gather(message))
        answers, error = self._reduce(gathered, lambda parts: [*map(reply.encode, reduce(parts))], sent)
        if isinstance(answers, bytes):
            answers = [answers] * self.world_size
        received = self._guard(step, lambda: self._scatter(answers))
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
        message, own_error = self._attempt(step, local, sent)
        return self._reduce_broadcast(step, message, own_error, reduce, sent)

    def reduce_alike(
        self, step: str, local: Callable[[], bytes], reduce: Callable[[list[bytes]], bytes]
    ) -> bytes:
        """Do the same with a ``reduce`` whose result, or error, is the same on every rank.

        Where all messages are short (`channel.HEAD_BYTES`) each rank runs it itself: one exchange is enough.
        """
        if self._channel is None:
            alone: bytes = self._alone(step, local, reduce)
            return alone
        message, own_error = self._attempt(step, local)
        messages = self._guard(step, lambda: self._all_gather_short(message))
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
        if self._channel is None:
            return [self._alone(step, local)]
        message, own_error = self._attempt(step, local)
        try:
            messages = self._guard(step, lambda: self._all_gather(message))
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
        messages = [message] * self.world_size
        if not self._guard(step, lambda: channel.is_same(message, self._wait)):
            messages = self._guard(step, lambda: self._all_gather(message))
        return self._parts(step, messages, own_error)

    def broadcast(self, step: str, local: Callable[[], bytes]) -> bytes:
        """Run ``local`` on the coordinator; every rank gets its result."""
        if self._channel is None:
            alone: bytes = self._alone(step, local)
            return alone
        message: bytes | None = None
        error: BaseException | None = None
        if self.is_coordinator:
            own, error = self._attempt(step, local)
            failed = error is not None
            message = _FAILED + pack_failures({self.rank: _content(own)}) if failed else own[STAMP_BYTES:]
        received = self._guard(step, lambda: self._broadcast(message))
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
            if self.abort is not None:
                self.check_called_off()
            result = local()
            if reduce is None:
                return result
            if self.abort is not None:
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

    def _reduce(
        self, gathered: list[bytes] | None, reduce: Callable[[list[Any]], list[bytes]], sent: Codec = BYTES
    ) -> tuple[list[bytes] | bytes | None, BaseException | None]:
        """Make the coordinator's answers, or one answer of packed failures of ranks (its own exception
        beside). None on other ranks."""
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
        gathered = self._guard(step, lambda: self._gather(message))
        answers, error = self._reduce(gathered, lambda parts: [reduce(parts)], sent)
        answer = answers[0] if isinstance(answers, list) else answers
        received = self._guard(step, lambda: self._broadcast(answer))
        return self._unwrap(step, received, own_error or error)

    def _parts(self, step: str, messages: list[bytes], own_error: BaseException | None) -> list[bytes]:
        if failures := _failures(messages):
            raise failure_of(step, {r: decode_failure(w) for r, w in failures.items()}, self.rank, own_error)
        return [*map(_content, messages)]

    def _unwrap(self, step: str, reply: bytes, own_error: BaseException | None) -> bytes:
        if reply[:1] == _OK:
            return reply[1:]
        failures = {
            int(rank): decode_failure(wire)
            for rank, wire in msgpack.unpackb(reply[1:], strict_map_key=False).items()
        }
        raise failure_of(step, failures, self.rank, own_error)


class LocalSteps:
    """Steps of one rank that goes its own way within a step that all take, which carries what it raises."""

    def reduce_scatter(
        self,
        step: str,
        local: Callable[[], Any],
        reduce: Callable[[list[Any]], Sequence[Any]],
        *,
        sent: Codec = BYTES,
        reply: Codec = BYTES,
    ) -> Callable[[], Any]:
        """Give the part of this rank alone."""
        return partial(next, iter(reduce([local()])))

    def reduce_broadcast(
        self,
        step: str,
        local: Callable[[], Any],
        reduce: Callable[[list[Any]], Any],
        *,
        sent: Codec = BYTES,
    ) -> Any:
        """Give the answer to this rank alone."""
        return reduce([local()])


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
