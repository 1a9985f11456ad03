"""Values from their torch.save bytes."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

from dcp.planners.load.safe_object import safe_object
from dcp.storage.errors import CheckpointFormatError, UnsafeObjectError

__all__ = ["load_object"]


def load_object(fqn: str, blob: bytes | io.BytesIO, *, weights_only: bool) -> Any:
    """The value of torch.save bytes.

    With ``weights_only`` what `torch.load(weights_only=True)` allows, and what is harmless beyond that
    (`dcp.storage.formats.torch.python_values`): arrays of numpy, dates, paths and the like.

    Raises UnsafeObjectError where the value needs any other class or function, CheckpointFormatError where
    the bytes are damaged.
    """
    buffer = io.BytesIO(blob) if isinstance(blob, bytes | bytearray | memoryview) else blob
    begin = buffer.tell()
    head = buffer.read(2)
    buffer.seek(begin)
    if head != b"PK" and head[:1] != b"\x80":
        raise CheckpointFormatError(f"object {fqn!r} was not written by torch.save, or is damaged", fqn=fqn)
    try:
        return torch.load(buffer, weights_only=weights_only)
    except pickle.UnpicklingError as error:
        refused = _refused(fqn, str(error), weights_only=weights_only)
        if weights_only and head == b"PK":
            try:
                return safe_object(buffer.getvalue()[begin:])
            except CheckpointFormatError:  # torch's reasons are the ones that its users know
                raise refused from error
        raise refused from error
    except Exception as error:
        if not weights_only:  # code of the checkpoint's own classes ran, and it is their error
            raise
        # Damaged bytes make torch's unpickler raise whatever its steps do: ValueError, IndexError, KeyError.
        raise CheckpointFormatError(f"object {fqn!r} is damaged: {_first_line(error)}", fqn=fqn) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _refused(fqn: str, text: str, *, weights_only: bool) -> CheckpointFormatError:
    reason = next((line.strip() for line in text.splitlines() if "nsupported" in line), "")
    if not weights_only or not reason:
        return CheckpointFormatError(f"object {fqn!r} cannot be unpickled: {text[:300]}", fqn=fqn)
    return UnsafeObjectError(
        f"object {fqn!r} needs more than plain data to load ({reason[:300]}). If you trust the checkpoint, "
        "load with weights_only=False, or allow the class with torch.serialization.add_safe_globals",
        fqn=fqn,
    )
