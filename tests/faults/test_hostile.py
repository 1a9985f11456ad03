"""Hostile checkpoints: no code in them runs, no file outside of the folder is read, memory is bounded."""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import resource
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save as stock_save

import dcp
from dcp.errors import CheckpointError, CheckpointFormatError, UnsafeObjectError
from dcp.storage.formats.index import CheckpointIndex
from tests.support.crashes import Child, in_lab
from tests.support.fault_doors import verified
from tests.support.hostile_files import rewrite_manifest


class Payload:
    """Object whose pickle creates a file when it is loaded."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.canary}",)


def _target() -> dict[str, Any]:
    return {"w": torch.zeros(4, 4), "config": None}


def _save_stock(folder: Path, config: Any) -> Path:
    stock_save({"w": torch.ones(4, 4), "config": config}, checkpoint_id=folder, no_dist=True)
    return folder


def _save_dcp(folder: Path, config: Any = 1) -> Path:
    dcp.save({"w": torch.ones(4, 4), "config": config}, checkpoint_id=folder, no_dist=True)
    return folder


def load_refused(folder: Path, error: type[CheckpointError], **options: Any) -> CheckpointError:
    """Load, and return the error of the expected class."""
    with pytest.raises(error) as caught:
        dcp.load(_target(), checkpoint_id=folder, no_dist=True, **options)
    return caught.value


def inject(data: bytes, canary: Path) -> bytes:
    """Return a pickle that calls os.system and then loads as ``data``, so stock torch shows no error."""
    call = b"cposix\nsystem\n(" + b"X" + len(f"touch {canary}").to_bytes(4, "little")
    call += f"touch {canary}".encode() + b"tR0"
    return data[:2] + call + data[2:]


def test_code_in_metadata_does_not_run(tmp_path: Path) -> None:
    """A `.metadata` that calls os.system is refused by load and verify, and the error names the function."""
    folder, canary = _save_stock(tmp_path / "x", 1), tmp_path / "canary"
    path = folder / ".metadata"
    original = pickle.loads(path.read_bytes())
    path.write_bytes(inject(pickle.dumps(original, protocol=2), canary))
    pickle.loads(path.read_bytes())
    assert canary.exists(), "the attack must work on whoever unpickles it"
    canary.unlink()
    error = load_refused(folder, UnsafeObjectError)
    assert "system" in str(error)
    load_refused(folder, UnsafeObjectError, weights_only=False)
    assert not verified(folder)["ok"]
    assert not canary.exists()


@pytest.mark.parametrize("save", [_save_stock, _save_dcp])
def test_code_in_an_object_does_not_run(tmp_path: Path, save: Callable[[Path, Any], Path]) -> None:
    """The error names the entry. Only a caller with ``weights_only=False`` runs the code."""
    canary = tmp_path / "canary"
    folder = save(tmp_path / "x", Payload(canary))
    assert not canary.exists()
    error = load_refused(folder, UnsafeObjectError)
    assert error.fqn == "config"
    assert "weights_only=False" in str(error)
    assert verified(folder)["ok"]
    assert not canary.exists()
    dcp.load(_target(), checkpoint_id=folder, no_dist=True, weights_only=False)
    assert canary.exists()


def test_code_in_a_tensors_record_does_not_run(tmp_path: Path) -> None:
    """The allow-list decodes the pickle beside a foreign tensor's bytes, even with ``weights_only=False``."""
    canary, folder = tmp_path / "canary", tmp_path / "x"
    _save_stock(folder, 1)
    buffer = io.BytesIO()
    torch.save(torch.ones(4, 4), buffer)
    evil = io.BytesIO()
    with zipfile.ZipFile(buffer) as source, zipfile.ZipFile(evil, "w") as made:
        for name in source.namelist():
            data = source.read(name)
            made.writestr(name, inject(data, canary) if name.endswith("data.pkl") else data)
    _append(folder, evil.getvalue(), "w")
    load_refused(folder, CheckpointError)
    load_refused(folder, CheckpointError, weights_only=False)
    assert not verified(folder)["ok"]
    assert not canary.exists()


def _change_metadata(folder: Path, change: Callable[[str, Any], None]) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for index, place in metadata.storage_data.items():
        change(index.fqn, place)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def _append(folder: Path, data: bytes, name: str) -> None:
    (path,) = folder.glob("*.distcp")
    begin = path.stat().st_size
    with path.open("ab") as file:
        file.write(data)

    def move(fqn: str, place: Any) -> None:
        if fqn == name:
            place.offset, place.length = begin, len(data)

    _change_metadata(folder, move)


TRAVERSALS = ["../secret", "/etc/passwd", "a/../../secret", "..", "", ".", "a\0b", "sub/file"]


