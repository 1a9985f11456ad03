"""The guard of staging: what was copied is what the state was when its copy was asked for.

Samples of the sources are taken before they are copied, and compared with the copies after. So a state that
changed meanwhile (another thread, an overlapped staging, device work in flight) and a copy that is an old one
are found, and named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dcp.planners.flatten import flatten_state_dict
from dcp.planners.layout.checkpointable import claim_of
from dcp.planners.layout.local_tensor import SpecCache, flatten_sharded, is_tensor_like, local_tensor
from dcp.staging.guarding.samples import Guard, Samples
from dcp.staging.layout import pointers_of
from dcp.storage.errors import PlanError, StagingError
from dcp.storage.formats.index import Int64
from dcp.storage.near_names import listed

__all__ = ["StateSamples", "changed_error", "check_staged", "named", "sample_state"]

_MAX_NAMED = 16


@dataclass(frozen=True, eq=False)
class StateSamples:
    """What `sample_state` saw: the sources by name, and samples of them."""

    fqns: list[str]
    sources: list[torch.Tensor]
    samples: Samples


def sample_state(state_dict: Mapping[str, Any], guard: Guard = "sampled") -> StateSamples:
    """Look at the tensors of a state dict, before a stager of any kind is asked to copy it.

    Tensors without strided memory of their own (sparse, quantized, of unknown subclasses) are passed over.
    """
    fqns, sources = _sources(state_dict)
    return StateSamples(fqns, sources, Samples.take(sources, guard))


def check_staged(
    state_dict: Mapping[str, Any], staged_state_dict: Mapping[str, Any], samples: StateSamples
) -> None:
    """Raise StagingError unless the staged state dict is a true copy of what ``samples`` saw.

    Every tensor of ``state_dict`` must be there, with its shape and dtype, in memory that no tensor of the
    state has, and with the bytes that were seen.
    """
    by_name: dict[str, list[torch.Tensor]] = {}
    for fqn, staged in zip(*_sources(staged_state_dict), strict=True):
        by_name.setdefault(fqn, []).append(staged)
    copies: list[torch.Tensor] = []
    problems: dict[str, str] = {}
    for fqn, source in zip(samples.fqns, samples.sources, strict=True):
        found = by_name.get(fqn)
        copy = found.pop(0) if found else None
        if copy is None:
            problems.setdefault(fqn, "is missing")
        elif copy.shape != source.shape or copy.dtype != source.dtype:
            problems.setdefault(
                fqn,
                f"is {copy.dtype} of shape {tuple(copy.shape)}, not {source.dtype} of shape "
                f"{tuple(source.shape)}",
            )
        elif claim_of(copy) != claim_of(source):
            problems.setdefault(fqn, "does not say which boxes it holds, as a CheckpointableTensor does")
        copies.append(copy if copy is not None else source)
    if problems:
        raise _wrong_error(problems)
    _, present = _sources(state_dict)
    shared = _sharing([*samples.sources, *present], copies)
    if shared:
        names = list(dict.fromkeys(samples.fqns[number] for number in shared))
        raise StagingError(
            f"{len(names)} staged tensors are in memory of the state itself: {named(names)}. The stager must "
            "copy them, or what training writes next ends up in the checkpoint",
            fqns=names[:_MAX_NAMED],
            count=len(names),
        )
    wrong = samples.samples.differing(copies)
    if wrong:
        raise changed_error(list(dict.fromkeys(samples.fqns[number] for number in wrong)))


def _sources(state_dict: Mapping[str, Any]) -> tuple[list[str], list[torch.Tensor]]:
    """(names, plain local tensors) of all that can be looked at; a name comes once for each of its parts."""
    flat = flatten_sharded(flatten_state_dict(state_dict)[0])
    cache: SpecCache = {}
    fqns: list[str] = []
    sources: list[torch.Tensor] = []
    for fqn, value in flat.items():
        if is_tensor_like(value):
            for source in _parts(fqn, value, cache):
                fqns.append(fqn)
                sources.append(source)
    return fqns, sources


def _parts(fqn: str, value: Any, cache: SpecCache) -> Iterator[torch.Tensor]:
    try:
        local = local_tensor(fqn, value, cache)
    except PlanError:  # planners of others may know what to do with it
        return
    previous = None
    for source, _ in local.pieces if local is not None else ():
        if source is not previous and _has_memory(source):
            yield source
        previous = source


def _has_memory(source: torch.Tensor) -> bool:
    return source.layout == torch.strided and not source.is_meta and not source.is_quantized


def _sharing(sources: Sequence[torch.Tensor], copies: Sequence[torch.Tensor]) -> list[int]:
    """Numbers of the copies that overlap any source, on the same device."""
    shared: list[int] = []
    for device in {copy.device for copy in copies}:
        numbers = [number for number, copy in enumerate(copies) if copy.device == device]
        begins, ends = _extents([source for source in sources if source.device == device])
        order = np.argsort(begins)
        # of all sources that begin before a copy ends, does one end after it begins?
        furthest = np.maximum.accumulate(ends[order])
        first, last = _extents([copies[number] for number in numbers])
        before = np.searchsorted(begins[order], last, side="left")
        overlap = (before > 0) & (last > first)
        overlap[overlap] = furthest[before[overlap] - 1] > first[overlap]
        shared.extend(np.array(numbers)[overlap].tolist())
    return sorted(shared)


def _extents(tensors: Sequence[torch.Tensor]) -> tuple[Int64, Int64]:
    """(first, last + 1) addresses that the elements of each tensor occupy."""
    begins = pointers_of(tensors)
    spans = np.fromiter((_span_bytes(tensor) for tensor in tensors), np.int64, len(tensors))
    return begins, begins + spans


def _span_bytes(tensor: torch.Tensor) -> int:
    if tensor.numel() == 0:
        return 0
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(reach + 1) * tensor.itemsize


def _wrong_error(problems: Mapping[str, str]) -> StagingError:
    names = list(problems)
    listed = "; ".join(f"{fqn!r} {problems[fqn]}" for fqn in names[:_MAX_NAMED])
    return StagingError(
        f"{len(names)} staged tensors do not fit the state: {listed}. The stager must keep the structure "
        "that it was given",
        fqns=names[:_MAX_NAMED],
        count=len(names),
    )


def named(fqns: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    return listed(fqns, most=_MAX_NAMED)


def changed_error(fqns: Sequence[str]) -> StagingError:
    """The copies of these tensors are not what the state was."""
    return StagingError(
        f"the staged copies of {len(fqns)} tensors differ from the state to be saved: {named(fqns)}. "
        "The state changed while it was copied, or an old copy was given; let nothing write to it before "
        "staging_completion (or hold the stager's lock() around optimizer.step())",
        fqns=list(fqns[:_MAX_NAMED]),
        count=len(fqns),
    )
