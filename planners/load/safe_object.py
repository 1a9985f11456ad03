"""Values that `torch.load(weights_only=True)` refuses though they are harmless, without running a pickle.

`torch.serialization.safe_globals` would do for some of them, but it is global to the process, so that other
threads would load with it too, and numpy's functions believe what they are told.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dcp.storage.errors import CheckpointFormatError
from dcp.storage.formats import dtypes
from dcp.storage.formats.dtypes import Dtype
from dcp.storage.formats.native.object_blob import ObjectBlob
from dcp.storage.formats.torch.pickle_reader import DevicePickle, SizePickle
from dcp.storage.formats.torch.python_values import python_value
from dcp.storage.formats.torch.tensor_pickle import TensorPickle

__all__ = ["safe_object"]


def safe_object(blob: bytes) -> Any:
    """The value of torch.save bytes, tensors in it included.

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