@pytest.mark.parametrize("name", TRAVERSALS)
@pytest.mark.parametrize("by_stock", [False, True])
def test_names_in_an_index_do_not_leave_the_folder(tmp_path: Path, name: str, by_stock: bool) -> None:
    """A manifest or a stock `.metadata` with a path as data file is refused before any file is opened."""
    folder = (_save_stock if by_stock else _save_dcp)(tmp_path / "x", 1)
    (data,) = folder.glob("*.distcp")
    (folder / "sub").mkdir()
    for copy in (tmp_path / "secret", folder / "sub" / "file"):
        copy.write_bytes(data.read_bytes())
    if by_stock:
        _change_metadata(folder, lambda _, place: setattr(place, "relative_path", name))
    else:
        rewrite_manifest(folder, lambda index: dataclasses.replace(index, files=[name]))
    load_refused(folder, CheckpointFormatError)
    assert not verified(folder)["ok"]


@pytest.mark.parametrize("odd", [lambda path, file: path.symlink_to(file), lambda path, _: os.mkfifo(path)])
def test_links_are_not_followed_and_pipes_do_not_hang(tmp_path: Path, odd: Any) -> None:
    """A symbolic link to a user's file or a FIFO, in place of a data file or a manifest, is refused."""
    folder = _save_dcp(tmp_path / "x")
    (data,) = folder.glob("*.distcp")
    for path in (data, folder / "manifest.msgpack"):
        path.rename(tmp_path / "elsewhere")
        odd(path, tmp_path / "elsewhere")
        load_refused(folder, CheckpointError)
        path.unlink()
        (tmp_path / "elsewhere").rename(path)
    dcp.load(_target(), checkpoint_id=folder, no_dist=True)


HUGE = 1 << 40

LIES: dict[str, Callable[[CheckpointIndex], CheckpointIndex]] = {
    "payload beyond the file": lambda index: dataclasses.replace(
        index, payload_offsets=index.payload_offsets + 100_000
    ),
    "record before the payload": lambda index: dataclasses.replace(
        index, payload_offsets=index.payload_offsets - 1
    ),
    "payload of another place": lambda index: dataclasses.replace(
        index, payload_offsets=index.record_offsets.copy()
    ),
    "file of another size": lambda index: dataclasses.replace(index, file_sizes=index.file_sizes + 1),
    "huge file": lambda index: dataclasses.replace(index, file_sizes=index.file_sizes * 0 + HUGE),
    "huge object": lambda index: dataclasses.replace(
        index,
        file_sizes=index.file_sizes * 0 + HUGE,
        objects=dataclasses.replace(
            index.objects, lengths=index.objects.lengths * 0 + HUGE // 2, plain=index.objects.plain * 0 - 1
        ),
    ),
    "huge tensor": lambda index: dataclasses.replace(
        index,
        shape_values=index.shape_values * 0 + (1 << 18),
        chunk_sizes=index.chunk_sizes * 0 + (1 << 18),
        payload_lengths=index.payload_lengths * 0 + (4 << 36),
        file_sizes=index.file_sizes * 0 + HUGE,
    ),
}


def loads_in_little_memory(folder: Path, limit_bytes: int) -> tuple[str, bool, int]:
    """Load with a limit on memory. Return (error class or "", right contents, growth of the peak)."""
    state = _target()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + limit_bytes, resource.RLIM_INFINITY))
    try:
        dcp.load(state, checkpoint_id=folder, no_dist=True)
        error = ""
    except CheckpointError as caught:
        error = type(caught).__name__
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return error, torch.equal(state["w"], torch.ones(4, 4)), grown * 1024


PLACES = [(HUGE, 100), (0, HUGE), (-5, 100), (3, 100), (0, 0), (0, -1)]


def load_each_false_index(root: Path, by_stock: bool) -> dict[str, Any]:
    """Load with each false manifest, or false place in a `.metadata`, in a process of its own."""
    results: dict[str, Any] = {}
    for number, lie in enumerate(PLACES if by_stock else LIES):
        folder = (_save_stock if by_stock else _save_dcp)(root / str(number), 1)
        if by_stock:
            _change_metadata(folder, lambda _, place: vars(place).update(offset=lie[0], length=lie[1]))  # noqa: B023
        else:
            rewrite_manifest(folder, LIES[str(lie)])
        ending = Child(loads_in_little_memory, folder, 256 << 20).wait()
        results[str(lie)] = ending.value if ending.raised is None else ending.raised.traceback_text
    return results


@pytest.mark.parametrize("by_stock", [False, True])
def test_a_false_index_is_refused_in_little_memory(tmp_path: Path, by_stock: bool) -> None:
    """False offsets, sizes and lengths under a valid checksum raise typed errors in little memory."""
    for name, result in in_lab(load_each_false_index, tmp_path, by_stock).items():
        assert isinstance(result, tuple), (name, result)
        error, right, grown_bytes = result
        assert error and not right, name
        assert grown_bytes < 64 << 20, name
