"""A part of a checkpoint is dropped: what stays is as it was, for dcp and for stock torch, and says so."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp
from dcp.conversion.copying.source_marks import SourceChangedError
from dcp.conversion.plan import ConversionOptions, LayoutOptions
from dcp.conversion.run import Means, run_conversion
from dcp.conversion.targets.places import place_of
from dcp.errors import MissingKeyError
from dcp.inspection import header_of
from dcp.inspection.values.digests import digests
from dcp.inspection.verification import verify
from dcp.manager.cleanup import post_commit
from dcp.manager.cleanup.dropping import Drop, drop_parts, finish_drop, plan_drop
from dcp.manager.cleanup.retention import part_named
from dcp.steps.folders import read_commit
from dcp.steps.notes import update_notes
from dcp.storage import commit
from dcp.storage.commit_names import MANIFEST_NAME, METADATA_NAME
from dcp.storage.errors import (
    CheckpointConflictError,
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    OptionError,
)
from dcp.storage.formats.opening.folder import open_index
from dcp.storage.formats.opening.sources import open_source
from dcp.storage.stores import PosixStore
from dcp.storage.stores.base import Store
from dcp.storage.stores.faults import Fault, FaultInjectingStore
from dcp.storage.stores.opening import OpenWith
from tests.dcp.manager.manager_support import Gate, Recorder
from tests.support.crashes import Child, in_lab
from tests.support.values import leaves
from tests.support.with_optimizer import (
    OPTIMIZER_PART,
    full_state,
    parts_there,
    save_apart,
    save_mixed,
    save_stock,
    stock_sees,
)

NOW = 1_700_000_000.0


def drop(folder: Path, *, rewrite: bool = False) -> Drop:
    """The optimizer of one checkpoint."""
    return drop_parts(PosixStore(folder), [OPTIMIZER_PART], NOW, rewrite=rewrite)


def sizes(folder: Path) -> dict[str, int]:
    """Bytes of the data files."""
    return {path.name: path.stat().st_size for path in folder.glob("*.distcp")}


# -- what is dropped, and what stays -------------------------------------------------------------------------


@pytest.mark.parametrize("torch_compatible", [True, False])
def test_files_of_their_own_go_and_nothing_is_written(tmp_path: Path, torch_compatible: bool) -> None:
    """The weights' file is the same file; what is freed is what the other one took."""
    save_apart(tmp_path, torch_compatible=torch_compatible)
    before = sizes(tmp_path)
    inodes = {path.name: path.stat().st_ino for path in tmp_path.glob("*.distcp")}
    planned = plan_drop(PosixStore(tmp_path), [OPTIMIZER_PART])
    assert sizes(tmp_path) == before
    done = drop(tmp_path)
    assert done.outcome == "dropped"
    assert (done.files, done.freed_bytes) == (planned.files, planned.freed_bytes)
    (gone,) = done.files
    assert before.keys() - sizes(tmp_path).keys() == {gone}
    assert (done.freed_bytes, done.rewritten_bytes, done.shared_bytes) == (before[gone], 0, 0)
    (kept,) = tmp_path.glob("*.distcp")
    assert kept.stat().st_ino == inodes[kept.name]
    assert parts_there(tmp_path) == "weights"
    if torch_compatible:
        assert stock_sees(tmp_path) == "weights"
    assert verify(tmp_path).findings == []
    assert done.bytes == 4 * 3000 * 4 + 2 * 4


@pytest.mark.parametrize("save", [save_mixed, save_stock])
def test_a_file_of_both_stays_unless_it_may_be_rewritten(
    tmp_path: Path, save: Callable[[Path], None]
) -> None:
    """Nothing is lost where nothing is freed; a copy of what stays frees the rest, and no more is claimed."""
    save(tmp_path)
    before = sizes(tmp_path)
    done = drop(tmp_path)
    assert (done.outcome, done.freed_bytes, done.files) == ("shared", 0, ())
    assert done.shared_bytes > 4 * 3000 * 4
    assert sizes(tmp_path) == before
    assert parts_there(tmp_path) == stock_sees(tmp_path) == "whole"
    planned = plan_drop(PosixStore(tmp_path), [OPTIMIZER_PART], rewrite=True)
    done = drop(tmp_path, rewrite=True)
    assert (done.outcome, done.shared_bytes) == ("dropped", 0)
    assert done.freed_bytes == sum(before.values()) - sum(sizes(tmp_path).values())
    assert done.rewritten_bytes == sum(sizes(tmp_path).values())
    assert abs(done.freed_bytes - planned.freed_bytes) < 64 * 64
    assert sizes(tmp_path).keys().isdisjoint(before)
    assert parts_there(tmp_path) == stock_sees(tmp_path) == "weights"
    assert verify(tmp_path).findings == []


