"""Endings of saves as data that crosses processes, and the verdict that all ranks make of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import msgpack

from dcp.ranks.failures import RankFailedError, decode_failure, failure_of, pack_failure
from dcp.storage.errors import CheckpointError, CollectiveTimeoutError, WriterProcessError


def error_to_data(error: BaseException) -> dict[str, Any]:
    """Describe ``error`` in plain data, the failures by rank of a `RankFailedError` included."""
    failures = error.failures if isinstance(error, RankFailedError) else {}
    return {
        "own": pack_failure(error),
        "step": str(getattr(error, "step", "") or "save"),
        "ranks": {rank: pack_failure(cause) for rank, (cause, _) in failures.items()},
    }


def error_from_data(data: dict[str, Any], rank: int) -> BaseException:
    """Rebuild the exception that `error_to_data` described in rank ``rank``'s writer."""
    own = decode_failure(data["own"])
    if not data["ranks"]:
        return own
    failures = {int(failed): decode_failure(packed) for failed, packed in data["ranks"].items()}
    error = failure_of(data["step"], failures, rank, None)
    if isinstance(error, CheckpointError):
        error.__dict__.update(own.facts)
    return error


@dataclass(frozen=True)
class Ending:
    """The end of a save for one rank.

    ``died`` says how its writer process ended, if that is why; ``error`` is the data of what was raised
    otherwise. ``broken``: the writers of this rank are out of step with the others.
    """

    saved: bool = False
    save_id: str = ""
    died: str = ""
    error: dict[str, Any] = field(default_factory=dict)
    broken: bool = False

    def encode(self) -> bytes:
        """Encode as bytes, for the other ranks."""
        data: bytes = msgpack.packb(asdict(self), unicode_errors="surrogatepass")
        return data

    @classmethod
    def decode(cls, data: bytes) -> Ending:
        """Undo `encode`."""
        return cls(**msgpack.unpackb(data, unicode_errors="surrogatepass", strict_map_key=False))

    @property
    def is_timeout(self) -> bool:
        """Tell whether other ranks were waited for in vain."""
        return bool(self.error) and isinstance(decode_failure(self.error["own"]), CollectiveTimeoutError)

    @property
    def committed(self) -> bool:
        """Tell whether this rank knows that the checkpoint is committed."""
        return self.saved or (bool(self.error) and decode_failure(self.error["own"]).committed)


@dataclass(frozen=True)
class Verdict:
    """The result of a save on all ranks: ``error`` or success, and ``restart`` of the writers."""

    error: BaseException | None
    save_id: str
    restart: bool
    notes: tuple[str, ...] = ()


def verdict(endings: Mapping[int, Ending], rank: int, *, together: bool) -> Verdict:
    """Return the verdict of ``endings`` by rank, as ``rank`` raises it; ranks that are not known are left
    out.

    A save that all ranks make ``together`` is committed if one of them knows so, whatever befell the others'
    writers after that; an error of the commit itself, such as of `.metadata`, is raised all the same. A death
    comes before what it made other ranks raise.
    """
    restart = any(ending.died or ending.broken for ending in endings.values())
    deaths = {number: ending.died for number, ending in endings.items() if ending.died}
    notes = tuple(f"the writer process of rank {number} {died}" for number, died in deaths.items())
    own = endings[rank]
    known = [ending for ending in (own, *endings.values()) if ending.committed]
    if together and known and all(ending.error and not ending.broken for ending in known):
        return Verdict(error_from_data(known[0].error, rank), "", restart, notes)
    if together and known:
        save_id = next((ending.save_id for ending in endings.values() if ending.save_id), "")
        return Verdict(None, save_id, restart, notes)
    if deaths:
        error = failure_of("write in the background", _of_deaths(deaths), rank, None)
        if own.error:
            error.__context__ = error_from_data(own.error, rank)
        return Verdict(error, "", restart, notes)
    if own.saved:
        return Verdict(None, own.save_id, restart)
    return Verdict(error_from_data(own.error, rank), "", restart)


def _of_deaths(deaths: Mapping[int, str]) -> dict[int, CheckpointError]:
    return {
        rank: WriterProcessError(
            f"Checkpoint background process is dead: the writer process of rank {rank} {died}. What was "
            "under the id before is untouched, unless the save had just committed; the next save gets a new "
            "writer",
            rank=rank,
        )
        for rank, died in deaths.items()
    }
