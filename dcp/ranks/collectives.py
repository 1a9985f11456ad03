"""What the ranks of a save or load say to each other.

Payloads are packed bytes in uint8 tensors: no pickled objects travel, on gloo or on any other backend.
Every exchange carries each rank's outcome, so one rank's exception becomes the same typed error on all of
them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b

import msgpack

from dcp.ranks.exchanges import STAMP_BYTES, Exchanges
from dcp.ranks.failures import decode_failure, failure_of, pack_failure, pack_failures
from dcp.storage.errors import CheckpointError, PlanError

__all__ = ["Ranks"]

_OK, _FAILED = b"\x00", b"\x01"


class Ranks(Exchanges):
    """The ranks that take part in one save or load, and the steps they take together.

    Without ``use_dist`` every step is local. Once ``abort`` is set, the next part of a step on this rank
    fails, and so the step on all; before the coordinator reduces it looks whether it is set on any rank.
    Steps raise on all ranks alike (see `dcp.ranks.failures`): the failing rank's own exception there, its
    description elsewhere.
    """

    # -- steps -----------------------------------------------------------------------------------------------

    def reduce_scatter(
        self, step: str, local: Callable[[], bytes], reduce: Callable[[list[bytes]], Sequence[bytes]]
    ) -> bytes:
        """Run ``local`` everywhere, ``reduce`` on the coordinator, and give each rank its part of the
        result."""
        gathered, own_error = self._gather_outcomes(step, local)
        replies: list[bytes] | None = None
        coordinator_error: BaseException | None = None
        if gathered is not None:
            outcome, coordinator_error = self._reduce(gathered, lambda parts: self._counted(reduce(parts)))
            replies = (
                [_OK + part for part in outcome]
                if isinstance(outcome, list)
                else [_FAILED + outcome] * self.world_size
            )
        reply = self._guard(step, lambda: self._scatter(replies))
        return self._unwrap(step, reply, own_error or coordinator_error)

    def reduce_broadcast(
        self, step: str, local: Callable[[], bytes], reduce: Callable[[list[bytes]], bytes]
    ) -> bytes:
        """Run ``local`` everywhere, ``reduce`` on the coordinator, and give its result to every rank."""
        message, own_error = self._attempt(step, local)
        return self._reduced(step, message, own_error, reduce)

    def reduce_alike(
        self, step: str, local: Callable[[], bytes], reduce: Callable[[list[bytes]], bytes]
    ) -> bytes:
        """The same for a ``reduce`` whose result, or error, is the same on every rank.

        Where all messages are short (`channel.HEAD_BYTES`) each rank runs it itself: one exchange is enough.
        """
        message, own_error = self._attempt(step, local)
        messages = self._guard(step, lambda: self._all_gather_short(message))
        if messages is None:
            return self._reduced(step, message, own_error, reduce)
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

    def _reduced(
        self,
        step: str,
        message: bytes,
        own_error: BaseException | None,
        reduce: Callable[[list[bytes]], bytes],
    ) -> bytes:
        gathered = self._guard(step, lambda: self._gather(message))
        reply: bytes | None = None
        error: BaseException | None = None
        if gathered is not None:
            outcome, error = self._reduce(gathered, lambda parts: [reduce(parts)])
            reply = _OK + outcome[0] if isinstance(outcome, list) else _FAILED + outcome
        received = self._guard(step, lambda: self._broadcast(reply))
        return self._unwrap(step, received, own_error or error)

    def all_gather(self, step: str, local: Callable[[], bytes]) -> list[bytes]:
        """Run ``local`` everywhere; every rank gets every rank's result."""
        message, own_error = self._attempt(step, local)
        try:
            messages = self._guard(step, lambda: self._all_gather(message))
        except CheckpointError as error:
            if own_error is not None:  # which may be why the others are not there
                error.add_note(f"before, rank {self.rank} failed itself: {own_error}")
            raise
        return self._parts(step, messages, own_error)

    def compare(self, step: str, local: Callable[[], bytes]) -> list[bytes]:
        """`all_gather` of what is mostly the same on all ranks: nothing else travels then than a digest. What
        operation the ranks are in is for the caller to compare."""
        message, own_error = self._attempt(step, local, "any")
        messages = [message] * self.world_size
        channel = self._channel
        if channel is not None and not self._guard(step, lambda: channel.is_same(message, self._wait)):
            messages = self._guard(step, lambda: self._all_gather(message))
        return self._parts(step, messages, own_error)

    def _parts(self, step: str, messages: list[bytes], own_error: BaseException | None) -> list[bytes]:
        if failures := _failures(messages):
            raise failure_of(step, {r: decode_failure(w) for r, w in failures.items()}, self.rank, own_error)
        return [*map(_content, messages)]

    def broadcast(self, step: str, local: Callable[[], bytes]) -> bytes:
        """Run ``local`` on the coordinator; every rank gets its result."""
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

    def _gather_outcomes(
        self, step: str, local: Callable[[], bytes]
    ) -> tuple[list[bytes] | None, BaseException | None]:
        message, own_error = self._attempt(step, local)
        return self._guard(step, lambda: self._gather(message)), own_error

    def _reduce(
        self, gathered: list[bytes], reduce: Callable[[list[bytes]], list[bytes]]
    ) -> tuple[list[bytes] | bytes, BaseException | None]:
        """The coordinator's results, or the packed failures of the ranks (its own exception beside)."""
        if failed := _failures(gathered):
            return pack_failures(failed), None
        try:
            self.check_called_off(look=True)
            return reduce([*map(_content, gathered)]), None
        except BaseException as error:  # noqa: BLE001 - travels to every rank and is raised there
            return pack_failures({self.rank: pack_failure(error)}), error

    def _counted(self, replies: Sequence[bytes]) -> list[bytes]:
        if len(replies) != self.world_size:
            raise PlanError(f"the global plan has {len(replies)} parts for {self.world_size} ranks")
        return list(replies)

    def _unwrap(self, step: str, reply: bytes, own_error: BaseException | None) -> bytes:
        if reply[:1] == _OK:
            return reply[1:]
        failures = {
            int(rank): decode_failure(wire)
            for rank, wire in msgpack.unpackb(reply[1:], strict_map_key=False).items()
        }
        raise failure_of(step, failures, self.rank, own_error)

    def _attempt(
        self, step: str, local: Callable[[], bytes], operation: str = ""
    ) -> tuple[bytes, BaseException | None]:
        name = f"{operation or self.operation}/{step}"
        stamp = blake2b(name.encode(), digest_size=STAMP_BYTES).digest()
        try:
            self.check_called_off()
            return b"".join((stamp, _OK, local())), None
        except BaseException as error:  # noqa: BLE001 - travels to every rank and is raised there
            return stamp + _FAILED + pack_failure(error), error


def _failures(messages: Sequence[bytes]) -> dict[int, bytes]:
    """What the ranks that failed have told, by rank."""
    at = slice(STAMP_BYTES, STAMP_BYTES + 1)
    return {rank: _content(message) for rank, message in enumerate(messages) if message[at] == _FAILED}


def _content(message: bytes) -> bytes:
    """Without stamp and outcome."""
    return message[STAMP_BYTES + 1 :]