def test_copies_keep_payloads_aligned(tmp_path: Path) -> None:
    """As in the file that they are from, so that a mapped tensor is as fast."""
    save_mixed(tmp_path)
    drop(tmp_path, rewrite=True)
    index = open_index(PosixStore(tmp_path))
    large = index.payload_lengths >= 4096
    assert large.any()
    assert (index.payload_offsets[large] % 64 == 0).all()


def test_a_weight_that_is_called_like_an_optimizer_stays(tmp_path: Path) -> None:
    """The rule asks for what only optimizers have below the key."""
    save_apart(tmp_path)
    names = {name for name, _ in leaves(full_state()["app"]["model"])}
    drop(tmp_path)
    index = open_index(PosixStore(tmp_path))
    assert {name.removeprefix("app.model.") for name in index.fqns} == names
    assert list(index.objects.fqns) == ["step"]


def test_no_container_of_the_optimizer_is_made_again(tmp_path: Path) -> None:
    """Read without a state to load into: the dicts of the optimizer, also the empty one, are gone."""
    save_apart(tmp_path)
    drop(tmp_path)
    found = dcp.read(tmp_path)
    assert set(found) == {"app", "step"}
    assert set(found["app"]) == {"model"}


def test_what_was_dropped_is_told(tmp_path: Path) -> None:
    """By the header, and by the error of a load that wants it; the save is the same, of the same time."""
    save_apart(tmp_path)
    store = PosixStore(tmp_path)
    before = {**open_index(store).provenance}
    del before["structure"]  # the notes on the optimizer's containers go with it
    drop(tmp_path)
    index = open_index(store)
    assert {name: index.provenance[name] for name in before} == before
    (part,) = header_of(store, index).dropped
    assert (part.name, part.seconds, part.tensors, part.objects) == ("optimizer", NOW, 6, 3)
    with pytest.raises(MissingKeyError, match="optimizer was dropped on 2023-11-14 22:13:20 UTC"):
        dcp.load(full_state(0), checkpoint_id=tmp_path, no_dist=True)
    assert drop(tmp_path).outcome == "absent"


def test_digests_of_what_stays_stay(tmp_path: Path) -> None:
    """Each with its tensor; those of what is dropped go."""
    save_apart(tmp_path, digests=True)
    store = PosixStore(tmp_path)
    before = open_index(store)
    known = {name: before.digest(row) for row, name in enumerate(before.fqns)}
    assert None not in known.values()
    drop(tmp_path)
    index = open_index(store)
    assert {name: index.digest(row) for row, name in enumerate(index.fqns)} == {
        name: known[name] for name in index.fqns
    }
    assert verify(tmp_path).findings == []


def test_any_part_by_its_names(tmp_path: Path) -> None:
    """One after the other; each is noted, and values that are no tensors go as well."""
    save_mixed(tmp_path)
    store = PosixStore(tmp_path)
    for glob in ("app.model.optim_head", "step"):
        assert drop_parts(store, [part_named(glob)], NOW, rewrite=True).outcome == "dropped"
    index = open_index(store)
    assert [part.name for part in header_of(store, index).dropped] == ["app.model.optim_head", "step"]
    assert not any(name == "step" or name.startswith("app.model.optim_head") for name in index.fqns)
    assert "step" not in index.objects.fqns
    assert verify(tmp_path).findings == []


# -- what is refused -----------------------------------------------------------------------------------------


def test_pinned_ones_stay_whole(tmp_path: Path) -> None:
    """A pin is of everything."""
    save_apart(tmp_path)
    store = PosixStore(tmp_path)
    update_notes(store, lambda notes: replace(notes, pinned=True))
    assert plan_drop(store, [OPTIMIZER_PART]).outcome == drop(tmp_path).outcome == "pinned"
    assert parts_there(tmp_path) == "whole"


