"""Dropping a part of a checkpoint, by rules or by ``dcp prune``: the rest stays unchanged."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import dcp
from dcp.errors import CheckpointConflictError, MissingKeyError
from tests.support.command import run as command
from tests.support.manager_runs import Fault, Gate, Recorder, WatchedRoot, flip, manager_of
from tests.support.values import leaves
from tests.support.with_optimizer import (
    full_state,
    present_parts,
    save_apart,
    save_mixed,
    save_stock,
    stock_sees,
)

OPTIMIZER = dcp.Retention(optimizer=dcp.Keep(last=1))


def prune(folder: Path | str, *options: str) -> dict[str, Any]:
    """Run ``dcp prune --yes``, and return its report."""
    (done,) = command("prune", folder, "--yes", *options, "--json").json
    assert isinstance(done, dict)
    return done


def pruned(folder: Path, _: object) -> None:
    """Drop the optimizer, as a hook."""
    prune(folder)


def sizes(folder: Path) -> dict[str, int]:
    """Return the size of each data file in bytes."""
    return {path.name: path.stat().st_size for path in folder.glob("*.distcp")}


def is_sound(folder: Path) -> bool:
    """Return whether ``dcp verify`` passes and every data file belongs to the checkpoint."""
    return command("verify", folder).status == 0 and set(dcp.open_index(folder).files) == sizes(folder).keys()


def run(root: Path | str, steps: range, keep: dcp.Retention | None, **options: Any) -> Recorder:
    """Save these steps, and return the events."""
    seen = Recorder()
    with manager_of(root, keep=keep, on_event=seen, handle_sigterm=False, **options) as manager:
        for step in steps:
            manager.save(step, full_state(step))
            manager.wait()
    return seen


def parts_by_step(root: Path, steps: range) -> list[str]:
    """Return which parts each step has."""
    return [present_parts(root / f"step-{step:08d}", step) for step in steps]


# -- one checkpoint ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("torch_compatible", [True, False])
def test_separate_files_of_an_optimizer_are_deleted(tmp_path: Path, torch_compatible: bool) -> None:
    """An optimizer in separate files is dropped by deleting them; the freed bytes are those of the
    preview."""
    save_apart(tmp_path, torch_compatible=torch_compatible)
    before = sizes(tmp_path)
    inodes = {path.name: path.stat().st_ino for path in tmp_path.glob("*.distcp")}
    (planned,) = command("prune", tmp_path, "--json").json
    assert sizes(tmp_path) == before
    done = prune(tmp_path)
    assert (done["outcome"], done["files"], done["freed_bytes"]) == (
        "dropped",
        planned["files"],
        planned["freed_bytes"],
    )
    (gone,) = done["files"]
    assert before.keys() - sizes(tmp_path).keys() == {gone} and done["freed_bytes"] == before[gone]
    (kept,) = tmp_path.glob("*.distcp")
    assert kept.stat().st_ino == inodes[kept.name]
    assert present_parts(tmp_path) == "weights" and is_sound(tmp_path)
    assert not torch_compatible or stock_sees(tmp_path) == "weights"
    assert command("prune", tmp_path, "--yes").out.endswith(": nothing to drop\n")


@pytest.mark.parametrize("save", [save_mixed, save_stock])
def test_a_shared_file_stays_without_rewrite(tmp_path: Path, save: Callable[[Path], None]) -> None:
    """A file with both parts stays unless ``--rewrite`` is given. A rewrite keeps an aligned copy of the
    other part, and reports exactly the freed bytes."""
    save(tmp_path)
    before = sizes(tmp_path)
    done = prune(tmp_path)
    assert (done["outcome"], done["freed_bytes"], sizes(tmp_path)) == ("shared", 0, before)
    assert present_parts(tmp_path) == stock_sees(tmp_path) == "whole"
    (listed,) = command("prune", tmp_path, "--rewrite", "--json").json
    done = prune(tmp_path, "--rewrite")
    left = sum(sizes(tmp_path).values())
    assert done == listed | {"outcome": "dropped", "done": True, "parts": done["parts"]}
    assert (done["freed_bytes"], done["rewritten_bytes"]) == (sum(before.values()) - left, left)
    assert present_parts(tmp_path) == stock_sees(tmp_path) == "weights" and is_sound(tmp_path)
    index = dcp.open_index(tmp_path)
    large = index.payload_lengths >= 4096
    assert large.any()
    assert save is save_stock or (index.payload_offsets[large] % 64 == 0).all()


def test_show_and_load_name_the_dropped_part(tmp_path: Path) -> None:
    """``dcp show`` and the error of a load name the dropped part. Names, digests and commit time stay, as
    does a weight with a name like an optimizer's."""
    save_apart(tmp_path, digests=True)
    before = dcp.open_index(tmp_path)
    digests = {name: before.digest(row) for row, name in enumerate(before.fqns)}
    committed = command("show", tmp_path, "--json").json["checkpoint"]["committed_seconds"]
    prune(tmp_path)
    index, shown = dcp.open_index(tmp_path), command("show", tmp_path, "--json").json["checkpoint"]
    assert shown["committed_seconds"] == committed
    assert [(part["name"], part["tensors"], part["objects"]) for part in shown["dropped"]] == [
        ("optimizer", 6, 3)
    ]
    names = {f"app.model.{name}" for name, _ in leaves(full_state()["app"]["model"])}
    assert {name: index.digest(row) for row, name in enumerate(index.fqns)} == {n: digests[n] for n in names}
    with pytest.raises(MissingKeyError, match=r"optimizer was dropped on 20\d\d-"):
        dcp.load(full_state(0), checkpoint_id=tmp_path, no_dist=True)
    found = dcp.read(tmp_path)
    assert (set(found), set(found["app"])) == ({"app", "step"}, {"model"})


