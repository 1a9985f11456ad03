"""Observers: see the payload bytes of a save as they pass, while they are in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp.storage.errors import CheckpointError
from dcp.storage.geometry.strides import Int64

__all__ = ["Observer", "see_all", "see_many_in_all"]


class Observer:
    """Sees what one rank writes; rows are those of its `WriteColumns`.

    Called by the writing threads, for one row by one of them and in the order of its bytes. The memory that
    it is given is for reading, during the call. ``name`` stands for it in messages.
    """

    name = ""

    def see(self, row: int, position: int, data: memoryview) -> None:
        """Look at the bytes ``position`` and following of a row's payload, 1 MiB at most. Not called for
        empty ones."""

    def see_many(self, rows: Int64, payloads: npt.NDArray[np.uint8]) -> None:
        """Look at whole payloads of rows of one dtype and shape, a row each."""
        for row, payload in zip(rows.tolist(), payloads, strict=True):
            self.see(row, 0, payload.data)

    def finish(self) -> Any:
        """Return what travels to the coordinator: what `dcp.storage.packing.pack`
        takes."""


def see_all(observers: Sequence[Observer], row: int, position: int, data: memoryview) -> None:
    """Show bytes to all ``observers``, for reading and for as long as this call takes."""
    for observer in observers:
        shown = data.toreadonly()
        try:
            observer.see(row, position, shown)
        except Exception as error:
            raise _failed(observer, "see", error) from error
        try:
            shown.release()
        except BufferError:
            raise CheckpointError(
                f"{type(observer).__name__} keeps memory that it was shown, which is used again for other "
                "bytes: copy what is wanted of it"
            ) from None


def see_many_in_all(observers: Sequence[Observer], rows: Int64, payloads: npt.NDArray[np.uint8]) -> None:
    """Show whole payloads to all ``observers``, for reading."""
    shown = payloads.view()
    shown.flags.writeable = False
    for observer in observers:
        try:
            observer.see_many(rows, shown)
        except Exception as error:
            raise _failed(observer, "see_many", error) from error


def _failed(observer: Observer, method: str, error: Exception) -> CheckpointError:
    if isinstance(error, CheckpointError):
        return error
    name = observer.name or type(observer).__name__
    return CheckpointError(f"feature {name!r}, {method}: {type(error).__name__}: {error}")
