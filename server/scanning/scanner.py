"""The scanner: brings the catalog up to date with what lies below a root.

What has not changed, by names, sizes and times, is not opened. What is found is written in batches, each in a
transaction of its own, so that a scan that is killed has only not finished, and several may run at once. A
checkpoint counts as vanished once the folder that held it has been listed without it, and only if nobody has
written its row since. Nothing vanishes from a folder or a root that cannot be listed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from dcp.server.catalog.checkpoints import mark_vanished, upsert_checkpoints
from dcp.server.catalog.errors import CatalogError, MissingError
from dcp.server.catalog.facts import CheckpointFacts
from dcp.server.catalog.roots import root_row, set_scanned, sync_roots
from dcp.server.catalog.scans import Known, known_of_run, run_keys
from dcp.server.database.engine import Database
from dcp.server.roots import Root, Roots
from dcp.server.scanning.reading import Reader, StructureMemo
from dcp.server.scanning.walk import Candidate, walk
from dcp.storage.errors import CheckpointError, CheckpointNotFoundError

__all__ = ["ScanReport", "ScanStoppedError", "Scanner"]

_BATCH: Final = 256
_AT_ONCE: Final = 16
_MAX_TROUBLE: Final = 20
"""So many checkpoints that the storage does not give: it is away, and asking for the others is no use."""
_SETTLED: Final = frozenset({"committed", "unreadable", "incomplete", "deleted"})
_LIVING: Final = frozenset({"committed", "unreadable", "incomplete"})


class ScanStoppedError(Exception):
    """The scan was told to stop; what it had found by then is in the catalog."""


@dataclass(slots=True)
class ScanReport:
    """What a scan has done. ``opened`` of the ``found`` ones had changed; ``trouble`` is what could not be
    looked at, of which nothing is known."""

    root: str
    found: int = 0
    opened: int = 0
    new: int = 0
    changed: int = 0
    committed: int = 0
    incomplete: int = 0
    unreadable: int = 0
    vanished: int = 0
    seconds: float = 0.0
    trouble: list[str] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


class Scanner:
    """Scans roots into the catalog of ``database``; it may be kept, and remembers structures between scans.

    ``on_progress`` is called with the report as it grows, ``stopped`` is asked between batches.
    """

    def __init__(
        self,
        database: Database,
        roots: Roots,
        *,
        clock: Callable[[], float] = time.time,
        batch: int = _BATCH,
    ) -> None:
        self._database = database
        self._roots = roots
        self._clock = clock
        self._batch = batch
        self._memo = StructureMemo()

    def scan(
        self,
        root: str,
        *,
        below: str = "",
        stopped: Callable[[], bool] | None = None,
        on_progress: Callable[[ScanReport], None] | None = None,
    ) -> ScanReport:
        """Scan ``root``, or what of it is below the folder ``below``.

        Raises NotFoundError for a root that is not configured, `ScanStoppedError`, the storage's errors
        (OSError) where it cannot be listed, which are noted with the root, and `DatabaseUnavailableError`.
        """
        place = self._roots.get(root)
        self._ensure_root(root)
        begun = time.monotonic()
        scan = _Scan(self._database, place, self._memo, self._clock, self._batch, below)
        try:
            for _ in scan.steps():
                scan.report.seconds = time.monotonic() - begun
                if on_progress is not None:
                    on_progress(scan.report)
                if stopped is not None and stopped():
                    raise ScanStoppedError(f"the scan of {root} was stopped")
        except (CheckpointError, OSError) as error:
            away = isinstance(error, CheckpointNotFoundError)
            self._note(root, scan.report, "its folder is not there" if away else place.problem(error).detail)
            raise
        scan.report.seconds = time.monotonic() - begun
        self._note(root, scan.report, scan.report.trouble[0] if scan.report.trouble else None)
        return scan.report

    def _ensure_root(self, root: str) -> None:
        def known(name: str) -> bool:
            try:
                with self._database.read() as connection:
                    root_row(connection, name)
            except MissingError:
                return False
            return True

        if not known(root):
            urls = {each.name: each.url for each in self._roots}
            self._database.transact(lambda connection: sync_roots(connection, urls))

    def _note(self, root: str, report: ScanReport, problem: str | None) -> None:
        state = report.document() | {"trouble": report.trouble[:10]}
        self._database.transact(
            lambda connection: set_scanned(connection, root, state=state, error=problem, now=self._clock())
        )


class _Scan:
    """One scan of one root."""

    def __init__(
        self,
        database: Database,
        root: Root,
        memo: StructureMemo,
        clock: Callable[[], float],
        batch: int,
        below: str,
    ) -> None:
        self._database = database
        self._root = root
        self._reader = Reader(root, memo=memo, clock=clock)
        self._clock = clock
        self._batch = batch
        self._below = below
        self.report = ScanReport(root.name)
        self._known: dict[str, dict[str, Known]] = {}
        """By run, those that have not been found yet; a run is here from its first candidate to its last."""
        self._done: set[str] = set()
        self._closed: list[str] = []
        """Folders that could not be listed: of what is in them nothing is known."""
        self._waiting: list[Candidate] = []

    def steps(self) -> Iterator[None]:
        """Scan, and come up for air after each batch."""
        self._begun = self._clock()
        for found in walk(self._root, self._below):
            if isinstance(found, Candidate):
                self._consider(found)
                if len(self._waiting) >= self._batch:
                    self._write()
                    yield
            elif found.problem is not None:
                self._closed.append(found.run_key)
                self._trouble(found.run_key, found.problem)
            else:
                self._leave(found.run_key)
        self._write()
        yield
        yield from self._forgotten_runs()

    def _consider(self, candidate: Candidate) -> None:
        self.report.found += 1
        run, _, name = candidate.key.rpartition("/")
        known = self._known_of(run).pop(name, None)
        if known is None or not self._is_as_known(candidate, known):
            self._waiting.append(candidate)

    def _is_as_known(self, candidate: Candidate, known: Known) -> bool:
        if known.state not in _SETTLED or known.fingerprint is None:
            return False
        return known.fingerprint == self._reader.fingerprint(candidate)

    def _known_of(self, run: str) -> dict[str, Known]:
        if run not in self._known:
            with self._database.read() as connection:
                self._known[run] = known_of_run(connection, self._root.name, run)
        return self._known[run]

    def _leave(self, run: str) -> None:
        """All of a run has been listed: what is known of it and was not found is gone."""
        self._done.add(run)
        left = self._known.pop(run, None)
        if left is None:  # nothing was found in it
            left = self._known_of(run)
            del self._known[run]
        self._vanish(run, left)

    def _forgotten_runs(self) -> Iterator[None]:
        """Runs whose folders are not there at all."""
        with self._database.read() as connection:
            runs = run_keys(connection, self._root.name)
        for run in runs:
            if run in self._done or not _is_in(run, self._below):
                continue
            if not any(_is_in(run, folder) for folder in self._closed):
                with self._database.read() as connection:
                    left = known_of_run(connection, self._root.name, run)
                self._vanish(run, left)
                yield

    def _vanish(self, run: str, left: dict[str, Known]) -> None:
        names = [name for name, known in left.items() if known.state in _LIVING]
        keys = [f"{run}/{name}" if run else name for name in names]
        for start in range(0, len(keys), self._batch):
            some = keys[start : start + self._batch]
            self.report.vanished += self._database.transact(
                lambda connection, some=some: mark_vanished(  # type: ignore[misc]
                    connection,
                    self._root.name,
                    some,
                    observed_seconds=self._begun,
                    now=self._clock(),
                )
            )

    # -- reading and writing ---------------------------------------------------------------------------------

    def _write(self) -> None:
        candidates, self._waiting = self._waiting, []
        facts = [found for found in self._look(candidates) if found is not None]
        self.report.opened += len(facts)
        if not facts:
            return
        upserted = self._database.transact(
            lambda connection: upsert_checkpoints(connection, facts, now=self._clock())
        )
        for one, row in zip(facts, upserted, strict=True):
            self.report.new += row.is_new
            self.report.changed += row.is_changed and not row.is_new
            self.report.committed += row.became_committed
            self.report.incomplete += one.state == "incomplete"
            self.report.unreadable += one.state == "unreadable"

    def _look(self, candidates: list[Candidate]) -> list[CheckpointFacts | None]:
        if self._root.is_local or len(candidates) < 2:
            return [self._facts(candidate) for candidate in candidates]
        with ThreadPoolExecutor(min(_AT_ONCE, len(candidates))) as pool:
            return list(pool.map(self._facts, candidates))

    def _facts(self, candidate: Candidate) -> CheckpointFacts | None:
        try:
            return self._reader.facts(candidate)
        except CatalogError as error:  # such as a name that the catalog does not take
            self._trouble(candidate.key, str(error))
        except (CheckpointError, OSError) as error:
            if len(self.report.trouble) >= _MAX_TROUBLE:
                raise
            self._trouble(candidate.key, self._root.problem(error).detail)
        return None

    def _trouble(self, key: str, what: str) -> None:
        self.report.trouble.append(f"{key}: {what}"[:1000])


def _is_in(key: str, folder: str) -> bool:
    return not folder or key == folder or key.startswith(f"{folder}/")