def test_any_part_but_not_all_may_be_dropped(tmp_path: Path) -> None:
    """Any part may be dropped by a glob, also values that are no tensors; at least one tensor must stay."""
    save_mixed(tmp_path)
    for glob in ("app.model.optim_head*", "step"):
        assert prune(tmp_path, "--part", glob, "--rewrite")["outcome"] == "dropped"
    index = dcp.open_index(tmp_path)
    assert not any(name == "step" or "optim_head" in name for name in [*index.fqns, *index.objects.fqns])
    dropped = command("show", tmp_path, "--json").json["checkpoint"]["dropped"]
    assert [part["name"] for part in dropped] == ["app.model.optim_head*", "step"] and is_sound(tmp_path)
    refused = command("prune", tmp_path, "--part", "*", "--yes")
    assert refused.status != 0 and "would leave no tensor" in refused.err


def test_pinned_steps_and_saves_without_collectives_stay(tmp_path: Path) -> None:
    """A pinned step, and a checkpoint saved without collectives (no single commit), are not changed."""
    alone, pinned = tmp_path / "alone", tmp_path / "run"
    dcp.save(full_state(), checkpoint_id=alone, use_collectives=False, no_dist=True)
    refused = command("prune", alone, "--yes")
    assert refused.status != 0 and "saved without collectives" in refused.err
    with manager_of(pinned, mode="sync", keep=OPTIMIZER) as manager:
        for step in (1, 2, 3):
            manager.save(step, full_state(step))
            if step == 1:
                manager.wait()
                manager.pin(1)
        assert manager.wait(240)
    assert parts_by_step(pinned, range(1, 4)) == ["whole", "weights", "whole"]


def test_a_rewrite_copies_no_damage(tmp_path: Path) -> None:
    """A rewrite checks the data against its checksums; if they differ, the checkpoint stays unchanged."""
    save_mixed(tmp_path)
    index = dcp.open_index(tmp_path)
    chunk = index.chunks(index.position["app.model.w"])[0]
    (file,) = tmp_path.glob("*.distcp")
    flip(file, int(index.payload_offsets[chunk]) + 5)
    refused = command("prune", tmp_path, "--rewrite", "--yes")
    assert refused.status != 0 and "nothing is dropped" in refused.err
    assert list(tmp_path.glob("*.distcp")) == [file]
    assert "app.optimizer.state.0.exp_avg" in dcp.open_index(tmp_path).fqns


# -- concurrent saves and reads ------------------------------------------------------------------------------


def watched(folder: Path, *faults: Fault) -> str:
    """Return the URL of the checkpoint step-00000001 in a folder, with faults in its storage."""
    root = WatchedRoot(folder)
    root.store(1).add(*faults)
    return f"{root.url}/{root.path(1).name}"


@pytest.mark.parametrize("rewrite", [False, True])
def test_a_save_committed_during_a_drop_wins(tmp_path: Path, rewrite: bool) -> None:
    """If a save commits during a drop, the drop fails, the save is whole, and no file is left over."""
    folder = WatchedRoot(tmp_path).path(1)
    (save_mixed if rewrite else save_apart)(folder)
    overtaken = Fault("lock", hook=lambda _: save_apart(folder, 2))
    refused = command("prune", watched(tmp_path, overtaken), "--yes", *["--rewrite"][: int(rewrite)])
    assert refused.status != 0
    assert present_parts(folder, 2) == stock_sees(folder, 2) == "whole" and is_sound(folder)


def test_a_save_overtaken_by_a_drop_fails(tmp_path: Path) -> None:
    """If a drop commits during a save, the save fails, its files are removed, and the weights load."""
    folder = WatchedRoot(tmp_path).path(1)
    save_apart(folder)
    url = watched(tmp_path, Fault("create", name="*.distcp", hook=partial(pruned, folder)))
    with pytest.raises(CheckpointConflictError, match="another writer published"):
        save_apart(url, 2)
    assert present_parts(folder) == "weights" and is_sound(folder)


def test_a_load_overtaken_by_a_drop_retries(tmp_path: Path) -> None:
    """If a drop commits during a load, weights still load; a load of the optimizer says it was dropped."""
    for name in ("a", "b"):
        root = WatchedRoot(tmp_path / name)
        save_apart(root.path(1))
        url = watched(
            tmp_path / name, Fault("open_read", name="*.distcp", hook=partial(pruned, root.path(1)))
        )
        if name == "a":
            with pytest.raises(MissingKeyError, match="optimizer was dropped"):
                dcp.load(full_state(0), checkpoint_id=url, no_dist=True)
        else:
            report = dcp.load(full_state(0), checkpoint_id=url, only="app.model", no_dist=True)
            assert report.unexpected == []


