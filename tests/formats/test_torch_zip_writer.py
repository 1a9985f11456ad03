"""Zips of torch.save. Internal: sizes beyond 4 GiB and names of any length, against APPNOTE.TXT."""

from __future__ import annotations

import random
import struct

import numpy as np
import pytest

from dcp.storage.formats.checksums import crc32
from dcp.storage.formats.torch.zip_writer import ZipLayout

FAR = 1 << 32


def header(name: bytes, offset: int, size: int, crc: int, flags: int) -> bytes:
    """A local header, as APPNOTE.TXT 4.3.7 and torch's padding have it."""
    wide = ([size, size] if size >= FAR - 1 else []) + ([offset] if offset >= FAR - 1 else [])
    zip64 = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    padding = -(offset + 30 + len(name) + len(zip64) + 4) % 64
    extra = zip64 + struct.pack("<HH", 0x4246, padding) + b"Z" * padding
    short = min(size, FAR - 1)
    fixed = struct.pack("<4s5H3I2H", b"PK\3\4", 45 if wide else 20, flags, 0, 0, 33, crc, short, short, 0, 0)
    return fixed[:26] + struct.pack("<HH", len(name), len(extra)) + name + extra


def central(name: bytes, offset: int, size: int, crc: int, flags: int) -> bytes:
    """A record of the central directory, as 4.3.12 has it."""
    wide = ([size, size] if size >= FAR - 1 else []) + ([offset] if offset >= FAR - 1 else [])
    zip64 = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    version, short, at = 45 if wide else 20, min(size, FAR - 1), min(offset, FAR - 1)
    fixed = struct.pack("<4s6H3I", b"PK\1\2", version, version, flags, 0, 0, 33, crc, short, short)
    return fixed + struct.pack("<5H2I", len(name), len(zip64), 0, 0, 0, 0, at) + name + zip64


def reference(
    sizes: list[int], crcs: list[int], keys: list[int], contents: dict[int, bytes], folder: str
) -> tuple[dict[int, bytes], set[tuple[int, int]]]:
    """The bytes between reserved contents by offset, and the places of CRCs; entry by entry."""
    position, begin, text, directory, inner = 0, 0, b"", b"", []
    parts: dict[int, bytes] = {}
    holes: set[tuple[int, int]] = set()
    entries = [("data.pkl", b"pickle", 6, crc32(b"pickle"), -1), ("empty", b"", 0, 0, -1)]
    for number, (size, crc, key) in enumerate(zip(sizes, crcs, keys, strict=True)):
        data = contents.get(number)
        known = crc32(data) if data is not None else crc
        entries.append((f"data/{number}", data, size, known, key))  # type: ignore[arg-type]
    entries.append(("version", b"3\n", 2, crc32(b"3\n"), -1))
    for name, data, size, crc, key in entries:
        encoded, offset = f"{folder}/{name}".encode(), position
        flags = (8 if size else 0) | (0 if encoded.isascii() else 2048)
        text += header(encoded, offset, size, 0 if data is None else crc, flags)
        position = begin + len(text)
        if data is None:
            parts[begin] = text
            position, text = position + size, b""
            begin = position
        else:
            text, position = text + data, position + size
        if size:
            wide = size >= FAR - 1 or offset >= FAR - 1
            holes |= {(key, position + 4)} if key >= 0 else set()
            text += struct.pack("<4sIQQ" if wide else "<4sIII", b"PK\7\10", crc, size, size)
            position = begin + len(text)
        inner += [(key, len(directory) + 16)] if key >= 0 else []
        directory += central(encoded, offset, size, crc, flags)
    holes |= {(key, position + at) for key, at in inner}
    count, length, end = len(entries), len(directory), b""
    if count >= 65535 or position >= FAR - 1:
        end += struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, count, count, length, position)
        end += struct.pack("<4sIQI", b"PK\6\7", 0, position + length, 1)
    short = min(count, 65535)
    end += struct.pack("<4s4HIIH", b"PK\5\6", 0, 0, short, short, length, min(position, FAR - 1), 0)
    parts[begin] = text + directory + end
    return parts, holes


def joined(parts: dict[int, bytes]) -> dict[int, bytes]:
    """``parts`` without the cuts between those that follow one another."""
    found: dict[int, bytes] = {}
    last = -1
    for offset, data in sorted(parts.items()):
        if last >= 0 and last + len(found[last]) == offset:
            found[last] += data
        else:
            found[last := offset] = data
    return found


@pytest.mark.parametrize("seed", range(40))
def test_entries_at_once_have_the_bytes_of_one_after_the_other(seed: int) -> None:
    """Sizes alike or not, known contents and CRCs among those to come, names of other lengths, and zip64."""
    rng = random.Random(seed)
    count = rng.choice([0, 1, 2, 11, 120, 1_100])
    large = [5 << 30, FAR - 1, FAR, FAR - 2, 1 << 31] if seed % 2 else []
    pool = [0, 1, 63, 64, 256, 256, 256, 4096, rng.randrange(500)]
    sizes = [rng.choice(large if large and rng.random() < 0.02 else pool) for _ in range(count)]
    contents = {n: rng.randbytes(rng.choice([0, 5, 80])) for n in range(count) if rng.random() < 0.1}
    sizes = [len(contents[n]) if n in contents else size for n, size in enumerate(sizes)]
    is_open = [size > 0 and n not in contents and rng.random() < 0.5 for n, size in enumerate(sizes)]
    keys = [3 * n if one else -1 for n, one in enumerate(is_open)]
    crcs = [0 if one or not size else rng.getrandbits(32) for one, size in zip(is_open, sizes, strict=True)]
    folder = rng.choice(["archive", "modèle"])
    parts, holes = reference(sizes, crcs, keys, contents, folder)

    archive = ZipLayout(folder)
    archive.add("data.pkl", b"pickle")
    archive.add("empty", b"")
    columns = [np.array(column, np.int64) for column in (sizes, keys, crcs)]
    begins = archive.reserve("data", columns[0], columns[1], columns[2], contents).tolist()
    archive.add("version", b"3\n")
    archive.finish()
    made = dict(zip(archive.offsets, archive.parts, strict=True))
    assert joined(made) == joined(parts)
    assert set(archive.crc_holes) == holes
    assert len(archive.crc_holes) == len(holes)
    assert all(begin % 64 == 0 for begin in begins)
    last = max(made)
    assert archive.size_bytes == last + len(made[last])
