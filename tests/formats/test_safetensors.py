"""safetensors headers: what the library writes is read, what the specification forbids is refused."""

from __future__ import annotations

import io
import json
import tracemalloc
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from dcp.storage.errors import CheckpointFormatError, UnsupportedFormatError
from dcp.storage.formats import dtypes
from dcp.storage.formats.safetensors.file import MAX_HEADER_BYTES, SafetensorsHeader, parse_header


def parse(data: bytes, size: int | None = -1) -> SafetensorsHeader:
    """The header of a file in memory; its size is told unless another is given."""
    stream = io.BytesIO(data)

    def read(offset: int, length: int) -> bytes:
        stream.seek(offset)
        return stream.read(length)

    return parse_header(read, len(data) if size == -1 else size)


def blob(header: Any, data: bytes = b"") -> bytes:
    """A file with ``header`` (text or what json writes) and ``data``."""
    text = header.encode() if isinstance(header, str) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def tensor(begin: int, end: int, shape: list[int], dtype: str = "U8") -> dict[str, Any]:
    """One entry of a header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.text(st.characters(codec="utf-8"), min_size=1, max_size=10).filter(
            lambda name: name != "__metadata__"
        ),
        st.tuples(
            st.sampled_from([dtype for dtype in dtypes.BY_CODE.values() if dtype.safetensors]),
            st.lists(st.integers(0, 4), max_size=4),
        ),
        max_size=5,
    )
)
def test_reads_what_the_library_writes(wanted: dict[str, tuple[dtypes.Dtype, list[int]]]) -> None:
    """Every dtype the format has: shape, dtype and the tensor's bytes are found."""
    tensors = {}
    for name, (dtype, shape) in wanted.items():
        count = dtype.itemsize * int(torch.Size(shape).numel())
        raw = (torch.arange(count) % 2).to(torch.uint8)
        tensors[name] = raw.view(getattr(torch, dtype.name)).reshape(shape)
    data = save(tensors, metadata={"format": "pt"})
    header = parse(data)
    assert header.metadata == {"format": "pt"}
    assert set(header.entries) == set(wanted)
    for name, (dtype, shape) in wanted.items():
        entry = header.entries[name]
        assert (entry.dtype_code, entry.sizes) == (dtype.code, tuple(shape))
        raw = tensors[name].reshape(-1).view(torch.uint8) if tensors[name].numel() else torch.zeros(0)
        begin = header.data_offset
        assert data[begin + entry.begin : begin + entry.end] == bytes(raw.to(torch.uint8).tolist())


def test_a_blob_of_unknown_size_is_read() -> None:
    """Within another file the length is not known; then only the header itself can be checked."""
    data = blob({"a": tensor(0, 3, [3])}, b"abc and what follows")
    assert parse(data, None).entries["a"].end == 3
    with pytest.raises(CheckpointFormatError):
        parse(data)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x01",
        (MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b"{}",
        (1 << 63).to_bytes(8, "little") + b"{}",
        (100).to_bytes(8, "little") + b"{}",
        blob(""),
        blob("[]"),
        blob(" {}"),
        blob("{} x"),
        blob('{"a"'),
        blob("{" * 50_000),
        blob('{"a":' + "[" * 50_000),
        blob('{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, "a": 1}', b"x"),
        blob('{"a": {"dtype": "U8", "dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}', b"x"),
        blob('{"a": NaN}'),
        blob('{"\\ud800": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}', b"x"),
        (3).to_bytes(8, "little") + b'{"\xff',
        blob({"__metadata__": {"a": 1}}),
        blob({"__metadata__": []}),
        blob({"a": [1]}),
        blob({"a": {"dtype": "U8", "shape": [1]}}, b"x"),
        blob({"a": tensor(0, 2, [1])}, b"xy"),
        blob({"a": tensor(1, 2, [1])}, b"xy"),
        blob({"a": tensor(0, 2, [2]), "b": tensor(1, 3, [2])}, b"xyz"),
        blob({"a": tensor(0, 1, [1]), "b": tensor(2, 3, [1])}, b"xyz"),
        blob({"a": tensor(0, 1, [1])}, b""),
        blob({"a": tensor(0, 1, [1])}, b"xy"),
        blob({"a": tensor(1, 0, [1])}, b"x"),
        blob({"a": tensor(0, 1, [-1])}, b"x"),
        blob({"a": tensor(0, 1, [1.0])}, b"x"),  # type: ignore[list-item]
        blob({"a": tensor(0, 1, [True])}, b"x"),
        blob({"a": tensor(0, 1, [1] * 65)}, b"x"),
        blob({"a": tensor(0, 0, [1 << 32, 1 << 32])}),
        blob('{"a": {"dtype": "U8", "shape": [' + "9" * 5000 + '], "data_offsets": [0, 1]}}', b"x"),
        blob({"a": tensor(0, 1, [1], ["U8"])}, b"x"),  # type: ignore[arg-type]
    ],
    ids=lambda data: repr(data[8:40]),
)
def test_what_the_specification_forbids_is_refused(data: bytes) -> None:
    """Holes, overlaps, lies about sizes, doubled keys and broken JSON give the typed error, quickly."""
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointFormatError):
            parse(data)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_an_unknown_element_type_is_named() -> None:
    """A type of a newer specification is unsupported, not corrupt."""
    with pytest.raises(UnsupportedFormatError, match="F6_E2M3"):
        parse(blob({"a": tensor(0, 3, [4], "F6_E2M3")}, b"abc"))


def test_empty_files_and_trailing_spaces() -> None:
    """A file without tensors, and a header padded with spaces to align the data, are valid."""
    assert parse(blob("{}")).entries == {}
    assert (
        parse(blob('{"a": {"dtype": "U8", "shape": [], "data_offsets": [0, 1]}}   ', b"x")).entries["a"].sizes
        == ()
    )
