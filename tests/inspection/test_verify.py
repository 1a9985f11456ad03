"""``dcp verify``: each kind of damage is found and located, and an undamaged checkpoint passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp
from tests.command_line.cli_support import (
    BLOCK_BYTES,
    data_file,
    flip,
    payload_of,
    run,
    save_dcp,
    save_stock,
)

Save = Callable[..., Path]


def report_of(folder: Path) -> Any:
    """Return the report as JSON, and assert that the status agrees."""
    ran = run("verify", folder, "--json")
    (report,) = ran.json
    assert ran.status == (0 if report["ok"] else 1), ran.err
    assert [*report][:2] == ["url", "ok"]
    return report


def findings(folder: Path) -> list[Any]:
    """Return the findings."""
    return list(report_of(folder)["findings"])


def only_finding(folder: Path) -> Any:
    """Return the only finding."""
    (finding,) = findings(folder)
    return finding


@pytest.mark.parametrize("save", [save_dcp, save_stock])
def test_a_whole_checkpoint_passes(tmp_path: Path, save: Save) -> None:
    """An undamaged checkpoint has no findings, and all bytes of tensors and values are compared."""
    folder = save(tmp_path / "x")
    report = report_of(folder)
    assert (report["findings"], report["tensors"], report["unchecked_bytes"]) == ([], 5, 0)
    assert report["bytes"] > dcp.open_index(folder).tensor_bytes
    done = run("verify", folder)
    assert (done.status, done.err) == (0, "")
    assert f"{folder}: ok (5 tensors, 1 file, " in done.out


@pytest.mark.parametrize("block", [0, 2, 3])
def test_a_flipped_bit_is_found_at_its_block(tmp_path: Path, block: int) -> None:
    """The finding names file, tensor and block of the flipped bit, also in the last block."""
    big = torch.arange(3 * BLOCK_BYTES // 4 + 5, dtype=torch.int32)
    folder = save_dcp(tmp_path / "x", {"small": torch.ones(3), "big": big})
    offset, length = payload_of(folder, "big")
    flip(data_file(folder), offset + block * BLOCK_BYTES + 17)
    finding = only_finding(folder)
    assert (finding["kind"], finding["file"], finding["fqn"]) == ("checksum", data_file(folder).name, "big")
    begin = block * BLOCK_BYTES
    assert (finding["offset"], finding["length"]) == (offset + begin, min(BLOCK_BYTES, length - begin))


def test_each_of_several_files_is_read(tmp_path: Path) -> None:
    """Damage in the first, a middle and the last file is found by one verification."""
    state = {f"w{number}": torch.full((500,), float(number)) for number in range(6)}
    writer = dcp.FileSystemWriter(tmp_path, single_file_per_rank=False, sync_files=False)
    dcp.save(state, storage_writer=writer, no_dist=True)
    index = dcp.open_index(tmp_path)
    for name in ("w0", "w3", "w5"):
        chunk = index.chunks(index.position[name])[0]
        flip(tmp_path / index.files[int(index.chunk_files[chunk])], payload_of(tmp_path, name)[0] + 40)
    assert {finding["fqn"] for finding in findings(tmp_path)} == {"w0", "w3", "w5"}


def flips_not_found(folder: Path, offsets: Iterable[int]) -> list[int]:
    """Return the offsets of the data file at which a flipped bit is not found."""
    path = data_file(folder)
    whole = path.read_bytes()
    missed = []
    for offset in offsets:
        flip(path, offset)
        if run("verify", folder).status == 0:
            missed.append(offset)
        path.write_bytes(whole)
    return missed


SOME_AND_ALL = [11, pytest.param(1, marks=pytest.mark.exhaustive)]


@pytest.mark.parametrize("every", SOME_AND_ALL)
def test_a_flip_of_any_byte_is_found(tmp_path: Path, every: int) -> None:
    """A bit flipped anywhere in a data file is found: in payloads, values and records."""
    folder = save_dcp(tmp_path / "x", {"w": torch.ones(40), "name": "value" * 20})
    assert flips_not_found(folder, range(0, data_file(folder).stat().st_size, every)) == []


def test_a_truncated_file_is_found_with_its_lost_tensors(tmp_path: Path) -> None:
    """The wrong size and each unreadable payload are findings, and the rest is still checked."""
    folder = save_dcp(tmp_path / "x", {"first": torch.ones(5000), "last": torch.ones(5000)})
    with data_file(folder).open("r+b") as file:
        file.truncate(payload_of(folder, "last")[0] + 100)
    report = report_of(folder)
    assert "file-size" in {finding["kind"] for finding in report["findings"]}
    unreadable = {finding["fqn"] for finding in report["findings"] if finding["kind"] == "unreadable"}
    assert unreadable == {"last"} and report["bytes"] >= 20_000


def test_missing_and_stray_files_are_found(tmp_path: Path) -> None:
    """A missing file of the index and an unknown file are separate findings."""
    folder = save_dcp(tmp_path / "x")
    path = data_file(folder)
    path.rename(folder / "__0_0.other.distcp")
    (folder / ".tmp-left").write_bytes(b"half")
    found = {finding["file"]: finding for finding in findings(folder)}
    assert found[path.name]["kind"] == "missing-file"
    assert found["__0_0.other.distcp"]["kind"] == found[".tmp-left"]["kind"] == "stray-file"
    assert "interrupted" in found[".tmp-left"]["message"]


def test_a_stray_file_is_a_note(tmp_path: Path) -> None:
    """A deleted file restored by a power cut is a note, and the status is 0."""
    folder = save_dcp(tmp_path / "x")
    (folder / "__0_0.01234567.distcp").write_bytes(b"old")
    assert report_of(folder)["ok"]
    ran = run("verify", folder)
    assert "note: __0_0.01234567.distcp does not belong to the checkpoint" in ran.out
    assert ran.status == 0 and ": ok (" in ran.out and "finding" not in ran.out


def test_damaged_metadata_beside_a_manifest_is_found(tmp_path: Path) -> None:
    """Stock torch would read `.metadata`, so a damaged or missing `.metadata` is a finding."""
    folder = save_dcp(tmp_path / "x")
    metadata = folder / ".metadata"
    flip(metadata, metadata.stat().st_size // 2)
    finding = only_finding(folder)
    assert (finding["kind"], finding["file"]) == ("metadata", ".metadata")
    assert "damaged" in finding["message"]
    metadata.unlink()
    assert "missing" in only_finding(folder)["message"]


def test_a_save_of_stock_torch_over_dcp_is_found(tmp_path: Path) -> None:
    """The later save of stock torch is verified, and the old manifest is a finding."""
    folder = save_dcp(tmp_path / "x")
    old = data_file(folder).name
    save_stock(folder, {"w": torch.ones(4)})
    report = report_of(folder)
    assert report["tensors"] == 1
    found = {(finding["kind"], finding["file"]) for finding in report["findings"]}
    assert found == {("metadata", "manifest.msgpack"), ("stray-file", old)}


def test_damage_in_a_stock_checkpoint_is_found_by_crc(tmp_path: Path) -> None:
    """Damage in a stock checkpoint is found by the zip's CRCs, which stock torch does not check."""
    folder = save_stock(tmp_path / "x", {"w": torch.full((1000,), 3.25), "text": "abcdefgh" * 100})
    path = data_file(folder)
    whole = path.read_bytes()
    for content, fqn in ((torch.full((1000,), 3.25).numpy().tobytes(), "w"), (b"abcdefgh" * 100, "text")):
        flip(path, whole.find(content) + 500)
        finding = only_finding(folder)
        assert (finding["kind"], finding["fqn"]) == ("checksum", fqn)
        path.write_bytes(whole)