# -- a run ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["thread", "sync", pytest.param("process", marks=pytest.mark.exhaustive)])
def test_old_steps_lose_their_optimizer(tmp_path: Path, mode: str) -> None:
    """Only the newest steps keep their optimizer; each drop is an event; other rules keep the weights."""
    keep = dcp.Retention(last=4, optimizer=dcp.Keep(last=2))
    seen = run(tmp_path, range(1, 7), keep, mode=mode)
    assert parts_by_step(tmp_path, range(3, 7)) == ["weights", "weights", "whole", "whole"]
    assert not (tmp_path / "step-00000002").exists()
    assert seen.steps("dropped") == [1, 2, 3, 4]
    first = next(event for event in seen.events if event.kind == "dropped")
    assert first.size_bytes > 4 * 3000 * 4
    assert seen.kinds("drop_failed", "verify_failed") == []
    assert all(is_sound(path) for path in tmp_path.iterdir())


def test_restore_skips_a_step_without_its_optimizer(tmp_path: Path) -> None:
    """`restore` skips a step without its optimizer. A request for that step names one that has it, and
    weights alone are restored from the newest."""
    run(tmp_path, range(1, 4), None)
    prune(tmp_path / "step-00000003", "--rewrite")
    seen = Recorder()
    with manager_of(tmp_path, on_event=seen) as manager:
        state = full_state(0)
        restored = manager.restore(state)
        assert restored is not None
        assert (restored.step, restored.skipped_partial, state["step"]) == (2, (3,), 2)
        assert "its optimizer was dropped on" in restored.skipped[0][1]
        with pytest.raises(MissingKeyError) as caught:
            manager.restore(full_state(0), 3)
        assert caught.value.__notes__[1:] == ["the newest step that has it is 2"]
        weights = manager.restore(full_state(0), only="app.model")
        assert weights is not None and weights.step == 3
    assert seen.steps("skipped_partial") == [3]


def test_steps_from_before_the_rule_stay_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Steps saved before the rule have one file per rank, and the manager does not rewrite it: logged once a
    step. A step saved again under the rule has separate optimizer files, and they are dropped."""
    run(tmp_path, range(1, 3), None)
    seen = run(tmp_path, range(3, 6), OPTIMIZER)
    assert parts_by_step(tmp_path, range(1, 6)) == ["whole", "whole", "weights", "weights", "whole"]
    assert seen.steps("dropped") == [3, 4]
    assert len([text for text in caplog.messages if "dcp prune --rewrite" in text]) == 2
    with manager_of(tmp_path, keep=OPTIMIZER) as manager:
        manager.save(1, full_state(1), force=True)
        manager.save(6, full_state(6), force=True)
    assert parts_by_step(tmp_path, range(1, 3)) == ["weights", "whole"]


def test_a_failed_drop_is_retried_after_the_next_save(tmp_path: Path) -> None:
    """A failed drop is an event and is retried after the next save, with files of interrupted drops."""
    root = WatchedRoot(tmp_path)
    run(root.url, range(1, 2), OPTIMIZER)
    left = root.path(1) / f"__0_7.{dcp.open_index(root.path(1)).provenance['save_id']}.distcp"
    root.store(1).add(Fault("publish", name="manifest.msgpack", error=OSError("the storage is away")))
    seen = run(root.url, range(2, 4), OPTIMIZER)
    left.write_bytes(b"x" * 100)
    assert seen.kinds("drop_failed", "dropped") == [("drop_failed", 1), ("dropped", 1), ("dropped", 2)]
    assert "the storage is away" in str(seen.one("drop_failed").error)
    run(root.url, range(4, 5), OPTIMIZER)
    assert not left.exists() and parts_by_step(tmp_path, range(1, 5)) == [*["weights"] * 3, "whole"]


def test_a_save_of_the_step_waits_for_its_drop(tmp_path: Path) -> None:
    """A save of a step waits for the drop in progress, and the new checkpoint is whole."""
    root, gate, seen = WatchedRoot(tmp_path), Gate(), Recorder()
    futures: list[Any] = []
    with manager_of(root.url, keep=OPTIMIZER, on_event=seen, on_failure="raise") as manager:
        manager.save(1, full_state(1))
        assert manager.wait(240)
        root.store(1).add(Fault("publish", name="manifest.msgpack", hook=gate))
        manager.save(2, full_state(2))
        gate.wait_until_reached()
        again = threading.Thread(target=lambda: futures.append(manager.save(1, full_state(7), force=True)))
        again.start()
        again.join(0.5)
        if futures:  # the save did not wait: let it end first
            futures[0].exception(240)
        gate.open()
        again.join(240)
        assert manager.wait(240)
        assert (manager.failures, seen.steps("drop_failed")) == (0, [])
    assert present_parts(root.path(1), 7) == "whole"
