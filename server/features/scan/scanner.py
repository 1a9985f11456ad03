"""The scanner: brings the catalog up to date with what lies below a root.

What has not changed, by names, sizes and times, is not opened. What is found is written in batches, each in a
transaction of its own, so that a scan that is killed has only not finished, and several may run at once. A
checkpoint counts as vanished once the folder that held it has been listed without it, and only if nobody has
written its row since. Nothing vanishes from a folder or a root that cannot be listed, and not much at once
without a person's word (`dcp.server.features.scan.losses`).
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from dcp.server.catalog.checkpoints import mark_vanished, upsert_checkpoints
from dcp.server.catalog.errors import CatalogError, MissingError
from dcp.server.catalog.facts import CheckpointFacts
from dcp.server.catalog.roots import LIVING, RootRow, root_row, set_scanned, sync_roots
from dcp.server.catalog.runs import Known, known_of_run, run_keys
from dcp.server.catalog.structures import prepare_structures
from dcp.server.core.problems import UnavailableError
from dcp.server.core.roots import Roots, StorageRoot
from dcp.server.database.engine import Database
from dcp.server.features.scan.losses import Doubt, Losses, Missing, judge
from dcp.server.features.scan.reading import Reader, StructureMemo
from dcp.server.features.scan.walk import Candidate, PassedOver, is_in, walk
from dcp.storage.errors import CheckpointError

__all__ = ["ScanReport", "ScanStoppedError", "Scanner"]

_BATCH: Final = 256
_AT_ONCE: Final = 16
_NOTED_TROUBLE: Final = 10
_NOTED_RUNS: Final = 1000
_MAX_EXAMPLE: Final = 200
_MAX_TROUBLE: Final = 20
"""So many checkpoints that the storage does not give: it is away, and asking for the others is no use."""
_SETTLED: Final = frozenset({"committed", "unreadable", "incomplete", "deleted"})
_BY_ORDER: Final = frozenset({"deleted", "purged"})


class ScanStoppedError(Exception):
    """The scan was told to stop; what it had found by then is in the catalog."""


@dataclass(slots=True)
class ScanReport:
    """What a scan has done. ``opened`` of the ``found`` ones had changed; ``trouble`` is what could not be
    looked at, of which nothing is known, and how much was passed over and why. Of ``known`` checkpoints
    ``lost`` were not found, and are kept as they were, because they are too many at once; ``vanished`` are
    those that are gone."""

    root: str
    is_first: bool = False
    found: int = 0
    opened: int = 0
    new: int = 0
    changed: int = 0
    committed: int = 0
    incomplete: int = 0
    unreadable: int = 0
    vanished: int = 0
    known: int = 0
    lost: int = 0
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
        accepted: int = 0,
        stopped: Callable[[], bool] | None = None,
        on_progress: Callable[[ScanReport], None] | None = None,
    ) -> ScanReport:
        """Scan ``root``, or what of it is below the folder ``below``, which is not noted with the root.

        A person has said that up to ``accepted`` checkpoints are gone: more are not believed then either.

        Raises NotFoundError for a root that is not configured, `ScanStoppedError`, UnavailableError and the
        storage's errors (OSError) where it is not there or cannot be listed, which are noted with the root,
        and `DatabaseUnavailableError`.
        """
        place = self._roots.get(root)
        row = self._ensured(root)
        begun = time.monotonic()
        try:
            place.check_there()
            scan = _Scan(self._database, place, self._memo, self._clock, self._batch, below)
            scan.report.is_first = row.scanned_seconds is None
            for _ in scan.steps(accepted, Doubt(row.doubted_runs, row.is_other_place)):
                scan.report.seconds = time.monotonic() - begun
                if on_progress is not None:
                    on_progress(scan.report)
                if stopped is not None and stopped():
                    raise ScanStoppedError(f"the scan of {root} was stopped")
        except (UnavailableError, CheckpointError, OSError) as error:
            if not below:
                self._note(root, row.scan_state, place.problem(error).detail)
            raise
        scan.report.seconds = time.monotonic() - begun
        if not below:
            self._note(root, scan.noted(), scan.problem)
        return scan.report

    def _ensured(self, root: str) -> RootRow:
        try:
            with self._database.read() as connection:
                return root_row(connection, root)
        except MissingError:
            urls = {each.name: each.url for each in self._roots}
            self._database.transact(lambda connection: sync_roots(connection, urls))
            with self._database.read() as connection:
                return root_row(connection, root)

    def _note(self, root: str, state: Any, problem: str | None) -> None:
        self._database.transact(
            lambda connection: set_scanned(connection, root, state=state, error=problem, now=self._clock())
        )


class _Scan:
    """One scan of one root."""

    def __init__(
        self,
        database: Database,
        root: StorageRoot,
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
        self._identity: tuple[int, int] | None = None
        self.report = ScanReport(root.name)
        self._known: dict[str, dict[str, Known]] = {}
        """By run, those that have not been found yet; a run is here from its first candidate to its last."""
        self._living: dict[str, int] = {}
        """By run, how many of those that are known were there."""
        self._done: set[str] = set()
        self._closed: list[str] = []
        """Folders that could not be listed: of what is in them nothing is known."""
        self._waiting: list[Candidate] = []
        self._found: Counter[str] = Counter()
        self._missing: list[Missing] = []
        self.problem: str | None = None
        """What an operator should know of it first, None if all is well."""
        self._doubted: Losses | None = None
        self._passed_over: dict[str, tuple[int, str]] = {}
        """By reason: how many, and one of them."""
        self._hidden: defaultdict[str, set[str]] = defaultdict(set)
        """By run, what in it is not known any more."""

    def noted(self) -> dict[str, Any]:
        """What is kept with the root: the report, and what the next scan has to know of this one."""
        state = self.report.document() | {"trouble": self.report.trouble[:_NOTED_TROUBLE]}
        if self._doubted is not None:
            runs = [each.run for each in self._doubted.doubted[:_NOTED_RUNS]]
            state |= {"doubted_runs": runs, "is_other_place": self._doubted.is_other_place}
        return state

    def steps(self, accepted: int, before: Doubt) -> Iterator[None]:
        """Scan, and come up for air after each batch; the arguments are those of `losses.judge`."""
        self._begun = self._clock()
        self._identity = self._root.identity()
        for found in walk(self._root, self._below):
            if isinstance(found, Candidate):
                self._consider(found)
                if len(self._waiting) >= self._batch:
                    self._write()
                    yield
            elif isinstance(found, PassedOver):
                self._pass_over(found)
            elif found.problem is not None:
                self._closed.append(found.run_key)
                self._trouble(found.run_key, found.problem)
            else:
                self._leave(found.run_key)
        self._write()
        yield
        yield from self._forgotten_runs()
        self._check_same_place()
        losses = judge(self._missing, self.report.known, accepted=accepted, before=before)
        for run in losses.gone:
            self._vanish(run.keys)
            yield
        self._doubt(losses)
        if self.report.trouble:
            self.problem = self.report.trouble[0]
        for why, (count, example) in sorted(self._passed_over.items()):
            self.report.trouble.append(f"passed over: {why}: {count}, such as {example}")

    def _pass_over(self, passed: PassedOver) -> None:
        """Counted, and no failure of the scan: it has been that way at the scan before, too."""
        count, example = self._passed_over.get(passed.why, (0, ascii(passed.key)[:_MAX_EXAMPLE]))
        self._passed_over[passed.why] = count + 1, example
        if passed.hides:
            run, _, name = passed.key.rpartition("/")
            self._closed.append(passed.key)
            self._hidden[run].add(name)

    def _consider(self, candidate: Candidate) -> None:
        self.report.found += 1
        run, _, name = candidate.key.rpartition("/")
        known = self._known_of(run).pop(name, None)
        if known is None or known.state not in _BY_ORDER:
            self._found[run] += 1
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
            self._living[run] = sum(known.state in LIVING for known in self._known[run].values())
        return self._known[run]

    def _leave(self, run: str) -> None:
        """All of a run has been listed: what is known of it and was not found is missing."""
        self._done.add(run)
        left = self._known_of(run)
        known, found = self._living.pop(run), self._found.pop(run, 0)
        del self._known[run]
        self.report.known += known
        hidden = self._hidden.pop(run, ())
        names = tuple(name for name, each in left.items() if each.state in LIVING and name not in hidden)
        if names:
            self._missing.append(Missing(run, names, known, found))

    def _forgotten_runs(self) -> Iterator[None]:
        """Runs whose folders are not there at all."""
        with self._database.read() as connection:
            runs = run_keys(connection, self._root.name)
        for run in runs:
            if run in self._done or not is_in(run, self._below):
                continue
            if not any(is_in(run, folder) for folder in self._closed):
                self._leave(run)
                yield

    def _vanish(self, keys: Sequence[str]) -> None:
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

    def _doubt(self, losses: Losses) -> None:
        self.report.lost = losses.count
        if losses.doubted:
            self._doubted = losses
            name = self._root.name
            self.report.trouble.insert(
                0,
                f"{losses.count} of {self.report.known} checkpoints were not found, such as "
                f"{losses.doubted[0].keys[0][:200]}, and are kept as they were: too many at once to believe "
                f"it. Is the right storage there? If they are gone for good: dcp roots accept {name}",
            )

    # -- reading and writing ---------------------------------------------------------------------------------

    def _write(self) -> None:
        candidates, self._waiting = self._waiting, []
        self._check_same_place()
        facts = [found for found in self._look(candidates) if found is not None]
        self.report.opened += len(facts)
        if not facts:
            return
        self._check_same_place()
        prepare_structures(self._database, (one.structure for one in facts), clock=self._clock)
        upserted = self._database.transact(
            lambda connection: upsert_checkpoints(connection, facts, now=self._clock())
        )
        for one, row in zip(facts, upserted, strict=True):
            self.report.new += row.is_new
            self.report.changed += row.is_changed and not row.is_new
            self.report.committed += row.became_committed
            self.report.incomplete += one.state == "incomplete"
            self.report.unreadable += one.state == "unreadable"

    def _check_same_place(self) -> None:
        """Raise UnavailableError where another folder has taken the root's place since the scan began: what
        was found is of both, and what was not found may be there."""
        if self._root.identity() != self._identity:
            raise UnavailableError(
                f"the folder of root {self._root.name} was replaced by another one during the scan"
            )

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
