"""Features of a load: classes with methods that the steps of a load call.

The steps (`dcp.loading.load`, `dcp.loading.call`) call each method of all features, in the order of
`dcp.features.registry`. The core imports no feature.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, fields, replace
from reprlib import Repr
from typing import TYPE_CHECKING, Any

from dcp.calls.features import Feature, Features, ask
from dcp.planners.columns import HeldBoxes
from dcp.planners.load.selection import LoadOptions
from dcp.storage.engine.read import ReadEngine
from dcp.storage.engine.requests import ByteRuns, Pieces, ReadStats
from dcp.storage.errors import CheckpointError, PlanError
from dcp.storage.formats.index import CheckpointIndex, Path
from dcp.storage.tensors import LocalMemory
from dcp.storage.torch_storage.destinations import Filled, classify

if TYPE_CHECKING:
    from dcp.loading.call import LoadCall
    from dcp.storage.torch_storage.reader import FileSystemReader

_SHORT = Repr()
_SHORT.maxlist = _SHORT.maxdict = 12
_SHORT.maxstring = _SHORT.maxother = 200
_SHORT.maxlevel = 4
"""Limits of the report's repr, because a checkpoint may have a million unexpected names."""

ReadWhole = Callable[[Sequence[str]], tuple[Any, Mapping[str, Path]]]
"""Function that reads the entries below some names, complete: a nested state and the paths of its entries."""


@dataclass(eq=False)
class View:
    """View of a checkpoint: names, shapes and chunks of ``index``. ``unmapped`` are names without a rule in a
    map.
    """

    index: CheckpointIndex
    unmapped: frozenset[str] = frozenset()

    def reads(
        self, engine: ReadEngine, pieces: Pieces, memory: LocalMemory
    ) -> tuple[ByteRuns, Iterator[Filled]]:
        """Return the byte runs to read for ``pieces``, and fills of local tensors."""
        return classify(engine, pieces, memory)

    def renamed(self, name_of: Callable[[str], str]) -> View:
        """Return a view with names changed by ``name_of``. Raises PlanError for two entries of one name."""
        view, index = copy.copy(self), self.index
        fqns, values = ([*map(name_of, names)] for names in (index.fqns, index.objects.fqns))
        if len({*fqns, *values}) < len(fqns) + len(values):
            twice = next(name for name in fqns + values if (fqns + values).count(name) > 1)
            raise PlanError(f"two entries of the checkpoint would have the name {twice!r}", fqn=twice)
        paths = index.planner_data
        if isinstance(paths, Mapping):
            paths = {new: _moved(path, new) for name, path in paths.items() if (new := name_of(name))}
        view.index = replace(
            index, fqns=fqns, objects=replace(index.objects, fqns=values), planner_data=paths
        )
        view.unmapped = frozenset(map(name_of, self.unmapped))
        return view

    def lost(self, unexpected: Sequence[str]) -> list[str]:
        """Return the ``unexpected`` names that the view itself loses."""
        return []


def _moved(path: Any, new: str) -> Any:
    """Return the path of an entry renamed to ``new``, keeping the types of equal trailing keys."""
    if not isinstance(path, tuple) or ".".join(map(str, path)) == new:
        return path
    kept = len(path)
    while kept and new.endswith(f".{path[kept - 1]}"):
        kept -= 1
        new = new.removesuffix(f".{path[kept]}")
    return (*new.split("."), *path[kept:])


class Target:
    """Target of a load; this class fills a state dict in place.

    ``unasked`` are top-level keys without a selected entry. ``has_objects``: objects receive state by their
    own code. ``gives_back``: `give_back` is called after the load.
    """

    gives_back = False
    has_objects = False
    unasked: tuple[str, ...] = ()

    def __init__(self, state_dict: dict[str, Any]) -> None:
        self.state_dict = state_dict
        self._given = frozenset(state_dict if isinstance(state_dict, Mapping) else ())

    @property
    def made(self) -> AbstractSet[str]:
        """Entries with tensors made for this load, discarded by a failed load."""
        return frozenset(self.state_dict) - self._given

    def kinds(self) -> Mapping[str, str]:
        """Return the kinds of containers at keys of the top level, which ranks compare."""
        return {}

    def state(self, index_of: Callable[[], CheckpointIndex], rank: int) -> dict[str, Any]:
        """Return the state to load into on ``rank``; ``index_of`` returns the index of the checkpoint."""
        return self.state_dict

    def fits_after(self, error: CheckpointError) -> bool:
        """Return whether `state` may fit after a failed plan; equal on all ranks."""
        return False

    def take_back(self) -> None:
        """Remove additions of `state` from the state dict, after a failed load."""

    def give_back(self, call: LoadCall | None) -> None:
        """Replace values, and pass state to the objects loaded by ``call``.

        Raises CheckpointError for a failing ``load_state_dict()``; earlier objects keep their new state.
        Raises PlanError for tensors still on the meta device.
        """


