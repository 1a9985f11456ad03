"""One staging: sources into an arena, guarded, with everything kept that the next one can use again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from dcp.staging.copies import DeviceWork, HostCopier, HostCopies
from dcp.staging.guarding.guard import changed_error
from dcp.staging.guarding.samples import Guard, Samples, plain_host
from dcp.staging.layout import ArenaLayout, SourceStructure, pointers_of, ties_of
from dcp.staging.memory.arena import ArenaKind, HostArena
from dcp.staging.tree import StateTree
from dcp.storage.formats.index import Int64

__all__ = ["DictStaging", "Memory", "Slot", "Staging", "StateCopier"]


class Memory(NamedTuple):
    """What kind of arena a staging takes."""

    kind: ArenaKind
    page_locked: bool

    @classmethod
    def for_sources(cls, sources: Sequence[torch.Tensor], *, shared: bool, pinned: bool) -> Memory:
        """Shared where another process is to see it; page-locked for sources on a device, if ``pinned``."""
        pinned = pinned and torch.accelerator.is_available() and not all(source.is_cpu for source in sources)
        return cls("shared" if shared else "pinned" if pinned else "private", pinned)


@dataclass(eq=False)
class Slot:
    """An arena and how it was divided the last time."""

    arena: HostArena
    layout: ArenaLayout | None = None

    def laid_out(self, structure: SourceStructure, sources: Sequence[torch.Tensor]) -> ArenaLayout:
        """Views for ``sources``: the last ones where they fit, as they do for saves of one training state."""
        if self.layout is None or not self.layout.fits(structure, self.arena):
            self.layout = None  # its views would keep the old mapping
            self.layout = ArenaLayout.make(structure, sources, self.arena)
        return self.layout

    @classmethod
    def of(cls, slot: Slot | None, memory: Memory) -> Slot:
        """``slot``, or in its place a new one where it is not of that memory."""
        if slot is not None:
            if (slot.arena.kind, slot.arena.page_locked) == memory:
                return slot
            slot.close()
        return cls(HostArena(memory.kind, page_locked=memory.page_locked))

    def close(self) -> None:
        """Let go of the memory."""
        self.layout = None
        self.arena.close()


class StateCopier:
    """Copies with the threads and streams of one stager."""

    def __init__(self, guard: Guard, threads: int | None) -> None:
        self.guard: Guard = guard
        self.host = HostCopier(threads)
        self.streams: dict[torch.device, torch.Stream] = {}
        self._serial = 0

    def begin(
        self, slot: Slot, sources: Sequence[torch.Tensor], structure_of: Callable[[Int64], SourceStructure]
    ) -> Staging:
        """Look at the sources and make room; `Staging.run` copies, in this or in another thread.

        No source is a lazily conjugated or negated view (see `resolved`). ``structure_of`` makes the
        structure from the numbers of ties. Called by the thread that computes.
        """
        self._serial += 1
        pointers = pointers_of(sources)
        layout = slot.laid_out(structure_of(ties_of(sources, pointers)), sources)
        plain = plain_host(sources)
        samples = Samples.take(
            sources,
            self.guard,
            serial=self._serial,
            pointers=pointers,
            plain=plain,
            sizes_bytes=layout.sizes_bytes,
            itemsizes=layout.itemsizes,
        )
        return Staging(self, slot.arena, layout, list(sources), pointers, plain, samples)

    def stage(self, slot: Slot, tree: StateTree) -> DictStaging:
        """Begin to stage a whole state dict, as torch's protocol has it."""
        return DictStaging(tree, self.begin(slot, tree.sources, partial(SourceStructure.of, tree.sources)))

    def close(self) -> None:
        """End the threads."""
        self.host.close()
        self.streams.clear()


class Staging:
    """A staging that was begun; it keeps the sources until it is dropped."""

    def __init__(
        self,
        copier: StateCopier,
        arena: HostArena,
        layout: ArenaLayout,
        sources: list[torch.Tensor],
        pointers: Int64,
        plain: npt.NDArray[np.bool_],
        samples: Samples,
    ) -> None:
        self.layout = layout
        self._copier = copier
        self._arena = arena
        self._samples = samples
        self._copies = HostCopies(
            targets=layout.memory.tensors,
            sources=sources,
            sizes_bytes=layout.sizes_bytes,
            itemsizes=layout.itemsizes,
            pointers=pointers,
            target_pointers=layout.memory.pointers,
            contiguous=plain,
        )
        on_device = np.zeros(len(sources), np.bool_)
        for row in np.flatnonzero(~plain).tolist():
            on_device[row] = not sources[row].is_cpu
        self._here = layout.copied[~on_device[layout.copied]]
        self._elsewhere = layout.copied[on_device[layout.copied]].tolist()
        self._devices = DeviceWork({sources[row].device for row in self._elsewhere})

    def run(self) -> list[int]:
        """Copy; returns the numbers of the sources whose copies are not what they were at the beginning."""
        if self._arena.is_new:
            self._copier.host.populate(self._arena)
        # begun first: the host's tensors are copied while the device's are on their way
        arrive = self._devices.begin(self._copies, self._elsewhere, self._copier.streams)
        try:
            self._copier.host.copy(self._copies, self._here)
        finally:
            arrive()
        memory = self.layout.memory
        return self._samples.differing(memory.tensors, pointers=memory.pointers, plain=memory.is_plain)


@dataclass(frozen=True, eq=False)
class DictStaging:
    """A staging of a whole state dict."""

    tree: StateTree
    staging: Staging

    def run(self) -> dict[str, Any]:
        """Copy; returns the copy. Raises StagingError where it is not what the state was."""
        wrong = self.staging.run()
        if wrong:
            raise changed_error(self.tree.fqns(wrong))
        return self.tree.rebuilt(self.staging.layout.memory.tensors)
