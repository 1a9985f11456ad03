"""``dcp verify``: every kind of damage is found, with its place; what is whole passes."""

import os
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp
from dcp.inspection.verification import VerifyReport, verify
from dcp.storage.formats.checksums import BLOCK_BYTES
from tests.dcp.cli_support import data_file, flip, run, save_ours, save_stock, state
from tests.support.programs import Program, run_program


def only_finding(report: VerifyReport) -> Any:
    """The one finding of a report."""
    assert len(report.findings) == 1, report.findings
    return report.findings[0]


def payload_of(folder: Path, fqn: str) -> tuple[int, int]:
    """(offset, length) of a tensor's payload in a checkpoint of ours."""
    index = dcp.open_index(folder)
    chunk = index.chunks(index.position[fqn])[0]
    return int(index.payload_offsets[chunk]), int(index.payload_lengths[chunk])


@pytest.mark.parametrize("save", [save_ours, save_stock])
def test_a_whole_checkpoint_passes(tmp_path: Path, save: Callable[[Path], Path]) -> None:
    """Nothing is found, every byte of every tensor and value was compared, and the status is 0."""
    folder = save(tmp_path / "x")
    report = verify(folder)
    assert report.ok
    assert report.tensors == 5
    assert report.bytes > dcp.open_index(folder).tensor_bytes
    assert report.unchecked_bytes == 0
    done = run("verify", folder)
    assert (done.status, done.err) == (0, "")
    assert f"{folder}: ok (5 tensors, 1 file, " in done.out