def test_not_all_of_it(tmp_path: Path) -> None:
    """A checkpoint without tensors is none: dcp rm is for that."""
    save_apart(tmp_path)
    with pytest.raises(OptionError, match="is all that it has"):
        drop_parts(PosixStore(tmp_path), [part_named("*")], NOW)
    with pytest.raises(CheckpointNotFoundError):
        drop(tmp_path / "none")
    ranks = tmp_path / "ranks"
    dcp.save(full_state(), checkpoint_id=ranks, use_collectives=False, no_dist=True)
    with pytest.raises(CheckpointError, match="saved on their own"):
        drop(ranks)


def test_damage_in_what_stays_is_not_copied(tmp_path: Path) -> None:
    """The copy is read again: where it is not what was committed, the checkpoint stays as it was."""
    save_mixed(tmp_path)
    index = open_index(PosixStore(tmp_path))
    chunk = index.chunks(index.position["app.model.w"])[0]
    (file,) = tmp_path.glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[int(index.payload_offsets[chunk]) + 5] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match="nothing is dropped"):
        drop(tmp_path, rewrite=True)
    assert list(tmp_path.glob("*.distcp")) == [file]
    assert "app.optimizer.state.0.exp_avg" in open_index(PosixStore(tmp_path)).fqns


@pytest.mark.parametrize("first", [partial(drop, rewrite=True), partial(save_apart, version=2)])
def test_what_came_first_is_told_where_it_has_removed_the_files(tmp_path: Path, first: Any) -> None:
    """A file that is to be copied is gone: it was replaced by another drop or save, and is not lost."""
    save_mixed(tmp_path)
    fault = Fault("open_read", name="*.distcp", hook=lambda _: first(tmp_path))
    with pytest.raises(CheckpointConflictError, match="came first"):
        drop_parts(FaultInjectingStore(PosixStore(tmp_path), fault), [OPTIMIZER_PART], NOW, rewrite=True)
    assert verify(tmp_path).findings == []
    (tmp_path / "manifest.msgpack").unlink()
    (tmp_path / ".metadata").unlink()
    with pytest.raises(CheckpointNotFoundError):
        drop(tmp_path, rewrite=True)


