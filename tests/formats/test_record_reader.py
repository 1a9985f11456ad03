"""Records that others wrote: the payload is found where torch has it, and nothing is believed unchecked."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from dcp.storage.errors import CheckpointFormatError, UnsupportedFormatError
from dcp.storage.formats import dtypes
from dcp.storage.formats.native.record import StoredTensor, locate_payload

OFFSET = 777


@pytest.fixture(autouse=True)
def _torch_options() -> Iterator[None]:
    """Whatever a test tells torch.save about checksums ends with the test."""
    yield
    torch.serialization.set_crc32_options(True)


def saved(tensor: Any, **options: Any) -> bytes:
    """What torch.save writes."""
    stream = io.BytesIO()
    torch.save(tensor, stream, **options)
    return stream.getvalue()


def locate(record: bytes, fqn: str = "t") -> StoredTensor:
    """`locate_payload` of a record in the middle of a file."""
    data = bytes(OFFSET) + record + bytes(50)
    return locate_payload(lambda at, count: data[at : at + count], OFFSET, len(record), fqn=fqn)


def rebuilt(record: bytes, stored: StoredTensor) -> torch.Tensor:
    """The tensor that a `StoredTensor` describes, from the record's bytes alone."""
    begin = stored.payload_offset - OFFSET
    payload = record[begin : begin + stored.payload_bytes]
    dtype = getattr(torch, dtypes.BY_CODE[stored.dtype_code].name)
    flat = torch.frombuffer(bytearray(payload), dtype=torch.uint8).view(dtype) if payload else torch.empty(0)
    return flat.to(dtype).as_strided(stored.sizes, stored.strides, stored.storage_offset_elements)


TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "small": lambda: torch.arange(6.0).reshape(2, 3),
    "large": lambda: torch.arange(20_000).reshape(100, 200),
    "scalar": lambda: torch.tensor(3, dtype=torch.uint16),
    "empty": lambda: torch.zeros(0, 3),
    "transposed": lambda: torch.arange(12).reshape(3, 4).t(),
    "view": lambda: torch.arange(100)[10:50:2],
    "channels_last": lambda: (
        torch.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last)
    ),
    "parameter": lambda: torch.nn.Parameter(torch.ones(3)),
    "requires_grad": lambda: torch.ones(3, requires_grad=True),
    "float8": lambda: torch.arange(8.0).to(torch.float8_e4m3fn),
    "bfloat16": lambda: torch.arange(8.0).bfloat16(),
    "expanded": lambda: torch.ones(1).expand(5),
}


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("crc", [True, False])
def test_finds_what_torch_saved(name: str, crc: bool) -> None:
    """Views, permuted layouts, parameters, any dtype: the described tensor is the one saved."""
    torch.serialization.set_crc32_options(crc)
    tensor = TENSORS[name]().detach()
    record = saved(TENSORS[name]())
    stored = locate(record)
    found = rebuilt(record, stored)
    assert found.dtype == tensor.dtype and found.shape == tensor.shape
    assert found.contiguous().reshape(-1).tolist() == tensor.contiguous().reshape(-1).tolist()
    begin = stored.payload_offset - OFFSET
    payload = record[begin : begin + stored.payload_bytes]
    assert stored.crc32 == (zipfile.crc32(payload) if crc or not payload else None)  # type: ignore[attr-defined]


def test_a_damaged_header_is_an_error_of_the_tensor_that_was_asked_for() -> None:
    """Also where what is wrong in it is a tensor whose name is empty."""
    header = b'{"":{"dtyppe":"F32","shape":[3],"data_offsets":[0,12]}}'
    with pytest.raises(CheckpointFormatError, match="the record of 'a': tensor ''") as raised:
        locate(len(header).to_bytes(8, "little") + header + bytes(12), fqn="a")
    assert raised.value.fqn == "a"


def rezipped(
    record: bytes, change: Callable[[str, bytes], bytes | None], method: int = zipfile.ZIP_STORED
) -> bytes:
    """The record with entries changed (None: dropped), written by zipfile."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(record)) as source, zipfile.ZipFile(stream, "w", method) as target:
        for name in source.namelist():
            content = change(name, source.read(name))
            if content is not None:
                target.writestr(name, content)
    return stream.getvalue()


def test_compressed_records_are_unsupported() -> None:
    """torch.save never deflates; the message says what was found."""
    record = rezipped(saved(torch.arange(5)), lambda name, content: content, zipfile.ZIP_DEFLATED)
    with pytest.raises(UnsupportedFormatError, match=r"'t'.*compressed"):
        locate(record)


def test_big_endian_records_are_unsupported() -> None:
    """Bytes of the other order are refused instead of misread; single bytes have no order."""

    def big(name: str, content: bytes) -> bytes:
        return b"big" if name.endswith("/byteorder") else content

    with pytest.raises(UnsupportedFormatError, match="big-endian"):
        locate(rezipped(saved(torch.arange(5)), big))
    assert locate(rezipped(saved(torch.arange(5, dtype=torch.int8)), big)).payload_bytes == 5


def dropped(suffix: str) -> Callable[[str, bytes], bytes | None]:
    """A change that removes an entry."""
    return lambda name, content: None if name.endswith(suffix) else content


def replaced(suffix: str, new: bytes) -> Callable[[str, bytes], bytes | None]:
    """A change that replaces an entry's content."""
    return lambda name, content: new if name.endswith(suffix) else content


@pytest.mark.parametrize(
    "change",
    [
        dropped("data.pkl"),
        dropped("data/0"),
        replaced("data/0", b"short"),
        replaced("data/0", bytes(41)),
        replaced("data.pkl", b""),
        replaced("data.pkl", pickle.dumps([1, 2])),
        replaced("data.pkl", b"\x80\x02" + b"(" * 2_000_000),
        replaced("byteorder", b"middle"),
    ],
)
def test_records_that_do_not_add_up_are_refused(change: Callable[[str, bytes], bytes | None]) -> None:
    """Entries that are missing, of the wrong size or not a tensor give an error which names the tensor."""
    with pytest.raises(CheckpointFormatError) as caught:
        locate(rezipped(saved(torch.arange(5)), change))
    assert caught.value.fqn == "t"
