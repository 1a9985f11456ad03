"""``dcp rm``, ``dcp gc`` and ``dcp prune``: no removal without --yes, and none of a file in use."""

import errno
import fcntl
import os
import time
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp
from tests.command_line.cli_support import Outcome, begin_deletion, data_file, run, save_dcp, save_stock
from tests.support.crashes import in_lab
from tests.support.with_optimizer import present_parts, save_apart

DAY = 86_400


def age(path: Path, seconds: float) -> Path:
    """Set the time of last write of a file this many seconds back."""
    then = time.time() - seconds
    os.utime(path, (then, then))
    return path


def content(folder: Path) -> dict[str, bytes]:
    """Return the contents of all files below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_rm_removes_files_only_with_yes(tmp_path: Path) -> None:
    """A dry run names each file and removes none; --yes removes them and the folder, and reports them."""
    folders = [save_dcp(tmp_path / "a"), save_stock(tmp_path / "b")]
    names = [f"{folder}/{path.name}" for folder in folders for path in sorted(folder.iterdir())]
    before = content(tmp_path)
    planned = run("rm", *folders)
    assert (planned.status, planned.err) == (0, "dcp: dry run, nothing removed: pass --yes to remove\n")
    assert [line for line in planned.out.splitlines() if ": would remove " not in line] == names
    assert content(tmp_path) == before
    done = run("rm", *folders, "--yes")
    assert (done.status, done.err) == (0, "")
    assert [line.split(": ")[1].split(",")[0] for line in done.out.splitlines()] == [
        "removed 3 files",
        "removed 2 files",
    ]
    assert not any(folder.exists() for folder in folders)


def test_rm_leaves_other_files_and_pinned_checkpoints(tmp_path: Path) -> None:
    """A user's file keeps its folder, and a pin its checkpoint, with a report; others are removed."""
    own, pinned, plain = (save_dcp(tmp_path / f"step-0000000{step}") for step in (1, 2, 3))
    (own / "notes.txt").write_text("mine")
    with dcp.CheckpointManager(tmp_path, no_dist=True) as manager:
        manager.pin(2)
    for arguments in ([], ["--yes"]):
        done = run("rm", own, pinned, plain, *arguments)
        assert done.status == 3
        assert f"{pinned} is pinned" in done.err
        assert "1 other files stay" in done.out
    assert content(own) == {"notes.txt": b"mine"}
    assert run("verify", pinned).status == 0
    assert not plain.exists()


def test_rm_of_a_folder_without_a_commit_fails(tmp_path: Path) -> None:
    """A folder without a commit is not changed, and the JSON lists the removed checkpoints."""
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "__0_0.distcp").write_bytes(b"data")
    torch.save({"w": torch.ones(2)}, tmp_path / "model.pt")
    whole = save_dcp(tmp_path / "whole")
    done = run("rm", tmp_path / "x", tmp_path / "absent", tmp_path / "model.pt", whole, "--yes", "--json")
    assert done.status == 3
    assert done.err.count("\n") == 3
    assert "absent holds no checkpoint: it does not exist" in done.err
    (row,) = done.json
    assert (row["url"], row["removed"], row["files"]) == (str(whole), True, 3)
    assert content(tmp_path).keys() == {"x/__0_0.distcp", "model.pt"}


def make_leftovers(root: Path) -> set[str]:
    """Make whole checkpoints and all kinds of leftovers below ``root``. Return the removable files."""
    for name in ("step-1", "step-2"):
        save_dcp(root / name, {"w": torch.ones(100)})
    save_stock(root / "step-3", {"w": torch.ones(100)})
    for name in content(root):
        age(root / name, 3 * DAY)
    old = {
        "step-1/__0_0.0123abcd.distcp": 2 * DAY,  # a killed save over it
        "step-1/.tmp-0123456789abcdef0123456789abcdef": 2 * DAY,
        "step-3/.metadata.tmp": 2 * DAY,
        "killed/__0_0.0123abcd.distcp": 2 * DAY,
        "killed/__1_0.0123abcd.distcp": 3 * DAY,
    }
    young = {
        "step-2/__0_0.0123abcd.distcp": 60.0,  # a running save
        "step-2/__1_0.0123abcd.distcp": 2 * DAY,  # the same save
        "running/__0_0.0123abcd.distcp": 60.0,
        "running/__1_0.0123abcd.distcp": 2 * DAY,
        "step-1/readme.txt": 9 * DAY,
        "other/data.distcp.txt": 9 * DAY,
        "step-3/model.safetensors": 9 * DAY,
    }
    for name, seconds in (old | young).items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(b"remains")
        age(root / name, seconds)
    return set(old)