class LoadFeature(Feature):
    """One feature in one load on one rank, made without arguments; ``options`` are those of the load.

    Methods are listed in the order of their calls, each for all features; `names` and `entries` may be called
    twice in one plan. All run in steps of all ranks, so errors are raised on all ranks. ``call`` is the load
    from `takes_part` on. If a plan fails and another state is tried, the methods are called again. The option
    of a feature counts as given unless it is None.
    """

    options: LoadOptions
    call: LoadCall
    later: Sequence[str] = ()
    """Entries with tensors filled by `put`."""
    made: Sequence[str] = ()
    """Entries made by the feature, not planned."""
    new: Sequence[str] = ()
    """Entries with new memory."""
    whole: Sequence[str] = ()
    """Entries for which `loaded` reads other entries complete."""

    def target(self, target: Target) -> Target:
        """Return another target, for example with objects among its values."""
        return target

    def beside(self, reader: FileSystemReader) -> Any:
        """Return plain data for `view` from other files of the folder, on the coordinator."""

    def view(self, view: View, beside: Any) -> View:
        """Return another view of the checkpoint: other names, or derived tensors."""
        return view

    def takes_part(self) -> bool:
        """Return whether the feature is active in ``call``; if not, only `judge` is called."""
        return True

    def state(self) -> None:
        """Replace values of the state dict, before the checkpoint is read."""

    def names(self, index: CheckpointIndex) -> None:
        """Replace flat keys."""

    def entries(self, index: CheckpointIndex) -> None:
        """Remove or refuse entries of the load."""

    def destinations(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return ``values``, some with replaced memory."""
        return values

    def unexpected(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Return the unloaded ``names`` to report."""
        return names

    def boxes(
        self, memory: LocalMemory, pieces: Pieces, index: CheckpointIndex, held: HeldBoxes
    ) -> LocalMemory:
        """Return the memory to load into, partly replaced."""
        return memory

    def findings(self, *, is_shared: bool) -> Any:
        """Return plain data for `judge`, or None. ``is_shared``: all ranks use one index."""

    def judge(self, found: Sequence[Any]) -> None:
        """Raise errors that follow from the findings of all ranks.

        Called on every rank or on the coordinator, and must be deterministic.
        """

    def accept(self, fqn: str, value: Any) -> bool:
        """Take a loaded value; return False to store it in the state dict."""
        return False

    def loaded(self, read_whole: ReadWhole) -> None:
        """Make entries from other entries of the checkpoint."""

    def put(self) -> None:
        """Store derived entries in the state dict.

        Before this call, only tensors have changed. With torch's protocol values may have changed too, and
        `destinations` and `boxes` were not called.
        """

    def done(self, report: LoadReport, *, is_coordinator: bool) -> None:
        """Add facts to the report after this rank's values are stored. Other ranks may still fail."""


def load_features(kinds: Sequence[type[LoadFeature]], options: LoadOptions) -> Features[LoadFeature]:
    """Return the active features of a load with ``options``."""
    made = []
    for kind in kinds:
        option = kind.option
        if not option or ask(kind.name, "option", getattr, object, options, option) is not None:
            feature = ask(kind.name, "__init__", kind, LoadFeature)
            feature.options = options
            made.append(feature)
    return Features(LoadFeature, made, [kind.name for kind in kinds])


@dataclass
class LoadReport:
    """Result of `dcp.load` on this rank.

    Attributes:
        missing: Names of the state dict that the checkpoint lacks; only with ``allow_partial_load``.
        unexpected: Names of the checkpoint that this rank did not load, without those left out by ``only``
            and ``exclude``.
        cast: Names of tensors converted from another stored dtype.
        lossy: For each converted tensor, by its name in the checkpoint, a description of lost values: out of
            range, imaginary parts, fractions.
        renamed: Names of the checkpoint by names of the state dict, if different.
        kept_per_rank: `PerRank` values left unchanged, because the checkpoint has none for this rank.
        rescaled: `Rescale` values made by their rules, because another number of ranks saved.
        bytes_needed: Payload bytes requested by this rank.
        bytes_read: Bytes read from storage, headers included.
        blocks_verified: Checksum blocks compared.
        blocks_unverified: Checksum blocks read without a comparison: partly needed, or without a checksum.
        seconds: Seconds by phase.
        attempts: Number of attempts; above 1 if the checkpoint was replaced during the load.
        storage: Requests to an object store, empty for a disk: "requests" and their number by kind,
            "retries", "bytes_received", "request_seconds" (sum) and "slowest_request_seconds".
        save_id: Id of the save, if the format records one.
        world_size: Number of ranks that saved, if recorded.
        user_metadata: User metadata of the checkpoint.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    cast: list[str] = field(default_factory=list)
    bytes_needed: int = 0
    bytes_read: int = 0
    blocks_verified: int = 0
    blocks_unverified: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    kept_per_rank: list[str] = field(default_factory=list)
    attempts: int = 1
    storage: dict[str, float] = field(default_factory=dict)
    save_id: str | None = None
    world_size: int | None = None
    user_metadata: dict[str, Any] = field(default_factory=dict)
    rescaled: list[str] = field(default_factory=list)
    lossy: dict[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        values = (f"{each.name}={_SHORT.repr(getattr(self, each.name))}" for each in fields(self))
        return f"{type(self).__name__}({', '.join(values)})"

    def note(self, call: LoadCall | None, index: CheckpointIndex | None, stats: ReadStats | None) -> None:
        """Add facts of the plan, the checkpoint and the reads, as far as known."""
        if call is not None:
            self.missing, self.cast = [*call.missing], [*call.cast]
            self.unexpected, self.renamed = [*call.unexpected], dict(call.renamed_names)
        if index is not None:
            save_id, world_size = index.provenance.get("save_id"), index.provenance.get("world_size")
            self.save_id = save_id if isinstance(save_id, str) else None
            self.world_size = world_size if isinstance(world_size, int) else None
            self.user_metadata = dict(index.user)
        if stats is not None:
            self.bytes_needed, self.bytes_read = stats.bytes_needed, stats.bytes_read
            self.blocks_verified, self.blocks_unverified = stats.blocks_verified, stats.blocks_unverified
            self.lossy = dict(stats.lossy)
