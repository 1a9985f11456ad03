"""Scanner: updates the catalog from the storage of a root.

Unchanged checkpoints, by names, sizes, and times, are not opened. Changes are written in batches with
separate transactions, so a killed scan is merely incomplete, and several scans can run at once. A checkpoint
has vanished if a listing of its folder does not contain the checkpoint, and its row was not written since.
Nothing vanishes from an unlistable folder or root, and many checkpoints vanish only after a manual
confirmation (`judge`).
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from dcp.server.catalog.changes import mark_vanished, upsert_checkpoints
from dcp.server.catalog.errors import CatalogError, MissingError
from dcp.server.catalog.facts import CheckpointFacts
from dcp.server.catalog.runs import (
    LIVING,
    Known,
    RootRow,
    known_of_run,
    root_row,
    run_keys,
    set_scanned,
    sync_roots,
)
from dcp.server.catalog.structures import prepare_structures
from dcp.server.core.problems import UnavailableError
from dcp.server.core.roots import Roots, StorageRoot
from dcp.server.database.engine import Database
from dcp.server.features.scan.reading import Reader
from dcp.server.features.scan.walk import Candidate, PassedOver, is_in, walk
from dcp.storage.errors import CheckpointError

_BATCH: Final = 256
_AT_ONCE: Final = 16
_NOTED_TROUBLE: Final = 10
_NOTED_RUNS: Final = 1000
_MAX_EXAMPLE: Final = 200
_MAX_TROUBLE: Final = 20
"""Number of unreadable checkpoints after which the scan fails, because the storage is probably unavailable.
"""
_SETTLED: Final = frozenset({"committed", "unreadable", "incomplete", "deleted"})
_DELETED: Final = frozenset({"deleted", "purged"})
_MANY: Final = 10
_SHARE: Final = 0.2
"""Share of a root's checkpoints. Manual clean-up and retention lose less."""


@dataclass(slots=True)
class ScanReport:
    """Result of a scan. ``opened``: changed checkpoints of ``found``; ``trouble``: unreadable places and
    reasons for skipped files, with counts. Of ``known`` checkpoints, ``vanished`` are gone; ``lost`` were not
    found, but too many to accept automatically."""

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


def scan_root(
    database: Database, roots: Roots, root: str, *, below: str = "", accepted: int = 0
) -> ScanReport:
    """Scan ``root``, or the folder ``below`` without a report for the root.

    A person has confirmed that up to ``accepted`` checkpoints are gone; a larger loss is not accepted at all.

    Raises NotFoundError for an unknown root; UnavailableError and OSError for a missing or unlistable root,
    stored with the root; and DatabaseUnavailableError.
    """
    place = roots.get(root)
    row = _root_row(database, roots, root)
    begun = time.monotonic()

    def note(state: Any, problem: str | None) -> None:
        if not below:
            database.transact(
                lambda connection: set_scanned(connection, root, state=state, error=problem, now=time.time())
            )

    try:
        place.check_there()
        scan = _Scan(database, place, below)
        scan.report.is_first = row.scanned_seconds is None
        scan.run(accepted, row)
    except (UnavailableError, CheckpointError, OSError) as error:
        note(row.scan_state, place.problem(error).detail)
        raise
    scan.report.seconds = time.monotonic() - begun
    note(scan.noted(), scan.problem)
    return scan.report


def _root_row(database: Database, roots: Roots, root: str) -> RootRow:
    try:
        with database.read() as connection:
            return root_row(connection, root)
    except MissingError:
        urls = {each.name: each.url for each in roots}
        database.transact(lambda connection: sync_roots(connection, urls))
        with database.read() as connection:
            return root_row(connection, root)


