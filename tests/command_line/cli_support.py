"""Checkpoints to inspect, and the command line in this process."""

import time
import zlib
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import torch
from torch.distributed.checkpoint.state_dict_saver import save as stock_save

import dcp
from tests.support.command import Outcome as Outcome
from tests.support.command import run as run

BLOCK_BYTES = 4 << 20
"""Bytes of a block, which has one checksum, as docs/reference/format.md says."""


def state() -> dict[str, Any]:
    """Return a small state dict: nesting, empty and scalar tensors, plain and other objects."""
    generator = torch.Generator().manual_seed(5)
    return {
        "model": {
            "embed": torch.randn(300, 70, generator=generator),
            "layers": [{"w": torch.randn(8, 8, generator=generator)}, {"w": torch.ones(8, 8)}],
            "empty": torch.zeros(0, 3),
            "scale": torch.tensor(2.0, dtype=torch.bfloat16),
        },
        "step": 7,
        "lr": [0.1, (1, 2)],
        "by_rank": {0: "zero"},
        "device": torch.device("cpu"),
        "schedule": OrderedDict(warmup=float("inf")),
    }


def save_dcp(path: Path, state_dict: dict[str, Any] | None = None) -> Path:
    """Save a checkpoint with dcp."""
    dcp.save(state() if state_dict is None else state_dict, checkpoint_id=path, no_dist=True)
    return path


def save_stock(path: Path, state_dict: dict[str, Any] | None = None) -> Path:
    """Save a checkpoint with stock torch."""
    stock_save(state() if state_dict is None else state_dict, checkpoint_id=path, no_dist=True)
    return path


def data_file(checkpoint: Path) -> Path:
    """Return the only data file of a checkpoint of one rank."""
    (path,) = checkpoint.glob("*.distcp")
    return path


def payload_of(folder: Path, fqn: str) -> tuple[int, int]:
    """Return (offset, length) of a tensor's payload in a dcp checkpoint."""
    index = dcp.open_index(folder)
    chunk = index.chunks(index.position[fqn])[0]
    return int(index.payload_offsets[chunk]), int(index.payload_lengths[chunk])


def rewrite_manifest(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change fields of a manifest, and give it a valid checksum."""
    manifest = folder / "manifest.msgpack"
    fields = msgpack.unpackb(manifest.read_bytes(), strict_map_key=False)
    del fields["crc32"]
    change(fields)
    body = bytes([0xDE, *(len(fields) + 1).to_bytes(2, "big")])
    body += b"".join(msgpack.packb(part) for item in fields.items() for part in item) + b"\xa5crc32\xce"
    manifest.write_bytes(body + zlib.crc32(body).to_bytes(4, "big"))


def begin_deletion(folder: Path) -> None:
    """Leave the tombstone of a deletion that was killed before it removed a file (format, section 8)."""
    save_id, now = str(dcp.open_index(folder).provenance["save_id"]), time.time()
    tombstone = {"save_id": save_id, "time": now, "owners": [save_id], "newest": now}
    notes = {"kind": "dcphub.notes", "version": [1, 0], "pinned": False, "verified": None}
    body = bytes(msgpack.packb({**notes, "deleting": tombstone, "crc32": 0xFFFFFFFF}))[:-4]
    (folder / "notes.msgpack").write_bytes(body + zlib.crc32(body).to_bytes(4, "big"))


def flip(path: Path, offset: int) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)
