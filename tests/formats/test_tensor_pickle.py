"""The pickle of a record's tensor: what torch.save writes of any dense tensor, and nothing else."""

from __future__ import annotations

import io
import math
import random
import warnings
import zipfile
from typing import Any

import pytest
import torch

from dcp.storage.errors import CheckpointFormatError, UnsupportedFormatError
from dcp.storage.formats import dtypes
from dcp.storage.formats.torch.tensor_pickle import (
    TensorPickle,
    decode_tensor_pickle,
)


def archive(value: Any) -> zipfile.ZipFile:
    """What torch.save writes."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return zipfile.ZipFile(buffer)


def data_pickle(value: Any) -> bytes:
    """The data.pkl of what torch.save writes."""
    saved = archive(value)
    (name,) = [name for name in saved.namelist() if name.endswith("/data.pkl")]
    return saved.read(name)


def with_attribute(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with an attribute, which changes how it is pickled."""
    tensor.note = {"why": ("x", 1)}  # type: ignore[attr-defined]
    return tensor


base = torch.arange(24.0).reshape(2, 3, 4)
DENSE: dict[str, torch.Tensor] = {
    "plain": base,
    "transposed": base.transpose(0, 2),
    "view": base[1, :, 1:3],
    "steps": torch.arange(100)[5:50:3],
    "expanded": torch.ones(1, 3).expand(4, 3),
    "scalar": torch.tensor(7),
    "empty": torch.zeros(0, 3),
    "ones": torch.zeros(1, 1, 5).transpose(0, 2),
    "channels last": torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "parameter": torch.nn.Parameter(torch.ones(2, 2)),
    "frozen": torch.nn.Parameter(torch.ones(2), requires_grad=False),
    "parameter with attribute": with_attribute(torch.nn.Parameter(torch.ones(2))),
    "tensor with attribute": with_attribute(torch.ones(3)),
    "buffer": torch.nn.Buffer(torch.ones(2)),
    "grad": torch.ones(2, requires_grad=True),
    **{name: torch.zeros(4, dtype=getattr(torch, name)) for name in dtypes.BY_NAME if hasattr(torch, name)},
}


@pytest.mark.parametrize("name", DENSE)
def test_dense_tensors(name: str) -> None:
    """dtype, shape, strides, offset and gradient flag of every dense tensor are those of the tensor."""
    tensor = DENSE[name]
    decoded = decode_tensor_pickle(data_pickle(tensor))
    assert dtypes.BY_CODE[decoded.dtype_code].name == str(tensor.dtype).removeprefix("torch.")
    assert decoded.sizes == tuple(tensor.shape)
    assert decoded.strides == tensor.stride()
    assert decoded.storage_offset == tensor.storage_offset()
    assert decoded.storage_bytes == tensor.untyped_storage().nbytes()
    assert decoded.requires_grad == tensor.requires_grad
    assert decoded.contiguous == tensor.is_contiguous()
    saved = archive(tensor)
    entry = next(info for info in saved.infolist() if info.filename.endswith(f"/data/{decoded.storage_key}"))
    assert entry.file_size == decoded.storage_bytes


def quantised() -> torch.Tensor:
    """A quantised tensor, of which torch.save stores integers and a scale."""
    with warnings.catch_warnings():  # torch warns once a process
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (lambda: torch.ones(2, dtype=torch.complex64).conj(), "conjugated"),
        (lambda: torch.ones(2, dtype=torch.complex64).conj().imag, "negated"),
        (lambda: torch.empty(2, device="meta"), "meta"),
        (quantised, "quantised"),
        (lambda: torch.eye(2).to_sparse(), "sparse"),
        (lambda: torch.eye(2).to_sparse_csr(), "sparse"),
    ],
)
def test_other_tensors_are_explained(value: Any, match: str) -> None:
    """Tensors whose stored bytes are not their values are refused by kind, not read wrongly."""
    with pytest.raises(UnsupportedFormatError, match=match):
        decode_tensor_pickle(data_pickle(value()))


def forged(
    *,
    storage: bytes = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x06tQ",
    offset: bytes = b"K\0",
    sizes: bytes = b"K\x02K\x03\x86",
    strides: bytes = b"K\x03K\x01\x86",
    grad: bytes = b"\x89",
    function: bytes = b"_rebuild_tensor_v2",
    rest: bytes = b"",
) -> bytes:
    """A tensor's pickle with parts of one's choice; without any, a good one of two by three floats."""
    hooks = b"ccollections\nOrderedDict\n)R"
    head = b"\x80\x02ctorch._utils\n" + function + b"\n("
    return head + storage + offset + sizes + strides + grad + hooks + rest + b"tR."


