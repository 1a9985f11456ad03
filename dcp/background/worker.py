"""What a background writer is: something that carries out save orders, one after the other."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from dcp.storage.torch_storage.writer import FileSystemWriter

if TYPE_CHECKING:
    from dcp.background.future import SaveFuture
    from dcp.planners.rank_state import RankState
    from dcp.saving.engine import SaveOrder

__all__ = ["BackgroundWriter", "FailedStaging", "Payload", "RefusedWriter", "StagedDict", "payload_of"]


class Payload(Protocol):
    """What was staged for a save: ``done`` when the copies are complete and checked; `release` gives the
    memory back."""

    @property
    def done(self) -> Future[Any]:
        """Done when the copies are complete; fails where staging failed."""

    def release(self) -> None:
        """The save has ended, whatever the end; idempotent."""


@dataclass
class StagedDict:
    """A state dict staged by torch's protocol, for planners and storages that override steps.

    ``done`` gives the state dict.
    """

    done: Future[dict[str, Any]] = field(default_factory=Future)

    def release(self) -> None:
        """Drop the copy."""
        self.done = Future()


@dataclass
class FailedStaging:
    """Stands for a state that could not be staged, so that the other ranks learn why."""

    done: Future[Any]

    @classmethod
    def because(cls, error: BaseException) -> FailedStaging:
        """What fails with ``error``."""
        done: Future[Any] = Future()
        done.set_exception(error)
        return cls(done)

    def release(self) -> None:
        """Nothing was taken."""


class RefusedWriter(FileSystemWriter):
    """Stands for what a rank cannot save with: its save takes part in the first step that the other ranks
    make, and fails there with ``error`` on all of them."""

    def __init__(self, error: Exception) -> None:
        super().__init__(os.curdir, open_store=partial(_fail, error))

    def discard(self) -> None:
        """Nothing was written."""


def _fail(error: Exception, path: str | os.PathLike[str]) -> NoReturn:
    raise error


def payload_of(payload: Payload, order: SaveOrder) -> RankState | dict[str, Any]:
    """What ``payload`` holds, once staging is complete; raises what staging raised. Its duration goes into
    ``order``."""
    result = payload.done.result(order.options.timeout_seconds)
    order.seconds.update(getattr(payload, "seconds", {}))
    local: RankState | None = getattr(payload, "local", None)
    return local if local is not None else result


class BackgroundWriter(ABC):
    """Carries out saves in the order in which they come, the same on all ranks."""

    @abstractmethod
    def submit(
        self,
        order: SaveOrder,
        payload: Payload,
        future: SaveFuture,
    ) -> None:
        """Begin a save; returns at once. Staging may still be running.

        ``future`` ends with the save, after ``payload`` was released. A payload that fails to be staged
        fails the save on all ranks.
        """

    @abstractmethod
    def close(self, timeout_seconds: float) -> None:
        """Finish the saves that were submitted, then stop; bounded, idempotent."""
