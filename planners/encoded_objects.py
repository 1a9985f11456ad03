"""Non-tensor values and their stored bytes."""

from __future__ import annotations

import io
import pickle
from typing import Any, NamedTuple

import torch

from dcp.planners.by_value import by_value
from dcp.planners.value_digests import digest_value
from dcp.storage.errors import PlanError
from dcp.storage.formats.native.record import object_record
from dcp.storage.formats.plain import encode_plain

__all__ = ["EncodedObject", "encoded_object"]

_KEPT_ENCODINGS = 256


class EncodedObject(NamedTuple):
    """A value as it will be stored: torch.save bytes, and plain msgpack bytes where it is plain data; else a
    digest by which ranks compare it (`dcp.planners.value_digests`)."""

    blob: bytes
    plain: bytes | None
    digest: int = 0


def encoded_object(
    fqn: str, value: Any, cache: dict[bytes, bytes], *, with_digest: bool = False
) -> EncodedObject:
    """``value`` encoded, unless it is already; ``cache`` lives as long as one save.

    Raises PlanError, with the name, for what cannot be.
    """
    if type(value) is EncodedObject:
        return value
    try:
        encoded = _encode(value, cache)
    except Exception as error:  # whatever pickling code of the value's class raises
        raise PlanError(
            f"{fqn!r}, a {type(value).__name__}, cannot be stored: {type(error).__name__}: {error}. Keep it "
            "out of the state dict, or give what describes it as plain data",
            fqn=fqn,
        ) from error
    return encoded._replace(digest=digest_value(value)) if with_digest and encoded.plain is None else encoded


def _encode(value: Any, cache: dict[bytes, bytes]) -> EncodedObject:
    """Plain data is put into the torch.save container without torch (its pickle has no classes), once for
    equal values. So is what is equal to plain data (`dcp.planners.by_value`). Anything else is torch's to
    pickle.
    """
    plain = encode_plain(value)
    if plain is None:
        value = by_value(value)
        plain = encode_plain(value)
    if plain is None:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        return EncodedObject(buffer.getvalue(), None)
    blob = cache.get(plain)
    if blob is None:
        blob = object_record(pickle.dumps(value, protocol=2))
        if len(cache) < _KEPT_ENCODINGS:
            cache[plain] = blob
    return EncodedObject(blob, plain)
