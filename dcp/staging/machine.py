"""One staging: sources into an arena, guarded, with everything kept that the next one can use again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dcp.staging.arena import HostArena
from dcp.staging.copies import Copies, DeviceWork, HostCopier
from dcp.staging.guard import changed_error
from dcp.staging.layout import Layout, Structure, pointers_of, ties_of
from dcp.staging.samples import Guard, Samples, plain_host
from dcp.staging.tree import StateTree
from dcp.storage.formats.index import Int64

__all__ = ["DictStaging", "Machine", "Slot", "Staging"]


@dataclass(eq=False)
class Slot:
    """An arena and how it was divided the last time."""

    arena: HostArena
    layout: Layout | None = None

    def laid_out(self, structure: Structure, sources: Sequence[torch.Tensor]) -> Layout:
        """Views for ``sources``: the last ones where they fit, as they do for saves of one training state."""
        if self.layout is None or not self.layout.fits(structure, self.arena):
            self.layout = None  # its views would keep the old mapping
            self.layout = Layout.make(structure, sources, self.arena)
        return self.layout

    def close(self) -> None:
        """Let go of the memory."""
        self.layout = None
        self.arena.close()


class Machine:
    """Copies with the threads and streams of one stager."""

    def __init__(self, guard: Guard, threads: int | None) -> None:
        self.guard: Guard = guard
        self.copier = HostCopier(threads)
        self.streams: dict[torch.device, torch.Stream] = {}
        self._serial = 0

    def begin(
        self, slot: Slot, sources: Sequence[torch.Tensor], structure_of: Callable[[Int64], Structure]
    ) -> Staging:
        """Look at the sources and make room; `Staging.run` copies, in this or in another thread.

        ``structure_of`` makes the structure from the numbers of ties. Called by the thread that computes.
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
        return Staging(self, layout, list(sources), pointers, plain, samples)

    def stage(self, slot: Slot, state_dict: Mapping[str, Any], *, type_check: bool = False) -> DictStaging:
        """Begin to stage a whole state dict, as torch's protocol has it."""
        tree = StateTree(state_dict, type_check=type_check)
        return DictStaging(tree, self.begin(slot, tree.sources, partial(Structure.of, tree.sources)))

    def close(self) -> None:
        """End the threads."""
        self.copier.close()
        self.streams.clear()


class Staging:
    """A staging that was begun; it keeps the sources until it is dropped."""

    def __init__(
        self,
        machine: Machine,
        layout: Layout,
        sources: list[torch.Tensor],
        pointers: Int64,
        plain: npt.NDArray[np.bool_],
        samples: Samples,
    ) -> None:
        self.layout = layout
        self._machine = machine
        self._samples = samples
        self._copies = Copies(
            targets=layout.views,
            sources=sources,
            sizes_bytes=layout.sizes_bytes,
            itemsizes=layout.itemsizes,
            pointers=pointers,
            target_pointers=pointers_of(layout.views),
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
        # begun first: the host's tensors are copied while the device's are on their way
        arrive = self._devices.begin(self._copies, self._elsewhere, self._machine.streams)
        try:
            self._machine.copier.copy(self._copies, self._here)
        finally:
            arrive()
        views = self.layout.views
        plain = np.ones(len(views), np.bool_)
        return self._samples.differing(views, pointers=self._copies.target_pointers, plain=plain)


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
        return self.tree.rebuilt(self.staging.layout.views)
