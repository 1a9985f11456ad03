"""Steps that the ranks of a save or load take together.

Payloads are packed bytes in uint8 tensors, on gloo or on any other backend. Every exchange carries each
rank's outcome, so one rank's exception becomes the same typed error on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple, TypeVar

import msgpack

from dcp.ranks.exchanges import STAMP_BYTES, Exchanges
from dcp.ranks.failures import decode_failure, failure_of, pack_failure, pack_failures
from dcp.storage.errors import CheckpointError

__all__ = ["BYTES", "Codec", "LocalSteps", "Ranks"]

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

    Steps raise on all ranks alike (see `dcp.ranks.failures`): the failing rank's own exception there, its
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
