"""Damaged files of a checkpoint: a load returns the saved bytes or raises a typed error."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save as stock_save

import dcp
from dcp.errors import CheckpointFormatError, CorruptCheckpointError, PlanError
from tests.support.fault_doors import verified
from tests.support.values import leaves, raw
from tests.support.versions import save_version, seen_by_dcp

TYPED = (CorruptCheckpointError, CheckpointFormatError, PlanError)
LARGE = 3 << 18
"""Number of 4-byte elements: three blocks, each with its own checksum."""


def _contents(factor: int = 1) -> dict[str, Any]:
    return {
        "w": torch.arange(15.0).reshape(3, 5) * factor + factor,
        "half": torch.full((7,), factor, dtype=torch.bfloat16),
        "step": 11 * factor,
        "lr": [0.1 * factor, "warm" * factor],
        "schedule": OrderedDict(at=12 * factor),
        "shape": torch.Size((13 * factor, 2)),
        "nested": {"count": torch.tensor(5 * factor)},
    }


def _differs(state: dict[str, Any]) -> bool:
    got, wanted = dict(leaves(state)), dict(leaves(_contents()))
    return any(
        raw(got[name]) != raw(value) if isinstance(value, torch.Tensor) else got[name] != value
        for name, value in wanted.items()
    )


def _save_dcp(folder: Path, **options: Any) -> None:
    writer = dcp.FileSystemWriter(folder, **options)
    dcp.save(_contents(), storage_writer=writer, no_dist=True)


def _save_without_manifest(folder: Path) -> None:
    _save_dcp(folder)
    (folder / "manifest.msgpack").unlink()


SAVES: dict[str, Callable[[Path], None]] = {
    "dcp": _save_dcp,
    "bare": lambda folder: _save_dcp(folder, torch_compatible=False),
    "file per tensor": lambda folder: _save_dcp(folder, single_file_per_rank=False),
    "without manifest": _save_without_manifest,
    "stock": lambda folder: stock_save(_contents(), checkpoint_id=folder, no_dist=True),
}


def test_a_lost_manifest_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A load logs a warning if the manifest of a dcp save is missing and it reads the less complete
    `.metadata`. A checkpoint of stock torch gives no warning."""
    for kind, is_warned in (("dcp", False), ("stock", False), ("without manifest", True)):
        SAVES[kind](tmp_path / kind)
        caplog.clear()
        dcp.read(tmp_path / kind)
        assert (f"{tmp_path / kind / 'manifest.msgpack'} is missing" in caplog.text) == is_warned, kind


@dataclass
class Tally:
    """Counts of the results of loads from damaged checkpoints, and of the damage that `verify` missed."""

    loads: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    untyped: list[str] = field(default_factory=list)
    unnoticed: list[str] = field(default_factory=list)

    def look(self, folder: Path, label: str) -> None:
        """Load and verify, and count the result."""
        state = _contents(0)
        try:
            dcp.load(state, checkpoint_id=folder, no_dist=True)
        except dcp.CheckpointError as error:
            self.loads[type(error).__name__] += 1
            if not isinstance(error, TYPED):
                self.untyped.append(f"{label}: {error!r}")
            if _passes(folder):
                self.unnoticed.append(f"{label}: {error}")
        else:
            self.loads["loaded"] += 1
            if _differs(state):
                self.wrong.append(label)


def _passes(folder: Path) -> bool:
    return bool(verified(folder)["ok"])


def flip_everywhere(folder: Path, step: int, seed: int) -> dict[str, Tally]:
    """Flip a random bit in every ``step``-th byte of each file. Return a tally for each kind of file."""
    generator = random.Random(seed)
    tallies: dict[str, Tally] = {"data": Tally(), "manifest.msgpack": Tally(), ".metadata": Tally()}
    for path in sorted(folder.iterdir()):
        tally = tallies.get(path.name, tallies["data"])
        for offset in range(generator.randrange(step), path.stat().st_size, step):
            mask = 1 << generator.randrange(8)
            _flip(path, offset, mask)
            tally.look(folder, f"{path.name} at {offset}")
            _flip(path, offset, mask)
    return tallies


def check_tallies(kind: str, tallies: dict[str, Tally]) -> None:
    """Assert that loads gave right bytes or typed errors, and `verify` found all damage under checksums."""
    for tally in tallies.values():
        assert tally.wrong == []
        assert tally.untyped == []
    manifest, metadata, data = tallies["manifest.msgpack"], tallies[".metadata"], tallies["data"]
    assert set(manifest.loads) <= {"CorruptCheckpointError"}
    assert data.loads["CorruptCheckpointError"] > 0
    if kind in ("dcp", "file per tensor"):
        assert set(metadata.loads) == {"loaded"}
    if kind in ("dcp", "bare", "file per tensor"):
        assert data.unnoticed == manifest.unnoticed == metadata.unnoticed == []
    else:
        # Names and zip headers of foreign formats have no checksum. A load raises what torch's zip reader
        # refuses; both load and verify check payloads and values.
        assert [label for label in data.unnoticed if "object" not in label] == []
        assert len(data.unnoticed) < 0.05 * sum(data.loads.values())


