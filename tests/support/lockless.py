"""A model of an object service, and a scheduler that interleaves the operations of several writers on it.

`ObjectModel` has the properties of such a service: no lock between writers, files that appear on completion,
and uploads left behind by killed writers. `run_in_turns` runs functions in threads. One thread at a time may
do one operation on the store, in an order chosen by the test, so every interleaving can be tested.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from dcp.storage.errors import CheckpointConflictError, StorageError
from dcp.storage.stores.base import ANY, Buffer, Expected, Store, Version, WriteHandle, byte_view
from dcp.storage.stores.faults import Fault, FaultInjectingStore, StoreCall
from dcp.storage.stores.memory import MemoryStore

__all__ = ["ObjectModel", "Outcome", "Stopped", "by_plan", "run_in_turns"]

T = TypeVar("T")


class ObjectModel(MemoryStore):
    """Files in memory with the rules of an object service.

    ``uploads`` are the unfinished uploads, names by number; ``changes`` counts operations that made a file
    visible, replaced it, or removed it.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.uploads: dict[int, str] = {}
        self.changes = 0
        self._numbers = itertools.count()

    def create(
        self, name: str, *, durable: bool, expected_bytes: int | None = None, replace: bool = False
    ) -> WriteHandle:
        """Begin an upload: the file becomes visible when finished; by then another may have the name."""
        number = next(self._numbers)
        self.uploads[number] = name
        return _Upload(self, name, number, replace=replace)

    def publish(self, name: str, data: bytes, *, durable: bool, expected: Expected = ANY) -> Version:
        """Put a file conditionally."""
        version = super().publish(name, data, durable=durable, expected=expected)
        self.changes += 1
        return version

    def delete(self, name: str) -> None:
        """Delete a file unconditionally."""
        super().delete(name)
        self.changes += 1

    def abort_uploads(self, belongs: Callable[[str], bool]) -> int:
        """Abort the uploads of matching names."""
        ended = [number for number, name in self.uploads.items() if belongs(name)]
        for number in ended:
            del self.uploads[number]
        return len(ended)

    @contextmanager
    def lock(self, *, timeout_seconds: float) -> Iterator[None]:
        """Lock nothing: other writers continue."""
        yield

    def content(self, name: str) -> bytes | None:
        """Return the content of a file; None if absent."""
        file = self._files.get(name)
        return None if file is None else bytes(file.data)

    def clear(self) -> None:
        """Remove all files and uploads."""
        self.uploads.clear()
        for info in self.list():
            self.delete(info.name)


class _Upload(WriteHandle):
    def __init__(self, store: ObjectModel, name: str, number: int, *, replace: bool) -> None:
        self.name = name
        self._expected = ANY if replace else None
        self._store = store
        self._number = number
        self._data = bytearray()
        self._finished = False

    @property
    def position(self) -> int:
        return len(self._data)

    def write(self, data: Buffer) -> None:
        self._data += byte_view(data)

    def finish(self) -> int:
        if not self._finished:
            if self._store.uploads.pop(self._number, None) is None:
                raise CheckpointConflictError(f"the upload of {self.name} was ended", path=self.name)
            try:
                self._store.publish(self.name, bytes(self._data), durable=False, expected=self._expected)
            except CheckpointConflictError as error:
                raise StorageError(f"{self.name} exists already", path=self.name) from error
            self._finished = True
        return self.position

    def abort(self) -> None:
        self._store.uploads.pop(self._number, None)


class Stopped(BaseException):
    """Raised at every operation of a killed writer."""


@dataclass
class Outcome(Generic[T]):
    """The result or exception of an actor, and its operations."""

    value: T | None = None
    error: BaseException | None = None
    log: Sequence[StoreCall] = ()


class _ComparesBefore(FaultInjectingStore):
    """A service without conditional deletion: other writers may act between comparison and deletion."""

    delete_if = Store.delete_if


class _Actor(Generic[T]):
    def __init__(
        self, act: Callable[[Store], T], store: Store, dies_at: int | None, *, compares_deletions: bool
    ) -> None:
        self.outcome: Outcome[T] = Outcome()
        self.is_done = False
        self._act = act
        self._dies_at = dies_at
        self._parked = threading.Semaphore(0)
        self._turn = threading.Semaphore(0)
        kind = FaultInjectingStore if compares_deletions else _ComparesBefore
        self._store = kind(store, Fault(onwards=True, hook=self._await_turn))
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._parked.acquire()

    def step(self) -> None:
        """Let the actor do the operation it waits for, and run to its next operation or its end."""
        self._turn.release()
        self._parked.acquire()
        if self.is_done:
            self._thread.join()

    def _run(self) -> None:
        try:
            self.outcome.value = self._act(self._store)
        except BaseException as error:  # noqa: BLE001 - part of the outcome
            self.outcome.error = error
        self.outcome.log = self._store.log
        self.is_done = True
        self._parked.release()

    def _await_turn(self, operation: StoreCall) -> None:
        if self._dies_at is not None and operation.number > self._dies_at:
            raise Stopped
        self._parked.release()
        self._turn.acquire()
        if operation.number == self._dies_at:
            raise Stopped


def run_in_turns(
    store: Store,
    actors: Sequence[Callable[[Store], T]],
    choose: Callable[[list[int]], int],
    *,
    after_step: Callable[[], None] = lambda: None,
    dies_at: dict[int, int] | None = None,
    compares_deletions: bool = False,
) -> list[Outcome[T]]:
    """Run ``actors``, each with a view of ``store``, and return their outcomes.

    ``choose`` receives the numbers of unfinished actors and returns the actor of the next operation;
    ``after_step`` checks the state after each operation. ``dies_at``: the operation (from 1) before which an
    actor is killed. ``compares_deletions``: conditional deletions are one operation.
    """
    running = [
        _Actor(act, store, (dies_at or {}).get(number), compares_deletions=compares_deletions)
        for number, act in enumerate(actors)
    ]
    for actor in running:
        actor.start()
    failure: BaseException | None = None
    while waiting := [number for number, actor in enumerate(running) if not actor.is_done]:
        running[waiting[0] if failure else choose(waiting)].step()
        try:
            after_step()
        except BaseException as error:  # noqa: BLE001 - raised below, after all threads have ended
            failure = failure or error
    if failure is not None:
        raise failure
    return [actor.outcome for actor in running]


def by_plan(plan: Sequence[tuple[int, int]]) -> Callable[[list[int]], int]:
    """Return a ``choose``: for each (actor, count) in turn ``count`` operations of that actor; then the
    others to their ends."""
    turns = itertools.chain.from_iterable(itertools.repeat(actor, count) for actor, count in plan)

    def choose(waiting: list[int]) -> int:
        return next((actor for actor in turns if actor in waiting), waiting[0])

    return choose