def _collected_beside_a_refusal(root: Path) -> Outcome:
    """Run ``dcp gc`` while removals in one of the folders fail."""
    unlink = os.unlink

    def refusing(path: Any, **options: Any) -> None:
        if "step-1/" in str(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        unlink(path, **options)

    os.unlink = refusing
    return run("gc", root, "--yes", "--json")


def test_gc_continues_after_failed_removals(tmp_path: Path) -> None:
    """A folder with failing removals is an error, and the other folders are cleared."""
    make_leftovers(tmp_path)
    done = in_lab(_collected_beside_a_refusal, tmp_path)
    assert (done.status, done.err.count("\n")) == (3, 1)
    assert str(tmp_path / "step-1") in done.err and "Permission denied" in done.err
    assert {Path(row["url"]).name: row["removed"] for row in done.json} == {"killed": True, "step-3": True}
    assert not (tmp_path / "killed").exists()


def test_gc_removes_only_what_no_checkpoint_uses(tmp_path: Path) -> None:
    """After a dry run, --yes removes old files that no checkpoint uses; all checkpoints still load."""
    gone = make_leftovers(tmp_path)
    before = content(tmp_path)
    planned = run("gc", tmp_path)
    assert planned.status == 0
    assert "pass --yes" in planned.err
    assert f"{tmp_path}: would remove 5 files, 35 B" in planned.out
    assert all(f"  {Path(name).name}\n" in planned.out for name in gone)
    assert content(tmp_path) == before
    done = run("gc", tmp_path, "--yes", "--json")
    assert (done.status, done.err) == (0, "")
    found = {f"{Path(row['url']).name}/{name}" for row in done.json for name in row["files"]}
    assert found == gone
    assert content(tmp_path) == {name: data for name, data in before.items() if name not in gone}
    assert not (tmp_path / "killed").exists()
    for step in ("step-1", "step-2", "step-3"):
        state = {"w": torch.zeros(100)}
        dcp.load(state, checkpoint_id=tmp_path / step, no_dist=True)
        assert state["w"].sum() == 100
    again = run("gc", tmp_path, "--yes")
    assert (again.status, again.out) == (0, f"{tmp_path}: removed 0 files, 0 B\n")


def test_gc_hours_sets_the_age_of_removed_files(tmp_path: Path) -> None:
    """``--hours`` removes younger files, also of the checkpoint that is named itself."""
    folder = save_dcp(tmp_path / "x")
    age(folder / data_file(folder).name, DAY)
    (folder / "__3_0.0123abcd.distcp").write_bytes(b"half")
    age(folder / "__3_0.0123abcd.distcp", 3600)
    assert "would remove 0 files" in run("gc", folder).out
    assert "removed 1 file," in run("gc", folder, "--hours", "0.5", "--yes").out
    assert run("verify", folder).status == 0


def test_gc_finishes_a_removal(tmp_path: Path) -> None:
    """A removal that was killed after it removed the commit is finished, whatever the age of the files."""
    folder = save_dcp(tmp_path / "x")
    begin_deletion(folder)
    for name in ("manifest.msgpack", ".metadata"):
        (folder / name).unlink()
    assert "removed 2 files" in run("gc", tmp_path, "--yes").out
    assert not folder.exists()


@pytest.mark.parametrize("folder", ["", "run"])
def test_gc_removes_old_work_folders_of_conversions(folder: str, tmp_path: Path) -> None:
    """The work folder of a killed conversion, also in a sub-folder, is removed when old and not in use."""
    work = tmp_path / folder / ".tmp-convert-0123456789abcdef"
    (work / "output").mkdir(parents=True)
    (work / "output" / "model.pt").write_bytes(b"half")
    (work / "ledger").write_bytes(b"")
    for path in (work / "output" / "model.pt", work / "ledger"):
        age(path, 3600)
    assert "would remove 0 files" in run("gc", tmp_path).out
    with (work / "ledger").open("r+b") as ledger:
        fcntl.flock(ledger, fcntl.LOCK_EX)
        held = run("gc", tmp_path, "--hours", "0.5", "--yes")
        assert (held.status, held.err) == (0, "")
        assert "not removed, because in use" in held.out
        assert "removed 0 files" in held.out
        assert (work / "output" / "model.pt").read_bytes() == b"half"
    done = run("gc", tmp_path, "--hours", "0.5", "--yes")
    assert (done.status, done.err) == (0, "")
    assert "  output/model.pt\n" in done.out
    assert not work.exists()


def test_gc_removes_nothing_beside_damaged_manifests(tmp_path: Path) -> None:
    """Beside a damaged manifest the files in use are unknown, so gc reports and removes no file."""
    make_leftovers(tmp_path)
    age(tmp_path / "step-1" / "manifest.msgpack", 3 * DAY).write_bytes(b"damaged")
    before = content(tmp_path / "step-1")
    done = run("gc", tmp_path, "--yes")
    assert done.status == 0
    assert "step-1: not removed" in done.err
    assert content(tmp_path / "step-1") == before
    assert not (tmp_path / "killed").exists()


def test_prune_drops_the_optimizer_only_with_yes(tmp_path: Path) -> None:
    """prune drops the optimizer of the older steps of a run, or of one checkpoint. A dry run lists the bytes
    to be freed, and changes no file."""
    for step in (5, 10, 15):
        save_apart(tmp_path / f"step-{step}", step)
    save_dcp(tmp_path)
    assert run("ls", tmp_path).out.startswith(f"{tmp_path}: 4 checkpoints")
    assert "absent holds no checkpoint: it does not exist" in run("prune", tmp_path / "absent").err
    assert "to drop: no name matches x.*" in run("prune", tmp_path / "step-5", "--part", "x.*").out
    (tmp_path / "logs").mkdir()
    before = content(tmp_path)
    planned = run("prune", tmp_path, "--last", "1")
    assert (planned.status, planned.err) == (0, "dcp: dry run, nothing dropped: pass --yes to drop\n")
    assert planned.out.count("would drop optimizer, 1 file, ") == 2
    assert run("prune", tmp_path, "--last", "1", "--yes", "--dry-run").out == planned.out
    rows = run("prune", tmp_path, "--last", "1", "--json").json
    assert [(row["outcome"], row["done"]) for row in rows] == [("would drop", False)] * 2
    assert content(tmp_path) == before
    done = run("prune", tmp_path, "--last", "1", "--yes")
    assert (done.status, done.err) == (0, "")
    assert done.out == planned.out.replace("would drop", "dropped")
    found = [present_parts(tmp_path / f"step-{step}", step) for step in (5, 10, 15)]
    assert found == ["weights", "weights", "whole"]
    assert run("prune", tmp_path, "--last", "1", "--yes").out == f"{tmp_path}: nothing to drop\n"
    assert "optimizer was dropped on" in run("show", tmp_path / "step-5").out
    (row,) = run("prune", tmp_path / "step-5", "--json", "--yes").json
    assert (row["outcome"], row["done"], row["freed_bytes"]) == ("absent", False, 0)
    assert run("verify", tmp_path / "step-5").status == 0


def facts(folder: Path) -> dict[str, Any]:
    """Return digests in the manifest and values of all entries, by name."""
    listed = run("digest", folder, "--json").json
    assert listed["bytes_read"] == 0 and run("verify", folder).status == 0
    values = run("show", folder, "--objects", "--json").json["objects"]
    return {row["fqn"]: row["digest"] for row in listed["tensors"]} | {
        row["fqn"]: row["value"] for row in values
    }


@pytest.mark.parametrize("parts", [["a"], ["a.tied", "c.7*"], ["a.w", "b.scalar", "c.lr"], ["*.none", "b"]])
def test_prune_keeps_the_other_tensors_unchanged(tmp_path: Path, parts: list[str]) -> None:
    """Remaining tensors, also tied, transposed and empty ones, keep their digests, values are equal, and
    files with a remaining entry stay."""
    weight, turned = torch.arange(12.0).view(3, 4), torch.arange(6).view(2, 3).t()
    state: dict[str, Any] = {
        "a": {"w": weight, "tied": weight, "turned": turned, "none": torch.zeros(0, 2)},
        "b": {"scalar": torch.tensor(3), "half": torch.ones(5, dtype=torch.bfloat16), "lr": 0.1, "empty": {}},
        "c": {"lr": 0.1, "name": "x", 7: {"deep": torch.ones(2)}},
    }
    writer = dcp.FileSystemWriter(tmp_path, single_file_per_rank=False, digests=True)
    dcp.save(state, storage_writer=writer, no_dist=True)
    before = facts(tmp_path)
    globs = [word for part in parts for word in ("--part", part)]
    assert run("prune", tmp_path, *globs, "--rewrite", "--yes").status == 0
    gone = {name for name in before for part in parts if fnmatch(name, part) or name.startswith(f"{part}.")}
    assert gone and facts(tmp_path) == {name: fact for name, fact in before.items() if name not in gone}
    assert {*dcp.open_index(tmp_path).files} == {path.name for path in tmp_path.glob("*.distcp")}