@pytest.mark.parametrize("step", [131, pytest.param(1, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("kind", SAVES)
def test_a_flipped_bit_never_loads_other_bytes(tmp_path: Path, kind: str, step: int) -> None:
    """With any bit of any file flipped, a load gives the saved bytes or a typed error; verify finds it."""
    SAVES[kind](tmp_path / "x")
    check_tallies(kind, flip_everywhere(tmp_path / "x", step, 1))


def regions(folder: Path) -> Iterator[tuple[str, str, int]]:
    """Return (description, file, offset) of first, middle and last byte of each region of each record."""
    index = dcp.open_index(folder)
    for chunk in range(index.chunk_count):
        name = index.files[int(index.chunk_files[chunk])]
        fqn = index.fqns[int(index.chunk_tensors[chunk])]
        begin, payload = int(index.record_offsets[chunk]), int(index.payload_offsets[chunk])
        end = begin + int(index.record_lengths[chunk])
        payload_end = payload + int(index.payload_lengths[chunk])
        for region, first, last in (
            ("prefix", begin, payload),
            ("payload", payload, payload_end),
            ("suffix", payload_end, end),
        ):
            for offset in sorted({first, (first + last) // 2, last - 1}) if last > first else []:
                yield f"{region} of {fqn}", name, offset
    for row, fqn in enumerate(index.objects.fqns):
        if int(index.objects.plain[row]) < 0:
            begin, length = int(index.objects.offsets[row]), int(index.objects.lengths[row])
            for offset in (begin, begin + length // 2, begin + length - 1):
                yield f"object {fqn}", index.files[int(index.objects.files[row])], offset


def _flip(path: Path, offset: int, mask: int = 0x10) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        before = file.read(1)
        file.seek(offset)
        file.write(bytes([before[0] ^ mask]))


def test_a_flipped_bit_in_each_region_is_found(tmp_path: Path) -> None:
    """A load refuses a flipped bit in a payload or value; verify finds one in an unused zip header."""
    folder = tmp_path / "x"
    save_version(folder, 1, large=LARGE)
    seen: Counter[str] = Counter()
    for label, name, offset in regions(folder):
        _flip(folder / name, offset)
        region = label.split()[0]
        seen[region] += 1
        got = seen_by_dcp(folder, large=LARGE)
        place = f"{label}: byte {offset} of {name}"
        assert got == ("CorruptCheckpointError" if region in ("payload", "object") else 1), place
        assert not _passes(folder), place
        _flip(folder / name, offset)
    assert min(seen[region] for region in ("prefix", "payload", "suffix", "object")) >= 3
    assert _passes(folder)


def interesting_sizes(folder: Path, path: Path) -> list[int]:
    """Return sizes at and around the boundaries of records and payloads, and some between."""
    size = path.stat().st_size
    marks = {0, 1, size // 2, size - 1}
    if path.name.endswith(".distcp"):
        for _, name, offset in regions(folder):
            if name == path.name:
                marks |= {offset, offset + 1}
    else:
        marks |= set(range(0, size, 97))
    return sorted(mark for mark in marks if 0 <= mark < size)


@pytest.mark.parametrize("kind", [pytest.param("bare", marks=pytest.mark.exhaustive), "file per tensor"])
def test_a_file_of_another_size_is_refused(tmp_path: Path, kind: str) -> None:
    """A truncated or extended file is a typed error, and verify finds it."""
    folder = tmp_path / "x"
    SAVES[kind](folder)
    tally = Tally()
    cut = 0
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        for size in interesting_sizes(folder, path):
            path.write_bytes(whole[:size])
            tally.look(folder, f"{path.name} cut at {size}")
            cut += path.name != ".metadata"
        for extra in (b"\0", b"x" * 5000, whole):
            path.write_bytes(whole + extra)
            tally.look(folder, f"{path.name} extended by {len(extra)}")
            cut += path.name != ".metadata"
        path.write_bytes(whole)
    assert (tally.wrong, tally.untyped, tally.unnoticed) == ([], [], [])
    assert tally.loads["CorruptCheckpointError"] == cut


@pytest.mark.parametrize("kind", SAVES)
def test_a_missing_file_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    """A missing data file raises CorruptCheckpointError with its path, and verify lists it."""
    folder = tmp_path / "x"
    SAVES[kind](folder)
    for path in sorted(folder.glob("*.distcp")):
        path.rename(tmp_path / "away")
        with pytest.raises(CorruptCheckpointError) as caught:
            dcp.load(_contents(0), checkpoint_id=folder, no_dist=True)
        assert path.name in str(caught.value) and caught.value.path == str(path)
        missing = [one["file"] for one in verified(folder)["findings"] if one["kind"] == "missing-file"]
        assert missing == [path.name]
        (tmp_path / "away").rename(path)
    assert _passes(folder)
