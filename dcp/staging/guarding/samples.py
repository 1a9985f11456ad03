"""Samples of tensors at one moment, to compare copies with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from isal.isal_zlib import crc32

from dcp.staging.guarding.windows import DeferredBytes, Windows, read_windows
from dcp.staging.layout import pointers_of
from dcp.storage.formats.index import Int64
from dcp.storage.tensors import byte_pieces

__all__ = ["Guard", "Samples", "plain_host"]

Guard = Literal["sampled", "full", "off"]


def plain_host(tensors: Sequence[torch.Tensor]) -> npt.NDArray[np.bool_]:
    """By tensor, whether its elements are one run of bytes in host memory."""
    plain = np.fromiter(map(torch.Tensor.is_contiguous, tensors), np.bool_, len(tensors))
    if torch.accelerator.is_available():
        plain &= np.fromiter((tensor.is_cpu for tensor in tensors), np.bool_, len(tensors))
    return plain


@dataclass(frozen=True, eq=False)
class Samples:
    """What was seen of tensors at one moment, to compare copies with: some bytes of each, or a CRC of all."""

    guard: Guard
    windows: Windows | None
    seen: DeferredBytes | None
    checksums: list[int]

    @classmethod
    def take(
        cls,
        tensors: Sequence[torch.Tensor],
        guard: Guard,
        *,
        serial: int = 0,
        pointers: Int64 | None = None,
        plain: npt.NDArray[np.bool_] | None = None,
        sizes_bytes: Int64 | None = None,
        itemsizes: Int64 | None = None,
    ) -> Samples:
        """Sample ``tensors`` (strided, of any device, with memory unless empty).

        ``serial`` moves the sampled places, so that the next save looks elsewhere. The other arguments are by
        tensor, what `pointers_of` and `plain_host` give and the sizes, for a caller that has them. Nothing
        waits for a device, except with ``full``.
        """
        if guard == "off":
            return cls(guard, None, None, [])
        if guard == "full":
            return cls(guard, None, None, [_checksum(tensor) for tensor in tensors])
        if sizes_bytes is None or itemsizes is None:
            sizes_bytes = np.fromiter((tensor.nbytes for tensor in tensors), np.int64, len(tensors))
            itemsizes = np.fromiter((tensor.itemsize for tensor in tensors), np.int64, len(tensors))
        windows = Windows.over(sizes_bytes // itemsizes, itemsizes, serial)
        pointers = pointers_of(tensors) if pointers is None else pointers
        plain = _as_they_lie(tensors) if plain is None else plain
        return cls(guard, windows, read_windows(windows, tensors, pointers, plain), [])

    def differing(
        self,
        copies: Sequence[torch.Tensor],
        *,
        pointers: Int64 | None = None,
        plain: npt.NDArray[np.bool_] | None = None,
    ) -> list[int]:
        """Numbers of the tensors whose copies are not what was seen; shapes and dtypes must be equal."""
        if self.guard == "full":
            pairs = zip(self.checksums, copies, strict=True)
            return [number for number, (seen, copy) in enumerate(pairs) if _checksum(copy) != seen]
        if self.windows is None or self.seen is None:
            return []
        pointers = pointers_of(copies) if pointers is None else pointers
        plain = _as_they_lie(copies) if plain is None else plain
        there = read_windows(self.windows, copies, pointers, plain).values()
        wrong = self.windows.rows[self.seen.values() != there]
        numbers: list[int] = np.unique(wrong).tolist()
        return numbers


def _as_they_lie(tensors: Sequence[torch.Tensor]) -> npt.NDArray[np.bool_]:
    """`plain_host` but for lazily conjugated and negated views, whose memory is not what they are."""
    plain = plain_host(tensors)
    for number, tensor in enumerate(tensors):
        if tensor.is_conj() or tensor.is_neg():
            plain[number] = False
    return plain


def _checksum(tensor: torch.Tensor) -> int:
    checksum = 0
    with torch.no_grad():
        for piece in byte_pieces(tensor):
            checksum = crc32(piece, checksum)
    return checksum
