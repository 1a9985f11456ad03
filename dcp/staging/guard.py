"""The guard of staging: what was copied is what the state was when its copy was asked for.

Samples of the sources are taken before they are copied, and compared with the copies after. So a state that
changed meanwhile (another thread, an overlapped staging, device work in flight) and a copy that is an old one
are found, and named.
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
"""About as many words are spread over all tensors: a cache miss each."""
_MIN_WORDS, _MAX_WORDS = 3, 16
_WHOLE_ELEMENTS = 8
"""Tensors of no more elements are looked at whole."""
_BIT_PATTERNS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""Elements as bits, so that types which torch cannot gather are read as well."""
_GOLDEN = 0.6180339887498949


# -- samples of tensors at one moment ------------------------------------------------------------------------


def sampled(memory: LocalMemory, guard: Guard, serial: int = 0) -> Callable[[LocalMemory], list[int]]:
    """Look at some bytes of each tensor (strided, of any device), or at all of them, to compare copies with.

    The result returns the numbers of the tensors whose copies are not what was seen; shapes and dtypes must
    be equal. What is read of a device may still be on its way: nothing waits for it before that. ``serial``
    moves the sampled places, so that the next save looks elsewhere.
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
    """Some neighbouring elements, eight bytes where they are small, at regular steps in C order: by tensor,
    ``counts`` words of ``lengths`` elements at ``begins``, ``begins + steps``, ...; and by word its tensor
    (``rows``) and where it begins. Tensors of few elements are looked at whole; ``serial`` shifts the words.
    """

    def __init__(self, memory: LocalMemory, serial: int) -> None:
        numels, count = memory.volumes, len(memory.tensors)
        self.itemsizes = sizes = itemsizes(memory.dtype_codes)
        for row in np.flatnonzero(sizes == 0).tolist():  # of a dtype that no checkpoint has
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
                # a word at every byte: this array is never read but where it is asked for
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
        """Begin to bring the words of strided or device tensors (of one device and width) to the host, in one
        transfer; the result waits for it and enters them in ``words``."""
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
        """Gather the elements of a tensor's words, one after the other, on its device."""
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
"""The sources of a state by name, a name for each of its parts; and those whose copies differ."""


def sample_state(state_dict: Mapping[str, Any], guard: Guard = "sampled") -> _Samples:
    """Look at the tensors of a state dict, before a stager of any kind is asked to copy it.

    Tensors without strided memory of their own (sparse, quantized, of unknown subclasses) are passed over.
    """
    fqns, sources = _sources(state_dict)
    memory = LocalMemory.of(sources)
    return fqns, memory, sampled(memory, guard)


def check_staged(
    state_dict: Mapping[str, Any], staged_state_dict: Mapping[str, Any], samples: _Samples
) -> None:
    """Raise StagingError unless the staged state dict is a true copy of what ``samples`` saw.

    Every tensor of ``state_dict`` must be there, with its shape and dtype, in memory that no tensor of the
    state has, and with the bytes that were seen.
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
            "{count} staged tensors do not fit the state: {shown}. The stager must keep the structure that "
            "it was given",
            "; ".join(f"{fqn!r} {problem}" for fqn, problem in list(problems.items())[:_MAX_NAMED]),
        )
    shared = _sharing([*memory.tensors, *_sources(state_dict)[1]], copies)
    if shared:
        raise _error(
            (fqns[number] for number in shared),
            "{count} staged tensors are in memory of the state itself: {shown}. The stager must copy them, "
            "or what training writes next ends up in the checkpoint",
        )
    wrong = differing(LocalMemory.of(copies))
    if wrong:
        raise changed_error(fqns[number] for number in wrong)


def changed_error(fqns: Iterable[str]) -> StagingError:
    """Make the error that the copies of these tensors are not what the state was."""
    return _error(
        fqns,
        "the staged copies of {count} tensors differ from the state to be saved: {shown}. The state changed "
        "while it was copied, or an old copy was given; let nothing write to it before staging_completion "
        "(or hold the stager's lock() around optimizer.step())",
    )


def _error(fqns: Iterable[str], message: str, shown: str = "") -> StagingError:
    """Make an error of some tensors; ``message`` has places for how many they are, and what is shown."""
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
        return "does not say which boxes it holds, as a CheckpointableTensor does"
    return ""


def _sources(state_dict: Mapping[str, Any]) -> tuple[list[str], list[torch.Tensor]]:
    """Return (names, plain local tensors) of all that can be looked at; a name comes once for each of its
    parts."""
    cache: SpecCache = {}
    found: list[tuple[str, torch.Tensor]] = []
    for fqn, value in flatten_sharded(flatten(state_dict).values).items():
        if tensor_kind(type(value)) == OBJECT:
            continue
        try:
            local = local_tensor(fqn, value, cache)
        except PlanError:  # other planners may know what to do with it
            continue
        # one local tensor may hold several boxes
        parts = {id(source): source for source in local.sources} if local is not None else {}
        found += [
            (fqn, source)
            for source in parts.values()
            if source.layout == torch.strided and not source.is_meta and not source.is_quantized
        ]
    return [fqn for fqn, _ in found], [source for _, source in found]


def _sharing(sources: Sequence[torch.Tensor], copies: Sequence[torch.Tensor]) -> list[int]:
    """Return the numbers of the copies that overlap any source, on the same device."""
    shared: list[int] = []
    for device in {copy.device for copy in copies}:
        numbers = np.array([number for number, copy in enumerate(copies) if copy.device == device])
        begins, ends = _extents([source for source in sources if source.device == device])
        order = np.argsort(begins)
        # of all sources that begin before a copy ends, does one end after it begins?
        furthest = np.maximum.accumulate(ends[order])
        first, last = _extents([copies[number] for number in numbers.tolist()])
        before = np.searchsorted(begins[order], last, side="left")
        overlap = (before > 0) & (last > first)
        overlap[overlap] = furthest[before[overlap] - 1] > first[overlap]
        shared += numbers[overlap].tolist()
    return sorted(shared)


def _extents(tensors: Sequence[torch.Tensor]) -> tuple[Int64, Int64]:
    """Return (first, last + 1) addresses that the elements of each tensor occupy."""
    begins = np.fromiter(map(torch.Tensor.data_ptr, tensors), np.int64, len(tensors))
    reaches = [
        sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        for tensor in tensors
    ]
    sizes = [reach * t.itemsize if t.numel() else 0 for reach, t in zip(reaches, tensors, strict=True)]
    return begins, begins + np.array(sizes, np.int64)
