"""Guard of staging: detects copies that differ from the state at the time of the request.

Samples of the sources are compared with the copies. This finds a state that changed during the copy (by
another thread, an overlapped copy or running device work), and stale copies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from isal.isal_zlib import crc32

from dcp.planners.flatten import flatten
from dcp.planners.layout.local_tensor import (
    OBJECT,
    SpecCache,
    claim_of,
    flatten_sharded,
    local_tensor,
    tensor_kind,
)
from dcp.storage.engine.memory import gather_small, view
from dcp.storage.errors import PlanError, StagingError
from dcp.storage.formats.index import itemsizes
from dcp.storage.geometry.strides import Int64, starts
from dcp.storage.near_names import listed
from dcp.storage.tensors import LocalMemory, byte_pieces

Guard = Literal["sampled", "full", "off"]

_MAX_NAMED = 16
_WORD_BYTES = 8
_WORDS_IN_ALL = 24_000
"""Approximate number of words sampled over all tensors; each costs a cache miss."""
_MIN_WORDS, _MAX_WORDS = 3, 16
_WHOLE_ELEMENTS = 8
"""Tensors of up to this number of elements are sampled completely."""
_BIT_PATTERNS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""Unsigned dtypes by element size, to read dtypes that torch cannot gather."""
_GOLDEN = 0.6180339887498949


# -- samples of tensors at one moment ------------------------------------------------------------------------


def sampled(memory: LocalMemory, guard: Guard, serial: int = 0) -> Callable[[LocalMemory], list[int]]:
    """Sample some bytes of each tensor (strided, on any device), or all bytes, for a later comparison.

    The result is a function from copies, with equal shapes and dtypes, to the numbers of differing tensors.
    Device samples are transferred without waiting. ``serial`` shifts the sampled places between saves.
    """
    if guard == "off":
        return lambda copies: []
    rows, look = np.arange(len(memory.tensors)), _checksums
    if guard == "sampled":
        words = _Words(memory, serial)
        rows, look = words.rows, words.look
    seen = look(memory)

    def differing(copies: LocalMemory) -> list[int]:
        numbers: list[int] = np.unique(rows[seen() != look(copies)()]).tolist()
        return numbers

    return differing


def _checksums(memory: LocalMemory) -> Callable[[], npt.NDArray[np.generic]]:
    found = np.zeros(len(memory.tensors), np.uint32)
    with torch.no_grad():
        for row, tensor in enumerate(memory.tensors):
            checksum = 0
            for piece in byte_pieces(tensor):
                checksum = crc32(piece, checksum)
            found[row] = checksum
    return lambda: found


