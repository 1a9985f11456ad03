"""Features of a load: their methods, which the steps of a load call.

The steps (`dcp.loading.load`, `dcp.loading.call`) call each method of all features in the order of
`dcp.features.registry`; a feature that has no part in a load does nothing there. The core imports none of
them.
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
"""For a prompt: a checkpoint may have a million names that a load did not ask for."""

ReadWhole = Callable[[Sequence[str]], tuple[Any, Mapping[str, Path]]]
"""Reads what is below some names of the checkpoint, whole: a nested state, and the paths of its entries."""


@dataclass(eq=False)
class View:
    """A checkpoint as it is shown to a load: names, shapes and chunks of ``index``.

    ``unmapped`` are names that a map would have to know.
    """

    index: CheckpointIndex
    unmapped: frozenset[str] = frozenset()

    def reads(
        self, engine: ReadEngine, pieces: Pieces, memory: LocalMemory
    ) -> tuple[ByteRuns, Iterator[Filled]]:
        """Return what is read for ``pieces`` of the index: runs, and elements into views of the local
        tensors."""
        return classify(engine, pieces, memory)

    def renamed(self, name_of: Callable[[str], str]) -> View:
        """Return the same tensors and values, with what ``name_of`` makes of their names. PlanError for two
        of one name."""
        view, index = copy.copy(self), self.index
        fqns, values = ([*map(name_of, names)] for names in (index.fqns, index.objects.fqns))
        if len({*fqns, *values}) < len(fqns) + len(values):
            twice = next(name for name in fqns + values if (fqns + values).count(name) > 1)
            raise PlanError(f"two entries of the checkpoint would be called {twice!r}", fqn=twice)
        paths = index.planner_data
        if isinstance(paths, Mapping):
            paths = {new: _moved(path, new) for name, path in paths.items() if (new := name_of(name))}
        view.index = replace(
            index, fqns=fqns, objects=replace(index.objects, fqns=values), planner_data=paths
        )
        view.unmapped = frozenset(map(name_of, self.unmapped))
        return view

    def lost(self, unexpected: Sequence[str]) -> list[str]:
        """Return those of the ``unexpected`` names that are lost for a reason of the view's own."""
        return []


def _moved(path: Any, new: str) -> Any:
    """Return the path of an entry with the name ``new``: its own end, as far as the name has it, below
    dicts."""
    if not isinstance(path, tuple) or ".".join(map(str, path)) == new:
        return path
    kept = len(path)
    while kept and new.endswith(f".{path[kept - 1]}"):
        kept -= 1
        new = new.removesuffix(f".{path[kept]}")
    return (*new.split("."), *path[kept:])


class Target:
    """The target of a load: here a state dict, filled as it is.

    ``unasked`` are keys of the top level of which nothing can be selected. ``has_objects``: after `state`,
    objects are given their state by code of their own. ``gives_back``: `give_back` is called after the load.
    """

    gives_back = False
    has_objects = False
    unasked: tuple[str, ...] = ()

    def __init__(self, state_dict: dict[str, Any]) -> None:
        self.state_dict = state_dict
        self._given = frozenset(state_dict if isinstance(state_dict, Mapping) else ())

    @property
    def made(self) -> AbstractSet[str]:
        """Entries whose tensors were made for this load, and are lost with a load that fails."""
        return frozenset(self.state_dict) - self._given

    def kinds(self) -> Mapping[str, str]:
        """Return the kinds of containers at keys of the top level, which ranks compare."""
        return {}

    def state(self, index_of: Callable[[], CheckpointIndex], rank: int) -> dict[str, Any]:
        """Return what to load into on this ``rank``, from the checkpoint whose index ``index_of`` gives."""
        return self.state_dict

    def fits_after(self, error: CheckpointError) -> bool:
        """Return whether `state` may give what fits, asked again after a plan failed on all ranks; the same
        on all of them."""
        return False

    def take_back(self) -> None:
        """Undo what `state` has added to the state dict, for a load that has failed."""

    def give_back(self, call: LoadCall | None) -> None:
        """Replace values, and give their state to objects of which something was loaded by ``call``.

        Raises CheckpointError for a ``load_state_dict()`` that fails; those before it have been given theirs.
        PlanError where tensors are on the meta device still.
        """


class LoadFeature(Feature):
    """One feature in one load, on one rank; made without arguments, and given the ``options`` of the load.

    Methods are listed in the order in which they are called, each of all features before the next; `names`
    and `entries` may be called twice in one plan. All run in
    steps that ranks take together, so that an error is raised on all of them. From `takes_part` on, ``call``
    is the load: where a plan fails and other states are tried, these are called again with another one.

    An option that makes the feature have a part counts as given where it is not None, so that False counts.
    """

    options: LoadOptions
    call: LoadCall
    later: Sequence[str] = ()
    """Entries whose tensors are filled by `put` alone."""
    made: Sequence[str] = ()
    """Entries that are made by the feature, and planned by nobody."""
    new: Sequence[str] = ()
    """Entries that were given memory."""
    whole: Sequence[str] = ()
    """Entries for which `loaded` reads others whole."""

    def target(self, target: Target) -> Target:
        """Return another target, as one that has objects among its values."""
        return target

    def beside(self, reader: FileSystemReader) -> Any:
        """On the coordinator: plain data that `view` needs, of other files of the checkpoint's folder."""

    def view(self, view: View, beside: Any) -> View:
        """Return another view of the checkpoint: other names, or tensors made of those that are stored."""
        return view

    def takes_part(self) -> bool:
        """Return whether the feature has a part in ``call``; if not, none of the following is called but
        `judge`, for what it found on other ranks."""
        return True

    def state(self) -> None:
        """Put other values into the state dict, before anything is known of the checkpoint."""

    def names(self, index: CheckpointIndex) -> None:
        """Take other flat keys."""

    def entries(self, index: CheckpointIndex) -> None:
        """Leave out entries that are not loaded, or refuse them."""

    def destinations(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return ``values``, some of them in other memory."""
        return values

    def unexpected(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Return those of the checkpoint's ``names``, which are not loaded, that are to be reported."""
        return names

    def boxes(
        self, memory: LocalMemory, pieces: Pieces, index: CheckpointIndex, held: HeldBoxes
    ) -> LocalMemory:
        """Return the memory to load into, some of it in place of the state dict's."""
        return memory

    def findings(self, *, is_shared: bool) -> Any:
        """Return plain data for `judge`; None for nothing. ``is_shared``: all ranks load by one index."""

    def judge(self, found: Sequence[Any]) -> None:
        """Raise what all ranks' findings mean, by rank.

        It is called on every rank, or on the coordinator alone: the same findings must raise the same on any
        rank, or other ranks wait for one that has raised.
        """

    def accept(self, fqn: str, value: Any) -> bool:
        """Take a loaded value; False where it goes to the state dict."""
        return False

    def loaded(self, read_whole: ReadWhole) -> None:
        """Make what is made of other entries of the checkpoint."""

    def put(self) -> None:
        """Put what was made or loaded apart into the state dict.

        Until here tensors alone have changed; by torch's protocol other values as well, and there neither
        `destinations` nor `boxes` was called.
        """

    def done(self, report: LoadReport, *, is_coordinator: bool) -> None:
        """Say what was done, once the values of this rank are there: another one may fail yet, and objects
        are given their state after it."""


def load_features(kinds: Sequence[type[LoadFeature]], options: LoadOptions) -> Features[LoadFeature]:
    """Make the features that have a part in a load with ``options``."""
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
        """Take what the plan passed over, what the checkpoint says of itself, and what reading cost, as far
        as it is known."""
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