@pytest.mark.parametrize("rewrite", [False, True])
def test_a_save_that_came_first_wins(tmp_path: Path, rewrite: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drop is compared with what it began from: the new checkpoint is whole, and nothing is left."""
    (save_mixed if rewrite else save_apart)(tmp_path)
    real = commit.commit

    def overtaken(*args: Any, **options: Any) -> Any:
        monkeypatch.undo()
        save_apart(tmp_path, 2)
        return real(*args, **options)

    monkeypatch.setattr(commit, "commit", overtaken)
    with pytest.raises(CheckpointConflictError):
        drop(tmp_path, rewrite=rewrite)
    assert parts_there(tmp_path, 2) == stock_sees(tmp_path, 2) == "whole"
    assert verify(tmp_path).findings == []


def test_a_save_under_way_fails_and_says_so(tmp_path: Path) -> None:
    """It has seen what is not there any more; its files are gone, and what the drop left loads."""
    save_apart(tmp_path)
    done = []

    def overtake(_: object) -> None:
        done.append(drop(tmp_path).outcome)

    def open_store(path: str | os.PathLike[str]) -> Store:
        return FaultInjectingStore(PosixStore(path), Fault("create", name="*.distcp", hook=overtake))

    with pytest.raises(CheckpointConflictError, match="another writer published"):
        save_apart(tmp_path, 2, open_store=open_store)
    assert done == ["dropped"]
    assert parts_there(tmp_path) == "weights"
    assert verify(tmp_path).findings == []


def test_a_reader_that_is_overtaken_looks_again(tmp_path: Path) -> None:
    """Weights alone load, with a second look; who wants the optimizer is told that it was dropped."""

    def overtaken(path: Path) -> dcp.FileSystemReader:
        left = [1]

        def hook(_: object) -> None:
            if left.pop() if left else 0:
                drop(path)

        def open_store(place: str | os.PathLike[str]) -> Store:
            return FaultInjectingStore(PosixStore(place), Fault("open_read", name="*.distcp", hook=hook))

        return dcp.FileSystemReader(path, open_store=open_store)

    save_apart(tmp_path / "a")
    with pytest.raises(MissingKeyError, match="optimizer was dropped"):
        dcp.load(full_state(0), storage_reader=overtaken(tmp_path / "a"), no_dist=True)
    save_apart(tmp_path / "b")
    report = dcp.load(full_state(0), storage_reader=overtaken(tmp_path / "b"), only="app.model", no_dist=True)
    assert report.unexpected == []


@pytest.mark.parametrize("to", ["safetensors", pytest.param("torch", marks=pytest.mark.exhaustive)])
def test_a_conversion_that_is_overtaken_says_so(tmp_path: Path, to: str) -> None:
    """Files that it was to read are gone: it is to be done again, and nothing of it is left."""
    source, target = tmp_path / "source", tmp_path / "made"
    save_apart(source)
    left = [1]

    def hook(_: object) -> None:
        if left:
            left.pop()
            drop(source)

    def open_store(place: Any) -> Store:
        return FaultInjectingStore(PosixStore(place), Fault("open_read", name="*.distcp", hook=hook))

    def convert() -> Any:
        options = ConversionOptions(LayoutOptions(to, drop_objects=True))
        reopen = partial(open_source, source, open_store=open_store)
        return run_conversion(reopen, place_of(target, to, OpenWith()), options, Means("inline"), 0.0)

    with pytest.raises(SourceChangedError, match="a part of it was dropped; convert it again"):
        convert()
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    convert()
    assert {tensor.fqn for tensor in digests(target).tensors} >= {"app.model.w", "app.model.head"}


# -- a crash -------------------------------------------------------------------------------------------------


def test_what_a_crash_left_is_removed_once_stock_sees_the_same(tmp_path: Path) -> None:
    """Cut off behind the manifest, `.metadata` is of the checkpoint before: first that, then the files."""
    save_apart(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    done = drop(tmp_path)
    for name in (METADATA_NAME, *done.files):
        (tmp_path / name).write_bytes(before[name])
    assert parts_there(tmp_path) == "weights"
    assert stock_sees(tmp_path) == "whole"
    gone, freed = finish_drop(PosixStore(tmp_path))
    assert (gone, freed) == (done.files, done.freed_bytes)
    assert parts_there(tmp_path) == stock_sees(tmp_path) == "weights"
    assert verify(tmp_path).findings == []
    assert finish_drop(PosixStore(tmp_path)) == ((), 0)


def _drop_and_die(folder: Path) -> None:
    def kill(step: str, name: str) -> None:
        if (step, Path(name).name) == ("rename", MANIFEST_NAME):
            os.kill(os.getpid(), signal.SIGKILL)

    drop_parts(PosixStore(folder, observe=kill), [OPTIMIZER_PART], NOW)


def _killed_in_a_drop(folder: Path) -> bool:
    """A process that drops the optimizer is killed when its manifest is about to get its name."""
    return Child(_drop_and_die, folder).wait().killed


def test_the_next_drop_removes_what_a_killed_one_has_written_aside(tmp_path: Path) -> None:
    """Nothing of another that runs now: what was written aside a moment ago, or is no publish's."""
    save_apart(tmp_path)
    assert in_lab(_killed_in_a_drop, tmp_path)
    (left,) = tmp_path.glob(".tmp-*")
    os.utime(left, times=(1, 1))
    young, ledger = tmp_path / f".tmp-{'0' * 32}", tmp_path / f".tmp-convert-{'0' * 16}"
    for other in (young, ledger):
        other.write_bytes(b"of another")
    os.utime(ledger, times=(1, 1))
    assert drop(tmp_path).outcome == "dropped"
    assert {*tmp_path.glob(".tmp-*")} == {young, ledger}
    assert parts_there(tmp_path) == "weights"


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", dcp.state_dict_saver.AsyncCheckpointerType)
def test_a_save_behind_the_loop_puts_a_part_apart(tmp_path: Path, kind: Any) -> None:
    """As `dcp.save` does; a glob names any part."""
    dcp.async_save(
        full_state(),
        checkpoint_id=tmp_path / "one",
        apart=["optimizer", "app.model.optim_head"],
        no_dist=True,
        async_checkpointer_type=kind,
    ).result()
    assert len(sizes(tmp_path / "one")) == 3
    done = drop_parts(PosixStore(tmp_path / "one"), [part_named("app.model.optim_head")], NOW)
    assert (done.outcome, len(done.files), done.shared_bytes, done.rewritten_bytes) == ("dropped", 1, 0, 0)


class _OwnPlanner(dcp.DefaultSavePlanner):
    """Makes torch's plan objects."""

    def create_local_plan(self) -> Any:
        """As ever."""
        return super().create_local_plan()


def test_parts_apart_need_our_planner(tmp_path: Path) -> None:
    """Else they would be in one file without a word."""
    with pytest.raises(OptionError, match=r"apart needs a planner and a storage of ours.*prune --rewrite"):
        dcp.save(full_state(), checkpoint_id=tmp_path, planner=_OwnPlanner(), apart="optimizer", no_dist=True)


def test_what_could_not_be_removed_is_not_said_to_be_freed(tmp_path: Path) -> None:
    """And goes with the next drop."""
    save_apart(tmp_path)
    faulty = FaultInjectingStore(PosixStore(tmp_path), Fault("delete", name="*.distcp", error=OSError("no")))
    done = drop_parts(faulty, [OPTIMIZER_PART], NOW)
    assert (done.outcome, done.files, done.freed_bytes) == ("dropped", (), 0)
    assert len(sizes(tmp_path)) == 2
    again = drop(tmp_path)
    assert (again.outcome, len(again.files)) == ("absent", 1)
    assert again.freed_bytes > 0
    assert len(sizes(tmp_path)) == 1


# -- the manager ---------------------------------------------------------------------------------------------


def run(root: Path, steps: range, keep: dcp.Retention | None, **options: Any) -> Recorder:
    """Save these steps."""
    told = Recorder()
    with dcp.CheckpointManager(root, keep=keep, on_event=told, no_dist=True, **options) as manager:
        for step in steps:
            manager.save(step, full_state(step))
            manager.wait()
    return told


def there(root: Path, steps: range) -> list[str]:
    """What of each step is there."""
    return [parts_there(root / f"step-{step:08d}", step) for step in steps]


@pytest.mark.parametrize("mode", ["thread", "sync", pytest.param("process", marks=pytest.mark.exhaustive)])
def test_old_steps_lose_their_optimizer(tmp_path: Path, mode: str) -> None:
    """The newest keep it; what is freed is told; weights stay for ever, or as other rules say."""
    keep = dcp.Retention(last=4, optimizer=dcp.Keep(last=2))
    told = run(tmp_path, range(1, 7), keep, mode=mode)
    assert there(tmp_path, range(3, 7)) == ["weights", "weights", "whole", "whole"]
    assert not (tmp_path / "step-00000002").exists()
    assert told.steps("dropped") == [1, 2, 3, 4]
    first = told.events[[event.kind for event in told.events].index("dropped")]
    assert first.size_bytes > 4 * 3000 * 4
    assert told.kinds("drop_failed", "verify_failed") == []
    assert all(verify(path).findings == [] for path in tmp_path.iterdir())


def test_restore_passes_over_what_lacks_its_optimizer(tmp_path: Path) -> None:
    """As over weights that were saved before a deadline; a step that is asked for says where to find one."""
    run(tmp_path, range(1, 4), None)
    for step in (3,):
        drop(tmp_path / f"step-{step:08d}", rewrite=True)
    told = Recorder()
    with dcp.CheckpointManager(tmp_path, on_event=told, no_dist=True) as manager:
        state = full_state(0)
        restored = manager.restore(state)
        assert restored is not None
        assert (restored.step, restored.skipped_partial, state["step"]) == (2, (3,), 2)
        assert "its optimizer was dropped on" in restored.skipped[0][1]
        with pytest.raises(MissingKeyError) as caught:
            manager.restore(full_state(0), 3)
        assert caught.value.__notes__ == ["the newest step that has it is 2"]
        weights = manager.restore(full_state(0), only="app.model")
        assert weights is not None
        assert weights.step == 3
    assert told.steps("skipped_partial") == [3]


def test_a_notice_while_something_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The storage hangs in a drop, a save is written behind, and SIGTERM comes: what is saved is committed in
    time, the process may end, and the step that is being dropped from stays whole until its drop goes on."""
    gate = Gate()

    def held(store: Store, *args: Any) -> Drop:
        return drop_parts(FaultInjectingStore(store, Fault("publish", hook=gate)), *args)

    monkeypatch.setattr(post_commit, "drop_parts", held)
    monkeypatch.setattr("dcp.manager.manager._POST_COMMIT_SECONDS", 0.2)
    keep, told = dcp.Retention(optimizer=dcp.Keep(last=1)), Recorder()
    manager = dcp.CheckpointManager(
        tmp_path, keep=keep, grace_seconds=2.0, weights="app.model", on_event=told, no_dist=True
    )
    for step in (1, 2):
        manager.save(step, full_state(step))
    assert gate.reached.wait(60)
    manager.save(3, full_state(3))
    os.kill(os.getpid(), signal.SIGTERM)
    manager.save(4, full_state(4))
    assert manager.stop_requested
    manager.close()
    assert there(tmp_path, range(1, 5)) == ["whole"] * 4
    gate.open()
    assert manager._post_commit is not None
    assert manager._post_commit.wait(60)
    assert there(tmp_path, range(1, 5)) == ["weights", "weights", "weights", "whole"]
    assert told.kinds("drop_failed", "verify_failed", "failed") == []
    assert all(verify(path).findings == [] for path in tmp_path.iterdir())


def test_copies_by_links_stay_whole(tmp_path: Path) -> None:
    """A hard-linked copy of a checkpoint, as made by cp -al, has all when the other has lost a part; a
    symbolic link to it has what it has."""
    save_mixed(tmp_path / "mixed")
    save_apart(tmp_path / "apart")
    for name in ("mixed", "apart"):
        copy, link = tmp_path / f"{name}-copy", tmp_path / f"{name}-link"
        shutil.copytree(tmp_path / name, copy, copy_function=os.link)
        link.symlink_to(tmp_path / name)
        assert drop(link, rewrite=True).outcome == "dropped"
        assert (parts_there(copy), stock_sees(copy)) == ("whole", "whole")
        assert (parts_there(link), parts_there(tmp_path / name)) == ("weights", "weights")
        assert verify(copy).findings == verify(tmp_path / name).findings == []


def test_a_checkpoint_saved_before_the_rule_is_left_whole(tmp_path: Path, caplog: Any) -> None:
    """All of a rank is in one file there, which the manager does not rewrite: said once, not at each save."""
    run(tmp_path, range(1, 3), None)
    told = run(tmp_path, range(3, 6), dcp.Retention(optimizer=dcp.Keep(last=1)))
    assert there(tmp_path, range(1, 6)) == ["whole", "whole", "weights", "weights", "whole"]
    assert told.steps("dropped") == [3, 4]
    said = [record.message for record in caplog.records if "dcp prune --rewrite" in record.message]
    assert len(said) == 2


def test_a_manager_ends_what_a_killed_one_began(tmp_path: Path) -> None:
    """The files of a drop that was cut off go when the next manager here has saved."""
    keep = dcp.Retention(optimizer=dcp.Keep(last=1))
    run(tmp_path, range(1, 3), keep)
    folder = tmp_path / "step-00000001"
    found = read_commit(PosixStore(folder))
    assert found is not None
    left = folder / f"__0_1.{found.save_id}.distcp"
    left.write_bytes(b"x" * 100)
    run(tmp_path, range(3, 4), keep)
    assert not left.exists()
    assert there(tmp_path, range(1, 4)) == ["weights", "weights", "whole"]


def test_one_failure_is_told_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the next save; training goes on."""
    real, failing = drop_parts, [True]

    def once(*args: Any, **options: Any) -> Drop:
        if failing and failing.pop():
            raise OSError("the storage is away")
        return real(*args, **options)

    monkeypatch.setattr("dcp.manager.cleanup.post_commit.drop_parts", once)
    told = run(tmp_path, range(1, 4), dcp.Retention(optimizer=dcp.Keep(last=1)))
    assert told.kinds("drop_failed", "dropped") == [("drop_failed", 1), ("dropped", 1), ("dropped", 2)]
    assert "the storage is away" in (told.one("drop_failed").error or "")


def test_a_save_of_the_step_waits_for_the_drop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saved again while its optimizer is being dropped, it comes out whole."""
    real, begun = drop_parts, []

    def slow(*args: Any, **options: Any) -> Drop:
        begun.append(time.monotonic())
        while len(begun) == 1 and not waiting:
            time.sleep(0.01)
        return real(*args, **options)

    waiting: list[int] = []
    monkeypatch.setattr("dcp.manager.cleanup.post_commit.drop_parts", slow)
    keep = dcp.Retention(optimizer=dcp.Keep(last=1))
    with dcp.CheckpointManager(tmp_path, keep=keep, no_dist=True, on_failure="raise") as manager:
        manager.save(1, full_state(1))
        manager.save(2, full_state(2))
        while not begun:
            time.sleep(0.01)
        waiting.append(1)
        manager.save(1, full_state(7), force=True)
        manager.wait()
        assert manager.failures == 0
    assert parts_there(tmp_path / "step-00000001", 7) == "whole"


def test_what_a_drop_found_is_not_said_of_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step all in one file stays whole; saved anew meanwhile, its optimizer has files, and goes."""
    run(tmp_path, range(1, 2), None)
    real, begun, goes_on = drop_parts, threading.Event(), threading.Event()

    def slow(*args: Any, **options: Any) -> Drop:
        found = real(*args, **options)
        begun.set()
        goes_on.wait(60)
        return found

    monkeypatch.setattr("dcp.manager.cleanup.post_commit.drop_parts", slow)
    keep = dcp.Retention(optimizer=dcp.Keep(last=1))
    with dcp.CheckpointManager(tmp_path, keep=keep, no_dist=True, on_failure="raise") as manager:
        manager.save(2, full_state(2))
        assert begun.wait(60)
        threading.Timer(0.2, goes_on.set).start()
        manager.save(1, full_state(7), force=True)
        manager.wait()
        assert parts_there(tmp_path / "step-00000001", 7) == "whole"
        manager.save(3, full_state(3))
        manager.wait()
    assert parts_there(tmp_path / "step-00000001", 7) == "weights"


def test_a_save_in_flight_is_not_touched(tmp_path: Path) -> None:
    """While it waits to commit, older steps lose their optimizer; it comes out whole."""
    told, held = Recorder(), threading.Event()

    def hold(operation: Any) -> None:
        if not held.wait(60):
            raise AssertionError("nobody let it go on")

    def writer(checkpoint_id: str) -> dcp.FileSystemWriter:
        faults = [Fault("publish", name=MANIFEST_NAME, hook=hold)] if checkpoint_id.endswith("3") else []
        return dcp.FileSystemWriter(
            checkpoint_id, open_store=lambda path: FaultInjectingStore(PosixStore(path), *faults)
        )

    keep = dcp.Retention(optimizer=dcp.Keep(last=1))
    with dcp.CheckpointManager(
        tmp_path, keep=keep, on_event=told, no_dist=True, writer=writer, on_failure="raise"
    ) as manager:
        for step in (1, 2, 3):
            manager.save(step, full_state(step))
        deadline = time.monotonic() + 60
        while not told.steps("dropped") and time.monotonic() < deadline:
            time.sleep(0.01)
        assert told.steps("dropped") == [1]
        assert there(tmp_path, range(1, 3)) == ["weights", "whole"]
        held.set()
        assert manager.wait(60)
    assert there(tmp_path, range(1, 4)) == ["weights", "weights", "whole"]


def test_the_option_costs_one_more_file_a_rank(tmp_path: Path) -> None:
    """Which holds the optimizer and nothing else; without rules by part there is one, as ever."""
    run(tmp_path / "plain", range(1, 2), dcp.Retention(last=1))
    run(tmp_path / "apart", range(1, 2), dcp.Retention(optimizer=dcp.Keep(last=1)))
    assert [len(sizes(tmp_path / name / "step-00000001")) for name in ("plain", "apart")] == [1, 2]
    index = open_index(PosixStore(tmp_path / "apart" / "step-00000001"))
    of_file: dict[str, set[bool]] = {index.files[number]: set() for number in (0, 1)}
    for name, numbers in ((fqn, index.chunk_files[index.chunks(row)]) for row, fqn in enumerate(index.fqns)):
        for number in numbers.tolist():
            of_file[index.files[number]].add("optimizer" in name)
    assert sorted(of_file.values(), key=min) == [{False}, {True}]
    assert torch.equal(
        dcp.read(tmp_path / "apart" / "step-00000001")["app"]["model"]["w"],
        full_state(1)["app"]["model"]["w"],
    )
