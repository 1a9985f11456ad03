"""Concurrent writers of one checkpoint id, interrupted at any operation: for commits and removals."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np

from dcp.errors import CheckpointConflictError, CheckpointNotFoundError
from dcp.storage.commit import Names, Previous, commit, discard, previous_state
from dcp.storage.commit_names import MANIFEST_NAME, METADATA_NAME
from dcp.storage.formats.checksums import crc32
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.formats.native.manifest import decode_manifest
from dcp.storage.formats.opening import open_index
from dcp.storage.formats.torch.metadata_reader import decode_torch_metadata
from dcp.storage.formats.torch.metadata_writer import encode_torch_metadata
from dcp.storage.stores import MemoryStore, Store
from tests.support.formats_indexes import small_index
from tests.support.lockless import ObjectModel, Outcome, Stopped, by_plan, run_in_turns

COMMUTING = ("create", "write", "lock")
"""Operations invisible to other writers: an interruption before the next operation has the same effect."""
DATA = b"x" * 1500
STOCK_FILE = "__0_0.distcp"
STOCK = 900
"""The version assigned to all saves of stock torch."""
BEFORE = 100
"""Versions from here on existed before the scene began."""
LIMIT = 1 << 20


def save_id(version: int) -> str:
    """Return the save id of a version."""
    return f"{version:08x}"


def index_of(version: int, name: str) -> CheckpointIndex:
    """Build an index with one file ``name``."""
    return replace(
        small_index(),
        files=[name],
        file_sizes=np.array([len(DATA)]),
        chunk_files=np.zeros(3, np.int64),
        provenance={"save_id": save_id(version)},
        user={"version": version},
        torch_metadata_crc=None,
    )


def save(version: int, store: Store, *, compatible: bool = True) -> tuple[int, Previous]:
    """Save like `FileSystemWriter`; return the version and the previous checkpoint expected by the commit."""
    previous = previous_state(store, Names())
    name = f"__0_0.{save_id(version)}.distcp"
    try:
        with store.create(name, durable=False) as file:
            file.write(DATA)
        index = index_of(version, name)
        names = Names()
        commit(
            store,
            index,
            previous,
            names=names,
            save_id=save_id(version),
            durable=False,
            torch_compatible=compatible,
        )
    except BaseException:
        discard(store, save_id(version), Names())
        raise
    return version, previous


def stock_save(version: int, store: Store) -> tuple[int, Previous]:
    """Save like stock torch: in place, over existing files."""
    store.publish(STOCK_FILE, DATA, durable=False)
    data = encode_torch_metadata(index_of(version, STOCK_FILE), checkpoint_id="x", save_id=f"stock{version}")
    store.publish(METADATA_NAME, data, durable=False)
    return version, Previous()


def load(version: int, store: Store) -> tuple[int, Previous]:
    """Return the committed version that a reader sees, 0 for none."""
    try:
        return version_of(open_index(store)), Previous()
    except CheckpointNotFoundError:
        return 0, Previous()


def version_of(index: CheckpointIndex) -> int:
    """Return the version of an index."""
    return STOCK if index.format == "torch_dcp" else int(index.user["version"])


bare = partial(save, compatible=False)

Act = Callable[[int, Store], tuple[int, Previous]]


@dataclass
class Scene:
    """Initial content, and concurrent actors; ``compares_deletions`` as in `run_in_turns`."""

    before: tuple[Act, ...]
    actors: Sequence[Act]
    compares_deletions: bool = False


SCENES = {
    "create, create": Scene((), [save, save]),
    "create, create bare": Scene((), [save, bare]),
    "overwrite, overwrite": Scene((save,), [save, save]),
    "overwrite, overwrite bare": Scene((save,), [save, bare]),
    "overwrite bare with both": Scene((bare,), [save, bare]),
    "overwrite stock": Scene((stock_save,), [save, save]),
    "overwrite beside stock": Scene((save,), [save, stock_save]),
    "overwrite, load": Scene((save,), [save, load]),
    "create, load": Scene((), [save, load]),
    "overwrite stock, load": Scene((stock_save,), [save, load]),
}

THREE = {
    "create thrice": Scene((), [save, save, save]),
    "overwrite thrice": Scene((save,), [save, save, save]),
    "with and without": Scene((save,), [save, bare, save]),
    "create with and without": Scene((), [save, bare, bare]),
    "overwrite beside stock": Scene((save,), [save, stock_save, save]),
    "overwrite, load": Scene((save,), [save, bare, load]),
}


@cache
def decoded(manifest: bytes | None, metadata: bytes | None) -> CheckpointIndex | None:
    """Decode these two files like a reader; None if neither exists."""
    store = MemoryStore("tests/commit-decoded")
    for name, data in ((MANIFEST_NAME, manifest), (METADATA_NAME, metadata)):
        store.delete(name)
        if data is not None:
            store.publish(name, data, durable=False)
    try:
        return open_index(store)
    except CheckpointNotFoundError:
        return None


@cache
def version_in(manifest: bytes) -> int:
    """Return the version of a manifest."""
    return int(decode_manifest(manifest).user["version"])


@cache
def prepared(before: tuple[Act, ...]) -> dict[str, bytes]:
    """Return the files written by ``before``."""
    model = ObjectModel("tests/commit-prepared")
    model.clear()
    for number, act in enumerate(before):
        act(BEFORE + number, model)
    return {info.name: model.read(info.name, limit_bytes=LIMIT) for info in model.list()}


class Stage:
    """One run of a scene: the commits, and the state visible after each operation."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.model = ObjectModel("tests/commit-interleavings")
        self.model.clear()
        for name, data in prepared(scene.before).items():
            self.model.publish(name, data, durable=False)
        self.truths = [self.truth()]
        self.published: set[int] = set()
        self._seen_changes = self.model.changes

    def truth(self) -> int:
        """Return the version that a reader sees now, 0 for none; check that its files exist."""
        index = decoded(self.model.content(MANIFEST_NAME), self.model.content(METADATA_NAME))
        if index is None:
            return 0
        assert {name: self.model.content(name) for name in index.files} == dict.fromkeys(index.files, DATA)
        return version_of(index)

    def look(self) -> None:
        """Check after an operation that a complete checkpoint exists, if one existed before."""
        if self.model.changes == self._seen_changes:
            return
        self._seen_changes = self.model.changes
        truth, manifest = self.truth(), self.model.content(MANIFEST_NAME)
        assert truth or not self.truths[-1]
        if truth != self.truths[-1]:
            self.truths.append(truth)
        if manifest is not None and version_in(manifest) < BEFORE:
            self.published.add(version_in(manifest))

    def play(
        self, choose: Callable[[list[int]], int], dies_at: dict[int, int] | None = None
    ) -> list[Outcome[tuple[int, Previous]]]:
        """Return the outcomes of the actors; actor n saves version n + 1. Raises unexpected errors."""
        outcomes = run_in_turns(
            self.model,
            [partial(act, number) for number, act in enumerate(self.scene.actors, start=1)],
            choose,
            after_step=self.look,
            dies_at=dies_at,
            compares_deletions=self.scene.compares_deletions,
        )
        for outcome in outcomes:
            if not isinstance(outcome.error, CheckpointConflictError | Stopped | None):
                raise outcome.error
        return outcomes


