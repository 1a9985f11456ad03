"""The pickle of a tensor. Internal: forged ones, each wrong in one place, for which no writer can be had."""

from __future__ import annotations

import pytest

from dcp.storage.errors import CheckpointFormatError
from dcp.storage.formats import dtypes
from dcp.storage.formats.torch.tensor_pickle import (
    decode_tensor_pickle,
)


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