class _Scan:
    """Scan of one root."""

    def __init__(self, database: Database, root: StorageRoot, below: str) -> None:
        self._database = database
        self._root = root
        self._reader = Reader(root)
        self._below = below
        self._begun = time.time()
        self._identity: tuple[int, int] | None = None
        self.report = ScanReport(root.name)
        self._known: dict[str, dict[str, Known]] = {}
        """By run: known checkpoints not found yet; from the run's first candidate to its last."""
        self._living: dict[str, int] = {}
        """By run: number of known existing checkpoints."""
        self._done: set[str] = set()
        self._closed: list[str] = []
        """Unlistable folders; their contents are unknown."""
        self._waiting: list[Candidate] = []
        self._found: Counter[str] = Counter()
        self._missing: list[Missing] = []
        self.problem: str | None = None
        """First problem to report to an operator, or None."""
        self._doubted: Losses | None = None
        self._passed_over: dict[str, tuple[int, str]] = {}
        """By reason: count and an example."""
        self._hidden: defaultdict[str, set[str]] = defaultdict(set)
        """By run: names of unknown state."""

    def noted(self) -> dict[str, Any]:
        """Return the data stored with the root: the report, and doubts for the next scan."""
        state = asdict(self.report) | {"trouble": self.report.trouble[:_NOTED_TROUBLE]}
        if self._doubted is not None:
            runs = [each.run for each in self._doubted.doubted[:_NOTED_RUNS]]
            state |= {"doubted_runs": runs, "is_other_place": self._doubted.is_other_place}
        return state

    def run(self, accepted: int, before: RootRow) -> None:
        """Scan; arguments as for `judge`."""
        self._identity = self._root.identity()
        for found in walk(self._root, self._below):
            if isinstance(found, Candidate):
                self._consider(found)
                if len(self._waiting) >= _BATCH:
                    self._write()
            elif isinstance(found, PassedOver):
                self._pass_over(found)
            elif found.problem is not None:
                self._closed.append(found.run_key)
                self._trouble(found.run_key, found.problem)
            else:
                self._leave(found.run_key)
        self._write()
        self._leave_runs_without_folder()
        self._check_same_place()
        losses = judge(self._missing, self.report.known, accepted=accepted, before=before)
        for run in losses.gone:
            self._vanish(run.keys)
        self._doubt(losses)
        if self.report.trouble:
            self.problem = self.report.trouble[0]
        for why, (count, example) in sorted(self._passed_over.items()):
            self.report.trouble.append(f"skipped: {why}: {count}, such as {example}")

    def _pass_over(self, passed: PassedOver) -> None:
        """Count a skipped file. Not a problem: earlier scans skipped the file, too."""
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
        if known is None or known.state not in _DELETED:
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
        """Record missing checkpoints of a completely listed run."""
        self._done.add(run)
        left = self._known_of(run)
        known, found = self._living.pop(run), self._found.pop(run, 0)
        del self._known[run]
        self.report.known += known
        hidden = self._hidden.pop(run, ())
        names = tuple(name for name, each in left.items() if each.state in LIVING and name not in hidden)
        if names:
            self._missing.append(Missing(run, names, known, found))

    def _leave_runs_without_folder(self) -> None:
        with self._database.read() as connection:
            runs = run_keys(connection, self._root.name)
        for run in runs:
            is_listed = run in self._done or any(is_in(run, folder) for folder in self._closed)
            if is_in(run, self._below) and not is_listed:
                self._leave(run)

    def _vanish(self, keys: Sequence[str]) -> None:
        for start in range(0, len(keys), _BATCH):
            some = keys[start : start + _BATCH]
            self.report.vanished += self._database.transact(
                lambda connection, some=some: mark_vanished(  # type: ignore[misc]
                    connection, self._root.name, some, observed_seconds=self._begun, now=time.time()
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
                f"{losses.doubted[0].keys[0][:200]}. The catalog keeps them, because so many are missing at "
                f"once. Check that the storage is mounted. To confirm the loss: dcp roots accept {name}",
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
        prepare_structures(self._database, (one.structure for one in facts))
        upserted = self._database.transact(
            lambda connection: upsert_checkpoints(connection, facts, now=time.time())
        )
        for one, row in zip(facts, upserted, strict=True):
            self.report.new += row.is_new
            self.report.changed += row.is_changed and not row.is_new
            self.report.committed += row.became_committed
            self.report.incomplete += one.state == "incomplete"
            self.report.unreadable += one.state == "unreadable"

    def _check_same_place(self) -> None:
        """Raise UnavailableError if another folder replaced the root during the scan: found and missing
        checkpoints then belong to different folders."""
        if self._root.identity() != self._identity:
            raise UnavailableError(
                f"the folder of root {self._root.name} was replaced by another folder during the scan"
            )

    def _look(self, candidates: list[Candidate]) -> list[CheckpointFacts | None]:
        if self._root.is_local or len(candidates) < 2:
            return [self._facts(candidate) for candidate in candidates]
        with ThreadPoolExecutor(min(_AT_ONCE, len(candidates))) as pool:
            return list(pool.map(self._facts, candidates))

    def _facts(self, candidate: Candidate) -> CheckpointFacts | None:
        try:
            return self._reader.facts(candidate)
        except CatalogError as error:  # for example a name refused by the catalog
            self._trouble(candidate.key, str(error))
        except (CheckpointError, OSError) as error:
            if len(self.report.trouble) >= _MAX_TROUBLE:
                raise
            self._trouble(candidate.key, self._root.problem(error).detail)
        return None

    def _trouble(self, key: str, problem: str) -> None:
        self.report.trouble.append(f"{key}: {problem}"[:1000])


# -- losses --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Missing:
    """Known ``names`` of a run that were not found. ``known``: number of earlier checkpoints; ``found``:
    number of checkpoints now, including new checkpoints."""

    run: str
    names: tuple[str, ...]
    known: int
    found: int

    @property
    def lost(self) -> int:
        """The number by which the run is smaller."""
        return min(len(self.names), max(0, self.known - self.found))

    @property
    def keys(self) -> list[str]:
        """The keys, relative to the root."""
        return [f"{self.run}/{name}" if self.run else name for name in self.names]


@dataclass(frozen=True, slots=True)
class Losses:
    """Judgement: ``gone`` checkpoints become vanished, ``doubted`` checkpoints do not change.
    ``is_other_place``: none of the checkpoints known at the first doubt was found."""

    gone: Sequence[Missing]
    doubted: Sequence[Missing] = ()
    is_other_place: bool = False

    @property
    def count(self) -> int:
        """Number of checkpoints that can be gone."""
        return sum(len(each.names) for each in self.doubted)


def judge(missing: Sequence[Missing], known: int, *, accepted: int, before: RootRow) -> Losses:
    """Decide about the ``missing`` checkpoints of a root with ``known`` checkpoints.

    An unmounted disk, another folder at the root's path, and a mistyped address all look like deletions. A
    large loss is accepted only after confirmation by a person, for up to ``accepted`` checkpoints. Trainers
    that keep the last few steps are unaffected: deletions and new checkpoints balance. A doubted loss of the
    scan ``before`` stays doubted until the runs have recovered, so it cannot become a small share of a
    growing root; meanwhile no other loss is accepted.
    """
    smaller = [each for each in missing if each.lost]
    lost = sum(each.lost for each in smaller)
    is_all = 0 < lost == known
    lasts = any(each.run in before.doubted_runs for each in smaller)
    is_too_much = is_all or lasts or (lost >= _MANY and lost > _SHARE * known)
    doubted = Losses(
        [each for each in missing if not each.lost], smaller, is_all or (lasts and before.is_other_place)
    )
    return doubted if is_too_much and doubted.count > accepted else Losses(missing)
