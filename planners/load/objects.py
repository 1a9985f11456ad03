"""Values from their torch.save bytes.

Harmless ones that torch refuses are decoded without running a pickle.
`torch.serialization.safe_globals` would do for some of those, but it is global to the process, so that other
threads would load with it too, and numpy's functions believe their arguments.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import torch

from dcp.storage.errors import CheckpointFormatError, UnsafeObjectError
from dcp.storage.formats import dtypes
from dcp.storage.formats.dtypes import Dtype
from dcp.storage.formats.torch.pickle_reader import DevicePickle, SizePickle, TensorPickle
from dcp.storage.formats.torch.python_values import python_value
from dcp.storage.formats.torch.record_reader import ObjectBlob

__all__ = ["load_object"]


def load_object(fqn: str, blob: bytes | io.BytesIO, *, weights_only: bool) -> Any:
    """Return the value of torch.save bytes.

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
                return _safe_object(buffer.getvalue()[begin:])
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


def _safe_object(blob: bytes) -> Any:
    """Return the value of torch.save bytes, tensors in it included.

    Raises UnsafeObjectError where it is not harmless, another CheckpointFormatError where it is damaged or
    makes more of its bytes than an honest value does.
    """
    opened = ObjectBlob(blob)

    def tensor(facts: TensorPickle) -> torch.Tensor:
        name = dtypes.BY_CODE[facts.dtype_code].name
        elements = opened.elements(facts)
        try:
            dtype: torch.dtype = getattr(torch, name)
            data = torch.frombuffer(elements, dtype=dtype) if elements.size else torch.empty(0, dtype=dtype)
            return data.reshape(facts.sizes).requires_grad_(facts.requires_grad)
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointFormatError(f"this torch makes no such tensor of {name}") from error

    special: dict[type, Callable[[Any], Any]] = {
        TensorPickle: tensor,
        SizePickle: torch.Size,
        Dtype: lambda dtype: getattr(torch, dtype.name),
        DevicePickle: _device,
    }
    return python_value(opened.decoded, opened.pickle_bytes, special)


def _device(device: DevicePickle) -> torch.device:
    try:
        return torch.device(device.type) if device.index is None else torch.device(device.type, device.index)
    except (RuntimeError, ValueError) as error:
        raise CheckpointFormatError(f"there is no device {device.type[:40]!r}") from error