def test_damage_in_a_file_of_torch_save_is_found(tmp_path: Path) -> None:
    """A flipped bit in a storage is found in whole tensors and in views; a truncated file has no index."""
    path = tmp_path / "model.pt"
    state = {"w": torch.arange(1000.0), "view": torch.arange(5000.0)[100:200], "ok": torch.ones(3)}
    torch.save(state, path)
    assert report_of(path)["ok"] and report_of(path)["unchecked_bytes"] == 0
    index = dcp.open_index(path)
    for fqn in ("w", "view"):
        flip(path, int(index.record_offsets[index.position[fqn]]) + 77)
    assert {(finding["kind"], finding["fqn"]) for finding in findings(path)} == {
        ("checksum", "w"),
        ("checksum", "view"),
    }
    dcp.load({"ok": torch.zeros(3)}, checkpoint_id=path)
    with pytest.raises(dcp.CorruptCheckpointError, match="'w' is damaged"):
        dcp.load({"w": torch.zeros(1000)}, checkpoint_id=path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert [finding["kind"] for finding in findings(path)] == ["index"]


def test_several_checkpoints_are_all_verified(tmp_path: Path) -> None:
    """A checkpoint that cannot be opened does not hide the others; failure (3) outranks findings (1)."""
    good, bad = save_dcp(tmp_path / "good"), save_dcp(tmp_path / "bad")
    flip(data_file(bad), payload_of(bad, "model.embed")[0])
    done = run("verify", bad, good)
    assert done.status == 1 and f"{good}: ok" in done.out
    done = run("verify", tmp_path / "absent", bad, good)
    assert (done.status, done.err.count("\n")) == (3, 1)
    assert str(tmp_path / "absent") in done.err
    assert f"{bad}: 1 finding" in done.out and f"{good}: ok" in done.out