def check_end(stage: Stage, outcomes: list[Outcome[tuple[int, Previous]]]) -> None:
    """Check that each actor knows its outcome, and that no files of the losers remain."""
    scene = stage.scene
    saves = [number for number, act in enumerate(scene.actors) if act in (save, bare)]
    values = [value for number in saves if (value := outcomes[number].value) is not None]
    assert {version for version, _ in values} == stage.published
    won = [previous.manifest for _, previous in values]
    assert len(won) == len({version for version in won if version}) + (None in won)
    check_leftovers(stage)
    for number, act in enumerate(scene.actors):
        if act is load:
            seen = outcomes[number].value
            assert seen is not None
            assert seen[0] in stage.truths


def check_leftovers(stage: Stage) -> None:
    """Check that only the files of the last commit remain, with the `.metadata` of its manifest."""
    model, scene = stage.model, stage.scene
    names = {info.name for info in model.list()}
    data_files = {name for name in names if name.endswith(".distcp")}
    assert model.uploads == {}
    if not stage.truths[-1]:
        assert names == set()
        return
    index = open_index(model)
    assert set(index.files) <= data_files
    if index.format == "torch_dcp":  # stock torch deletes no files
        return
    assert data_files - {STOCK_FILE} == set(index.files)
    assert STOCK_FILE not in data_files or stock_save in scene.actors
    if METADATA_NAME not in names:
        assert index.torch_metadata_crc is None
        return
    data = model.read(METADATA_NAME, limit_bytes=LIMIT)
    assert crc32(data) == index.torch_metadata_crc
    assert set(decode_torch_metadata(data).files) <= names


def turns_of(scene: Scene, stage: type[Stage]) -> list[list[int]]:
    """Return for each actor the numbers of operations after which an interruption can matter."""
    outcomes = stage(scene).play(by_plan([]))
    return [
        [number for number, step in enumerate(outcome.log) if step.op not in COMMUTING] + [len(outcome.log)]
        for outcome in outcomes
    ]


def two_switches(scene: Scene, stage: type[Stage] = Stage) -> Iterator[list[tuple[int, int]]]:
    """Yield plans: the first of two actors is interrupted anywhere, then the second; the first ends first."""
    turns = turns_of(scene, stage)
    orders = [(0, 1), (1, 0)] if scene.actors[0] is not scene.actors[1] else [(0, 1)]
    for first, second in orders:
        for before, during in itertools.product(turns[first], turns[second]):
            yield [(first, before), (second, during), (first, 99)]