FROM_TYPE = b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n("
HUGE = b"\x8a\x09" + b"\xff" * 8 + b"\x00"
FORGED: dict[str, bytes] = {
    "beyond the storage": forged(offset=b"K\x01"),
    "sizes beyond": forged(sizes=b"K\x02K\x04\x86"),
    "strides beyond": forged(strides=b"K\x04K\x01\x86"),
    "negative offset": forged(offset=b"J\xff\xff\xff\xff"),
    "negative size": forged(sizes=b"J\xff\xff\xff\xffK\x03\x86"),
    "negative stride": forged(strides=b"J\xff\xff\xff\xffK\x01\x86"),
    "huge size": forged(sizes=HUGE + b"K\x03\x86", strides=b"K\0K\0\x86"),
    "huge volume": forged(sizes=b"J\xff\xff\xff\x7f" * 3 + b"\x87", strides=b"K\0K\0K\0\x87"),
    "huge storage": forged(
        storage=b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpu" + HUGE + b"tQ"
    ),
    "dimensions differ": forged(strides=b"K\x01\x85"),
    "many dimensions": forged(sizes=b"(" + b"K\x01" * 65 + b"t", strides=b"(" + b"K\x01" * 65 + b"t"),
    "bool as size": forged(sizes=b"\x88K\x03\x86"),
    "text as size": forged(sizes=b"X\x01\0\0\0aK\x03\x86"),
    "list of sizes": forged(sizes=b"](K\x02K\x03e"),
    "grad is a number": forged(grad=b"K\0"),
    "no storage": forged(storage=b"N"),
    "storage of another kind": forged(storage=b"(X\x07\0\0\0storagectorch\nTensor\nX\x01\0\0\x000NK\x06tQ"),
    "storage of a dtype": forged(storage=b"(X\x07\0\0\0storagectorch\nfloat32\nX\x01\0\0\x000NK\x06tQ"),
    "storage not a tuple": forged(storage=b"NQ"),
    "storage too short": forged(storage=b"(X\x07\0\0\0storagetQ"),
    "module, not storage": forged(storage=b"(X\x06\0\0\0modulectorch\nTensor\nX\x01\0\0\x000NK\x06tQ"),
    "key not text": forged(storage=b"(X\x07\0\0\0storagectorch\nFloatStorage\nK\0NK\x06tQ"),
    "long key": forged(
        storage=b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x64\0\0\0" + b"0" * 100 + b"NK\x06tQ"
    ),
    "arguments missing": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R.",
    "v3 without dtype": forged(function=b"_rebuild_tensor_v3", rest=b"N"),
    "parameter of nothing": b"\x80\x02ctorch._utils\n_rebuild_parameter\n(N\x89NtR.",
    "tensor type of nothing": FROM_TYPE + b"ctorch._utils\n_rebuild_tensor_v2\nN)NtR.",
    "type function": FROM_TYPE + b"ccollections\nOrderedDict\nctorch\nTensor\n)NtR.",
    "hooks": b"\x80\x02ccollections\nOrderedDict\n](K\x01K\x02\x86e\x85R.",
}


def test_the_forged_base_is_good() -> None:
    """The forged pickle without changes is a tensor, so that each change below is what is refused."""
    tensor = decode_tensor_pickle(forged())
    assert (tensor.sizes, tensor.strides, tensor.storage_bytes) == ((2, 3), (3, 1), 24)
    last = forged(function=b"_rebuild_tensor_v3", rest=b"ctorch\nint8\n")
    assert decode_tensor_pickle(last).dtype_code == dtypes.BY_NAME["int8"].code


@pytest.mark.parametrize("name", FORGED)
def test_forged_tensors(name: str) -> None:
    """A tensor that reaches outside its storage, or is not one, is a format error."""
    with pytest.raises(CheckpointFormatError):
        decode_tensor_pickle(FORGED[name])


def test_damaged_pickles_stay_inside() -> None:
    """Whatever bits flip, the result is a tensor inside its storage or a typed error."""
    rng = random.Random(7)
    good = [data_pickle(tensor) for tensor in DENSE.values()]
    decoded = 0
    for _ in range(5_000):
        data = bytearray(rng.choice(good))
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        try:
            tensor = decode_tensor_pickle(bytes(data))
        except CheckpointFormatError:
            continue
        decoded += 1
        assert isinstance(tensor, TensorPickle)
        assert len(tensor.sizes) == len(tensor.strides)
        if math.prod(tensor.sizes):
            last = sum((size - 1) * stride for size, stride in zip(tensor.sizes, tensor.strides, strict=True))
            itemsize = dtypes.BY_CODE[tensor.dtype_code].itemsize
            assert (tensor.storage_offset + last + 1) * itemsize <= tensor.storage_bytes
    assert decoded > 0
