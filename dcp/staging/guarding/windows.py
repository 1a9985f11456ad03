"""Small windows of many tensors, read at once: the places a sampling guard looks at.

A window is some neighbouring elements (eight bytes where they are small) at a logical position, C order. For
contiguous host memory all are gathered by one numpy operation over raw addresses.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from dcp.storage.engine.memory import view
from dcp.storage.formats.index import Int64, starts

__all__ = ["DeferredBytes", "Windows", "read_windows"]

_WORD_BYTES = 8
_WINDOWS_IN_ALL = 24_000
"""About as many windows are spread over all tensors: a cache miss each."""
_MIN_WINDOWS, _MAX_WINDOWS = 3, 16
_WHOLE_ELEMENTS = 8
"""Tensors of no more elements are looked at whole."""
_PATTERNS = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.complex128,
}
"""Elements as bits, so that types which torch cannot gather are read as well."""
_GOLDEN = 0.6180339887498949

Words = npt.NDArray[np.uint64]


@dataclass(frozen=True, eq=False)
class Windows:
    """Which windows: by tensor, ``counts`` windows of ``lengths`` elements at ``begins``, ``begins + steps``,
    ...; and by window, the ``rows`` (tensor numbers)."""

    counts: Int64
    lengths: Int64
    begins: Int64
    steps: Int64
    itemsizes: Int64
    rows: Int64
    positions: Int64

    @classmethod
    def over(cls, numels: Int64, itemsizes: Int64, serial: int) -> Windows:
        """Windows spread evenly over tensors of ``numels`` elements of ``itemsizes`` bytes, shifted by
        ``serial``."""
        most = int(np.clip(_WINDOWS_IN_ALL // max(1, len(numels)), _MIN_WINDOWS, _MAX_WINDOWS))
        tiny = numels <= _WHOLE_ELEMENTS
        lengths = np.where(tiny, 1, np.maximum(1, _WORD_BYTES // np.maximum(itemsizes, 1)))
        fitting = numels // lengths
        counts = np.where(tiny, numels, np.minimum(most, fitting))
        dense = counts == fitting
        gaps = (numels - lengths) // np.maximum(counts, 1)
        steps = np.where(dense, lengths, np.maximum(gaps, lengths))
        shift = serial * _GOLDEN % 1.0
        slack = numels - lengths - steps * (counts - 1)
        begins = np.where(tiny, 0, (np.clip(slack, 0, steps) * shift).astype(np.int64))
        rows = np.repeat(np.arange(len(numels)), counts)
        within = np.arange(len(rows)) - starts(counts)[:-1][rows]
        return cls(counts, lengths, begins, steps, itemsizes, rows, begins[rows] + within * steps[rows])


class DeferredBytes:
    """The first eight bytes of each window, zero-filled; what comes from a device may still be on its way."""

    def __init__(self, words: Words) -> None:
        self._words = words
        self._arrivals: list[Callable[[], None]] = []

    def later(self, arrival: Callable[[], None]) -> None:
        """Have ``arrival`` called before the words are looked at."""
        self._arrivals.append(arrival)

    def values(self) -> Words:
        """The values of each window; waits for devices."""
        while self._arrivals:
            self._arrivals.pop()()
        return self._words


def read_windows(
    windows: Windows,
    tensors: Sequence[torch.Tensor],
    pointers: Int64,
    plain: npt.NDArray[np.bool_],
) -> DeferredBytes:
    """Read the windows; ``plain`` are the tensors that are contiguous host memory at ``pointers``."""
    rows = windows.rows
    words = np.zeros(len(rows), np.uint64)
    widths = np.minimum(windows.lengths * windows.itemsizes, _WORD_BYTES)
    reading = DeferredBytes(words)
    everything = bool(plain.all())
    chosen = np.arange(len(rows)) if everything else np.flatnonzero(plain[rows])
    if len(chosen):
        near = rows if everything else rows[chosen]
        addresses = pointers[near] + windows.positions[chosen] * windows.itemsizes[near]
        words[chosen] = _gathered(addresses, widths[near])
    if not everything:
        others = np.flatnonzero(~plain & (windows.counts > 0)).tolist()
        _read_others(windows, tensors, others, reading, words)
    return reading


def _gathered(addresses: Int64, widths: Int64) -> Words:
    """The words at any addresses of this process."""
    base = int(addresses.min())
    memory = view(base, int(addresses.max()) - base + _WORD_BYTES)
    places = addresses - base
    if int(widths.min()) == _WORD_BYTES:
        # a word at every byte: this array is never read but where it is asked for
        return np.ndarray((len(memory) - _WORD_BYTES + 1,), np.uint64, memory, strides=(1,))[places]
    words = np.empty(len(addresses), np.uint64)
    wide = widths == _WORD_BYTES
    if wide.any():
        words[wide] = _gathered(addresses[wide], widths[wide])
    narrow = ~wide
    within = np.arange(_WORD_BYTES)
    # never a byte beyond the tensor, where there may be no memory
    reach = places[narrow, None] + np.minimum(within, widths[narrow, None] - 1)
    found = np.frombuffer(memory, np.uint8)[reach]
    found[within >= widths[narrow, None]] = 0
    words[narrow] = found.view(np.uint64).ravel()
    return words


def _read_others(
    windows: Windows,
    tensors: Sequence[torch.Tensor],
    others: Sequence[int],
    reading: DeferredBytes,
    words: Words,
) -> None:
    """Strided and device tensors: gathered where they are, one transfer a device and size of elements."""
    first = starts(windows.counts)
    groups: dict[tuple[torch.device, int, int], list[int]] = defaultdict(list)
    for row in others:
        groups[tensors[row].device, tensors[row].itemsize, int(windows.lengths[row])].append(row)
    with torch.no_grad():
        for (device, itemsize, length), rows in groups.items():
            parts = [_elements(windows, tensors[row], row) for row in rows]
            places = np.concatenate([np.arange(first[row], first[row + 1]) for row in rows])
            joined = torch.cat(parts).view(torch.uint8).view(len(places), length * itemsize)
            reading.later(_arriving(joined, device, words, places))


def _elements(windows: Windows, tensor: torch.Tensor, row: int) -> torch.Tensor:
    """The elements of a tensor's windows, (count, length) on its device."""
    tensor = tensor.detach().resolve_conj().resolve_neg().view(_PATTERNS[tensor.itemsize])
    count, length = int(windows.counts[row]), int(windows.lengths[row])
    begin, step = int(windows.begins[row]), int(windows.steps[row])
    if tensor.is_contiguous():
        return tensor.as_strided((count, length), (step, 1), tensor.storage_offset() + begin).reshape(-1)
    flat = begin + step * np.arange(count)[:, None] + np.arange(length)
    index = np.unravel_index(flat.ravel(), tuple(tensor.shape))
    return tensor[tuple(torch.from_numpy(part).to(tensor.device) for part in index)]


def _arriving(
    joined: torch.Tensor, device: torch.device, words: Words, places: npt.NDArray[np.int64]
) -> Callable[[], None]:
    """Begin to bring ``joined`` to the host; the result waits for it and enters it in ``words``."""
    host, arrived = joined, None
    if device.type != "cpu":
        host = torch.empty(joined.shape, dtype=joined.dtype, device="cpu", pin_memory=True)
        host.copy_(joined, non_blocking=True)
        arrived = torch.Event(device=device)
        arrived.record(torch.accelerator.current_stream(device))

    def enter() -> None:
        if arrived is not None:
            arrived.synchronize()
        found = np.zeros((len(places), _WORD_BYTES), np.uint8)
        width = min(_WORD_BYTES, host.shape[1])
        found[:, :width] = host[:, :width].numpy()
        words[places] = found.view(np.uint64).ravel()

    return enter
