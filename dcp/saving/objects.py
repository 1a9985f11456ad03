"""Non-tensor values and their stored bytes."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

from dcp.planners.by_value import by_value
from dcp.storage.formats.native.record import object_record
from dcp.storage.formats.plain import encode_plain

__all__ = ["encode_object"]

_KEPT_ENCODINGS = 256


def encode_object(value: Any, cache: dict[bytes, bytes]) -> tuple[bytes, bytes | None]:
    """(torch.save bytes, plain msgpack bytes or None) of a value.

    Plain data is put into the torch.save container without torch (its pickle has no classes), once for equal
    values: ``cache`` lives as long as one save. So is what is equal to plain data (`dcp.planners.by_value`).
    Anything else is torch's to pickle.
    """
    plain = encode_plain(value)
    if plain is None:
        value = by_value(value)
        plain = encode_plain(value)
    if plain is None:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        return buffer.getvalue(), None
    blob = cache.get(plain)
    if blob is None:
        blob = object_record(pickle.dumps(value, protocol=2))
        if len(cache) < _KEPT_ENCODINGS:
            cache[plain] = blob
    return blob, plain
