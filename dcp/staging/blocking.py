"""`BlockingAsyncStager`: torch's simplest stager, on our copies."""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint.staging import BlockingAsyncStager as TorchBlockingAsyncStager

from dcp.staging.copier import Memory, Slot, StateCopier
from dcp.staging.tree import StateTree

__all__ = ["BlockingAsyncStager"]


class BlockingAsyncStager(TorchBlockingAsyncStager):
    """Copies the state dict to the CPU before `stage` returns.

    ``cache_staged_state_dict`` keeps the memory (with an accelerator page-locked) for the next copy, which
    then overwrites this one. Otherwise each copy has memory of its own, which goes with its tensors.
    ``type_check`` refuses values other than tensors, numbers, strings, bytes, dicts, lists, tuples.

    A copy that is not what the state was when it was asked for is a StagingError.
    """

    def __init__(self, cache_staged_state_dict: bool = False, type_check: bool = False) -> None:
        super().__init__(cache_staged_state_dict, type_check)
        self._copier = StateCopier("sampled", None)
        self._slot: Slot | None = None

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A copy of ``state_dict`` on the CPU."""
        kept = self.cache_staged_state_dict
        tree = StateTree(state_dict, type_check=self.type_check)
        memory = Memory.for_sources(tree.sources, shared=False, pinned=kept)
        slot, self._slot = Slot.of(self._slot, memory), None
        staged = self._copier.stage(slot, tree).run()
        if kept:
            self._slot, self.state_dict_cache = slot, staged
        else:
            slot.close()
        return staged

    def synchronize_staging(self) -> None:
        """Nothing: `stage` has waited."""

    def close(self) -> None:
        """Let go of threads and kept memory; idempotent. Copies that were given out stay valid."""
        self._copier.close()
        self.state_dict_cache = None
        if self._slot is not None:
            self._slot.close()
            self._slot = None