def test_a_flipped_bit_is_found_at_its_block(tmp_path: Path) -> None:
    """The finding names file, tensor, and the block of the file in which the bit is."""
    big = torch.arange(3 * BLOCK_BYTES // 4 + 5, dtype=torch.int32)
    folder = save_ours(tmp_path / "x", {"small": torch.ones(3), "big": big})
    offset, length = payload_of(folder, "big")
    assert length > 3 * BLOCK_BYTES
    flip(data_file(folder), offset + 2 * BLOCK_BYTES + 17)
    finding = only_finding(verify(folder))
    assert finding.kind == "checksum"
    assert finding.file == data_file(folder).name
    assert finding.fqn == "big"
    assert (finding.offset, finding.length) == (offset + 2 * BLOCK_BYTES, BLOCK_BYTES)


def test_findings_are_printed_and_the_status_is_1(tmp_path: Path) -> None:
    """The text names file, tensor and offset; the JSON has them as fields."""
    folder = save_ours(tmp_path / "x")
    offset, length = payload_of(folder, "model.embed")
    flip(data_file(folder), offset + 1)
    done = run("verify", folder)
    assert done.status == 1
    lines = done.out.splitlines()
    assert lines[0].startswith(f"checksum: {data_file(folder).name}: 'model.embed' at byte {offset}: ")
    assert lines[-1].startswith(f"{folder}: 1 finding (")
    parsed = run("verify", folder, "--json")
    assert parsed.status == 1
    (report,) = parsed.json
    assert report["ok"] is False
    (finding,) = report["findings"]
    assert finding["kind"] == "checksum"
    assert (finding["offset"], finding["length"], finding["fqn"]) == (offset, length, "model.embed")


def flips_not_found(folder: Path, offsets: Iterable[int]) -> list[int]:
    """Those offsets of the data file at which one flipped bit leaves `verify` content."""
    path = data_file(folder)
    whole = path.read_bytes()
    missed = []
    for offset in offsets:
        flip(path, offset)
        if verify(folder, threads=1).ok:
            missed.append(offset)
        path.write_bytes(whole)
    return missed


SOME_AND_ALL = [5, pytest.param(1, marks=pytest.mark.exhaustive)]


@pytest.mark.parametrize("every", SOME_AND_ALL)
def test_every_byte_of_our_files_is_watched(tmp_path: Path, every: int) -> None:
    """A bit flipped anywhere in a data file is found: in payloads, values and the records around them."""
    folder = save_ours(tmp_path / "x", {"w": torch.ones(40), "name": "value" * 20})
    assert flips_not_found(folder, range(0, data_file(folder).stat().st_size, every)) == []


@pytest.mark.parametrize("every", SOME_AND_ALL)
def test_every_stored_byte_of_stock_files_is_watched(tmp_path: Path, every: int) -> None:
    """Wherever a bit of a stock file flips, verify reports; in payloads and values it finds it."""
    folder = save_stock(tmp_path / "x", {"w": torch.ones(40), "name": "value" * 20})
    whole = data_file(folder).read_bytes()
    payload = whole.find(torch.ones(40).numpy().tobytes())
    text = whole.find(b"value" * 20)
    assert payload > 0
    assert text > 0
    stored = {*range(payload, payload + 160), *range(text, text + 100)}
    missed = flips_not_found(folder, sorted(stored | set(range(0, len(whole), 3)))[::every])
    assert stored.isdisjoint(missed)


def test_a_truncated_file_is_found_with_the_tensors_it_costs(tmp_path: Path) -> None:
    """Both the wrong size and each unreadable payload are named; what is left is still checked."""
    folder = save_ours(tmp_path / "x", {"first": torch.ones(5000), "last": torch.ones(5000)})
    path = data_file(folder)
    offset, _ = payload_of(folder, "last")
    with path.open("r+b") as file:
        file.truncate(offset + 100)
    report = verify(folder)
    kinds = {finding.kind for finding in report.findings}
    assert "file-size" in kinds
    assert {finding.fqn for finding in report.findings if finding.kind == "unreadable"} == {"last"}
    assert report.bytes >= 20_000
    assert run("verify", folder).status == 1


def test_missing_and_stray_files_are_found(tmp_path: Path) -> None:
    """A file that the index names and a file that it does not name are findings of their own."""
    folder = save_ours(tmp_path / "x")
    path = data_file(folder)
    path.rename(folder / "__0_0.other.distcp")
    (folder / ".tmp-left").write_bytes(b"half")
    found = {finding.kind: finding.file for finding in verify(folder).findings if finding.file != ".tmp-left"}
    assert found == {"missing-file": path.name, "stray-file": "__0_0.other.distcp"}
    assert any("interrupted" in finding.message for finding in verify(folder).findings)


def test_a_stray_file_is_a_note(tmp_path: Path) -> None:
    """What a power cut brings back after it was deleted harms no checkpoint: it is told; the status is 0."""
    folder = save_ours(tmp_path / "x")
    (folder / "__0_0.01234567.distcp").write_bytes(b"old")
    report = verify(folder)
    assert report.ok and not report.faults and only_finding(report).is_note
    told = run("verify", folder)
    assert told.status == 0
    assert "note: __0_0.01234567.distcp does not belong to the checkpoint" in told.out
    assert ": ok (" in told.out and "finding" not in told.out


def test_damaged_metadata_beside_a_manifest_is_found(tmp_path: Path) -> None:
    """Stock torch would trust `.metadata`, so one that is damaged or gone is a finding."""
    folder = save_ours(tmp_path / "x")
    metadata = folder / ".metadata"
    flip(metadata, metadata.stat().st_size // 2)
    finding = only_finding(verify(folder))
    assert (finding.kind, finding.file) == ("metadata", ".metadata")
    assert "damaged" in finding.message
    metadata.unlink()
    assert "missing" in only_finding(verify(folder)).message


def test_a_save_of_stock_torch_over_ours_is_found(tmp_path: Path) -> None:
    """What stock wrote last is what is verified, and the manifest left behind is reported."""
    folder = save_ours(tmp_path / "x")
    old = data_file(folder)
    save_stock(folder, {"w": torch.ones(4)})
    report = verify(folder)
    assert report.tensors == 1
    assert {(finding.kind, finding.file) for finding in report.findings} == {
        ("metadata", "manifest.msgpack"),
        ("stray-file", old.name),
    }


def test_a_damaged_manifest_is_a_finding(tmp_path: Path) -> None:
    """The index is the first thing that is verified; without it there is nothing else to check."""
    folder = save_ours(tmp_path / "x")
    flip(folder / "manifest.msgpack", 300)
    finding = only_finding(verify(folder))
    assert finding.kind == "index"
    assert finding.file is not None
    assert finding.file.endswith("manifest.msgpack")
    assert run("verify", folder).status == 1


def test_a_damaged_record_header_is_found(tmp_path: Path) -> None:
    """We do not need the headers of our records, but stock torch does."""
    folder = save_ours(tmp_path / "x", {"w": torch.ones(16)})
    flip(data_file(folder), data_file(folder).stat().st_size - 10)  # in the end of the zip's directory
    finding = only_finding(verify(folder))
    assert finding.kind == "record"
    assert finding.fqn == "w"


def test_damage_in_a_stock_checkpoint_is_found_by_the_zip_checksum(tmp_path: Path) -> None:
    """Stock records one CRC a tensor and value: damage is found, and stock itself would have loaded it."""
    folder = save_stock(tmp_path / "x", {"w": torch.full((1000,), 3.25), "text": "abcdefgh" * 100})
    path = data_file(folder)
    whole = path.read_bytes()
    flip(path, whole.find(torch.full((1000,), 3.25).numpy().tobytes()) + 2000)
    finding = only_finding(verify(folder))
    assert (finding.kind, finding.fqn) == ("checksum", "w")
    path.write_bytes(whole)
    flip(path, whole.find(b"abcdefgh" * 100) + 5)
    finding = only_finding(verify(folder))
    assert (finding.kind, finding.fqn) == ("checksum", "text")


def test_several_checkpoints_are_all_verified(tmp_path: Path) -> None:
    """One that cannot be opened does not hide the others; failure (3) outranks findings (1)."""
    good = save_ours(tmp_path / "good")
    bad = save_ours(tmp_path / "bad")
    flip(data_file(bad), payload_of(bad, "model.embed")[0])
    done = run("verify", bad, good)
    assert done.status == 1
    assert f"{good}: ok" in done.out
    done = run("verify", tmp_path / "absent", bad, good)
    assert done.status == 3
    assert done.err.count("\n") == 1
    assert str(tmp_path / "absent") in done.err
    assert f"{bad}: 1 finding" in done.out
    assert f"{good}: ok" in done.out


def test_progress_counts_up_to_all_bytes(tmp_path: Path) -> None:
    """Progress never runs backwards and ends at the total, so that rate and time left mean something."""
    folder = save_ours(tmp_path / "x", state() | {"big": torch.zeros(5 * BLOCK_BYTES // 4)})
    calls: list[tuple[int, int]] = []
    report = verify(folder, progress=lambda done, total: calls.append((done, total)))
    assert calls == sorted(calls)
    assert calls[-1] == (report.bytes, report.bytes)
    assert len({total for _, total in calls}) == 1


def test_a_terminal_gets_a_progress_bar_and_a_pipe_does_not(tmp_path: Path) -> None:
    """Rate and time left are for people who watch: nothing of it is in a log or a script's output."""
    folder = save_ours(tmp_path / "x", {"w": torch.zeros(BLOCK_BYTES)})
    command = ["-m", "dcp", "verify", str(folder)]
    piped = run_program(*command)
    assert (piped.returncode, piped.stderr) == (0, "")
    controller, terminal = os.openpty()
    with Program(*command, stdout=subprocess.PIPE, stderr=terminal) as process:
        os.close(terminal)
        drawn = b""
        try:
            while piece := os.read(controller, 4096):
                drawn += piece
        except OSError:  # how Linux says that the other end of the terminal is closed
            pass
        out, _ = process.communicate()
    os.close(controller)
    assert out == piped.stdout
    assert folder.name.encode() in drawn
