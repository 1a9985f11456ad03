"""One staging: sources into an arena, guarded, with everything kept that the next one can use again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from dcp.staging.arena import HostArena
from dcp.staging.copies import Copies, DeviceWork, HostCopier
from dcp.staging.layout import Layout, Structure, pointers_of, ties_of
from dcp.staging.samples import Guard, Samples, plain_host
from dcp.storage.formats.index import Int64

__all__ = ["Machine", "Slot", "Staging"]


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
        samples = Samples.take(sources, self.guard, serial=self._serial, pointers=pointers, plain=plain)
        return Staging(self, layout, list(sources), pointers, plain, samples)

    def close(self) -> None:
        """End the threads."""
        self.copier.close()
        self.streams.clear()


class Staging:
    """A staging that was begun; it keeps the sources until it is done."""

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
        self._target_pointers = pointers_of(layout.views)
        self._copies = Copies(
            layout.views,
            sources,
            layout.copied,
            layout.sizes_bytes,
            layout.itemsizes,
            pointers,
            self._target_pointers,
            plain,
        )
        self._elsewhere = (
            [] if plain.all() else [row for row in layout.copied.tolist() if not sources[row].is_cpu]
        )
        self._devices = DeviceWork({sources[row].device for row in self._elsewhere})

    def run(self) -> list[int]:
        """Copy; returns the numbers of the sources whose copies are not what they were at the beginning."""
        copies = self._copies
        if self._elsewhere:
            # begun first: the host's tensors are copied while the device's are on their way
            arrive = self._devices.begin(copies, self._elsewhere, self._machine.streams)
            copies.rows = np.setdiff1d(copies.rows, self._elsewhere)
            self._machine.copier.copy(copies)
            arrive()
        else:
            self._machine.copier.copy(copies)
        return self._samples.differing(self.layout.views, pointers=self._target_pointers, plain=None)