class _Words:
    """Sampled words of neighbouring elements, at regular steps in C order.

    Tensor i has ``counts`` words of ``lengths`` elements at ``begins + k * steps``. ``rows`` is the tensor of
    each word. Small tensors are sampled completely. ``serial`` shifts the words.
    """

    def __init__(self, memory: LocalMemory, serial: int) -> None:
        numels, count = memory.volumes, len(memory.tensors)
        self.itemsizes = sizes = itemsizes(memory.dtype_codes)
        for row in np.flatnonzero(sizes == 0).tolist():  # dtypes outside of the format
            sizes[row] = memory.tensors[row].itemsize
        most = int(np.clip(_WORDS_IN_ALL // max(1, count), _MIN_WORDS, _MAX_WORDS))
        few = numels <= _WHOLE_ELEMENTS
        self.lengths = lengths = np.where(few, 1, np.maximum(1, _WORD_BYTES // sizes))
        self.counts = np.where(few, numels, np.minimum(most, numels // lengths))
        self.steps = np.maximum(lengths, (numels - lengths) // np.maximum(self.counts, 1))
        slack = numels - lengths - self.steps * (self.counts - 1)
        shift = np.clip(slack, 0, self.steps) * (serial * _GOLDEN % 1.0)
        self.begins = np.where(few, 0, shift.astype(np.int64))
        self.rows = np.repeat(np.arange(count), self.counts)
        within = np.arange(len(self.rows)) - starts(self.counts)[:-1][self.rows]
        self.positions = self.begins[self.rows] + within * self.steps[self.rows]

    def look(self, memory: LocalMemory) -> Callable[[], npt.NDArray[np.generic]]:
        """Read the words, as numbers."""
        words = np.zeros(len(self.rows), np.uint64)
        widths = np.minimum(self.lengths * self.itemsizes, _WORD_BYTES)
        addresses = memory.pointers[self.rows] + self.positions * self.itemsizes[self.rows]
        for width in np.unique(widths).tolist():
            chosen = np.flatnonzero((widths == width)[self.rows] & memory.is_plain[self.rows])
            if len(chosen) and width == _WORD_BYTES:
                base, last = int(addresses[chosen].min()), int(addresses[chosen].max())
                # one word for each byte offset; read lazily
                near = np.ndarray((last - base + 1,), np.uint64, view(base, last - base + 8), strides=(1,))
                words[chosen] = near[addresses[chosen] - base]
            elif len(chosen):
                _bytes_of(words)[chosen, :width] = gather_small(addresses[chosen], width)
        others: dict[tuple[torch.device, int, int], list[int]] = defaultdict(list)
        for row in np.flatnonzero(~memory.is_plain & (self.counts > 0)).tolist():
            kind = (memory.tensors[row].device, int(self.itemsizes[row]), int(self.lengths[row]))
            others[kind].append(row)
        arrivals = [self._gather(memory, rows, words) for rows in others.values()]

        def finished() -> npt.NDArray[np.generic]:
            while arrivals:
                arrivals.pop()()
            return words

        return finished

    def _gather(
        self, memory: LocalMemory, rows: Sequence[int], words: npt.NDArray[np.uint64]
    ) -> Callable[[], None]:
        """Start one transfer of words of strided or device tensors (one device and width); return a function
        that waits and stores them in ``words``.
        """
        with torch.no_grad():
            joined = torch.cat([self._elements(memory.tensors[row], row) for row in rows])
        first = starts(self.counts)
        places = np.concatenate([np.arange(first[row], first[row + 1]) for row in rows])
        host = joined.view(torch.uint8).view(len(places), -1)[:, :_WORD_BYTES].contiguous()
        arrived = None
        if not host.is_cpu:
            here = torch.empty(host.shape, dtype=torch.uint8, device="cpu", pin_memory=True)
            host = here.copy_(host, non_blocking=True)
            arrived = torch.Event(device=joined.device)
            arrived.record(torch.accelerator.current_stream(joined.device))

        def enter() -> None:
            if arrived is not None:
                arrived.synchronize()
            _bytes_of(words)[places, : host.shape[1]] = host.numpy()

        return enter

    def _elements(self, tensor: torch.Tensor, row: int) -> torch.Tensor:
        """Gather the elements of a tensor's words on its device."""
        tensor = tensor.detach().resolve_conj().resolve_neg().view(_BIT_PATTERNS[tensor.itemsize])
        count, length = int(self.counts[row]), int(self.lengths[row])
        begin, step = int(self.begins[row]), int(self.steps[row])
        if tensor.is_contiguous():
            return tensor.as_strided((count, length), (step, 1), tensor.storage_offset() + begin).reshape(-1)
        flat = begin + step * np.arange(count)[:, None] + np.arange(length)
        index = np.unravel_index(flat.ravel(), tuple(tensor.shape))
        return tensor[tuple(torch.from_numpy(part).to(tensor.device) for part in index)]


def _bytes_of(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint8]:
    return words.view(np.uint8).reshape(-1, _WORD_BYTES)


# -- stagers of any kind -------------------------------------------------------------------------------------


_Samples = tuple[list[str], LocalMemory, Callable[[LocalMemory], list[int]]]
"""Sources of a state by name, and the function to compare copies."""


def sample_state(state_dict: Mapping[str, Any], guard: Guard = "sampled") -> _Samples:
    """Sample the tensors of a state dict before a stager of any kind copies it.

    Tensors without strided memory (sparse, quantized, unknown subclasses) are skipped.
    """
    fqns, sources = _sources(state_dict)
    memory = LocalMemory.of(sources)
    return fqns, memory, sampled(memory, guard)


def check_staged(
    state_dict: Mapping[str, Any], staged_state_dict: Mapping[str, Any], samples: _Samples
) -> None:
    """Raise StagingError unless the staged state dict is a true copy of the sampled state.

    Every tensor must be present with its shape, dtype and sampled bytes, in separate memory.
    """
    fqns, memory, differing = samples
    by_name: dict[str, list[torch.Tensor]] = defaultdict(list)
    for fqn, staged in zip(*_sources(staged_state_dict), strict=True):
        by_name[fqn].append(staged)
    copies: list[torch.Tensor] = []
    problems: dict[str, str] = {}
    for fqn, source in zip(fqns, memory.tensors, strict=True):
        copy = by_name[fqn].pop(0) if by_name[fqn] else None
        problem = _misfit(source, copy)
        if problem:
            problems.setdefault(fqn, problem)
        copies.append(source if copy is None else copy)
    if problems:
        raise _error(
            problems,
            "{count} staged tensors do not match the state: {shown}. The stager must keep the structure of "
            "the state",
            "; ".join(f"{fqn!r} {problem}" for fqn, problem in list(problems.items())[:_MAX_NAMED]),
        )
    shared = _sharing([*memory.tensors, *_sources(state_dict)[1]], copies)
    if shared:
        raise _error(
            (fqns[number] for number in shared),
            "{count} staged tensors share memory with the state: {shown}. The stager must copy tensors, "
            "otherwise the next training step would change the checkpoint",
        )
    wrong = differing(LocalMemory.of(copies))
    if wrong:
        raise changed_error(fqns[number] for number in wrong)


def changed_error(fqns: Iterable[str]) -> StagingError:
    """Return the error for tensors that changed during the copy."""
    return _error(
        fqns,
        "the staged copies of {count} tensors differ from the state: {shown}. The state changed during "
        "staging, or the stager returned an old copy. Do not change the state before staging_completion, "
        "or hold the stager's lock() around optimizer.step()",
    )


def _error(fqns: Iterable[str], message: str, shown: str = "") -> StagingError:
    """Return an error for some tensors; ``message`` has fields for their number and names."""
    names = list(dict.fromkeys(fqns))
    text = message.format(count=len(names), shown=shown or listed(names, most=_MAX_NAMED))
    return StagingError(text, fqns=names[:_MAX_NAMED], count=len(names))


def _misfit(source: torch.Tensor, copy: torch.Tensor | None) -> str:
    if copy is None:
        return "is missing"
    if copy.shape != source.shape or copy.dtype != source.dtype:
        return (
            f"is {copy.dtype} of shape {tuple(copy.shape)}, not {source.dtype} of shape {tuple(source.shape)}"
        )
    if claim_of(copy) != claim_of(source):
        return "does not describe its shards (see CheckpointableTensor)"
    return ""


def _sources(state_dict: Mapping[str, Any]) -> tuple[list[str], list[torch.Tensor]]:
    """Return names and plain local tensors for sampling; a name repeats for each part."""
    cache: SpecCache = {}
    found: list[tuple[str, torch.Tensor]] = []
    for fqn, value in flatten_sharded(flatten(state_dict).values).items():
        if tensor_kind(type(value)) == OBJECT:
            continue
        try:
            local = local_tensor(fqn, value, cache)
        except PlanError:  # custom planners may handle the value
            continue
        # a local tensor may consist of several boxes
        parts = {id(source): source for source in local.sources} if local is not None else {}
        found += [
            (fqn, source)
            for source in parts.values()
            if source.layout == torch.strided and not source.is_meta and not source.is_quantized
        ]
    return [fqn for fqn, _ in found], [source for _, source in found]


def _sharing(sources: Sequence[torch.Tensor], copies: Sequence[torch.Tensor]) -> list[int]:
    """Return the numbers of copies that overlap a source on the same device."""
    shared: list[int] = []
    for device in {copy.device for copy in copies}:
        numbers = np.array([number for number, copy in enumerate(copies) if copy.device == device])
        begins, ends = _extents([source for source in sources if source.device == device])
        order = np.argsort(begins)
        # overlap: a source begins before the copy ends and ends after it begins
        furthest = np.maximum.accumulate(ends[order])
        first, last = _extents([copies[number] for number in numbers.tolist()])
        before = np.searchsorted(begins[order], last, side="left")
        overlap = (before > 0) & (last > first)
        overlap[overlap] = furthest[before[overlap] - 1] > first[overlap]
        shared += numbers[overlap].tolist()
    return sorted(shared)


def _extents(tensors: Sequence[torch.Tensor]) -> tuple[Int64, Int64]:
    """Return the first and the end address of each tensor's elements."""
    begins = np.fromiter(map(torch.Tensor.data_ptr, tensors), np.int64, len(tensors))
    reaches = [
        sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        for tensor in tensors
    ]
    sizes = [reach * t.itemsize if t.numel() else 0 for reach, t in zip(reaches, tensors, strict=True)]
    return begins, begins + np.array(sizes, np.int64)
