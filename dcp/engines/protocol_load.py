"""Load by torch's protocol, for a planner or storage that overrides a step.

Calls follow torch's documentation of StorageReader and LoadPlanner.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from hashlib import blake2b
from typing import TYPE_CHECKING

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.quantized_hf_storage import (
    QuantizedHuggingFaceStorageReader as TorchQuantizedReader,
)

from dcp.engines.protocol_calls import PICKLED, call_with_optional, one_each
from dcp.loading.feature import LoadFeature, Target
from dcp.loading.load import LoadEngine, read_whole
from dcp.planners.load.selection import LoadOptions
from dcp.ranks.agreement import begin, check_same_checkpoint
from dcp.storage.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError, PlanError
from dcp.storage.formats.native.manifest import encode_manifest
from dcp.storage.torch_compat import weight_scales
from dcp.storage.torch_storage.metadata import index_from_metadata

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
    from torch.distributed.checkpoint.storage import StorageReader

    from dcp.default_planner import DefaultLoadPlanner
    from dcp.ranks.collectives import Ranks
    from dcp.storage.torch_storage.reader import FileSystemReader


class ProtocolLoad(LoadEngine):
    """Load with any planner and reader; ``planner`` and ``storage`` are None for custom ones.

    Features take part if the planner is dcp's, without views, destinations and boxes.
    """

    def __init__(
        self,
        ranks: Ranks,
        options: LoadOptions,
        planner: DefaultLoadPlanner | None,
        storage: FileSystemReader | None,
        features: Sequence[type[LoadFeature]],
        *,
        reader: StorageReader,
        any_planner: LoadPlanner,
    ) -> None:
        super().__init__(ranks, options, planner, storage, features)
        self._reader, self._planner = reader, any_planner
        self._together = True
        self._share: Callable[[], LoadPlan]

    def run(self, target: Target) -> None:
        """Read metadata, plan, find unexpected entries, and read by planner and reader."""
        begun = time.perf_counter()
        ranks, storage = self.ranks, self.storage
        manner = ["by torch's protocol"]
        places = begin(ranks, self._place, manner=manner, options=self.agreed, kinds=target.kinds)

        def plan() -> None:
            self._share = ranks.reduce_scatter(
                "plan",
                lambda: self._local_plan(target),
                lambda plans: one_each(
                    self._reader.prepare_global_plan(self._planner.create_global_plan(plans)), len(plans)
                ),
                sent=PICKLED,
                reply=PICKLED,
            )
            if storage is not None:  # readers of other packages have no fingerprint of a checkpoint
                check_same_checkpoint(ranks, places, lambda: _fingerprint(storage) if self._together else b"")
            if self.call is not None:
                findings = partial(self.features.packed, "findings", is_shared=self._together)
                ranks.reduce_alike("unexpected", findings, self.judge)

        self.fit(target, plan)
        self.report.seconds["plan"] = time.perf_counter() - begun
        ranks.all_gather("read", self._read)

    def _place(self) -> str:
        if self.storage is not None:
            return self.storage.place.url
        return str(getattr(self._reader, "checkpoint_id", ""))

    def _local_plan(self, target: Target) -> LoadPlan:
        reader, planner, ranks, ours = self._reader, self._planner, self.ranks, self.planner
        metadata, self._together = _read_metadata(reader, ranks.rank)
        if self.storage is not None:
            self.storage.asked_verify = self.options.verify
        state = target.state(cache(partial(index_from_metadata, metadata)), ranks.rank)
        planner.set_up_planner(state, metadata, ranks.is_coordinator)
        if ours is not None:
            self.call = ours.adopt()
        call_with_optional(
            reader.set_up_storage_reader,
            (metadata, ranks.is_coordinator),
            {"rank": ranks.rank, "use_collectives": self._together},
        )
        plan = planner.create_local_plan()
        call = self.call
        if ours is not None and call is not None:
            ours.check_chosen()
            if isinstance(reader, TorchQuantizedReader):
                call.scales = weight_scales(reader)
            rescaled = [name for feature in self.features.all for name in feature.whole]
            if rescaled and self.storage is None:
                raise PlanError(
                    f"{rescaled[0]!r} cannot be rescaled, because {type(reader).__name__} cannot read the "
                    "states of all ranks: load with dcp.FileSystemReader, or on as many ranks as saved"
                )
        return reader.prepare_local_plan(plan)

    def _read(self) -> bytes:
        begun = time.perf_counter()
        plan = self._planner.finish_plan(self._share())
        self._reader.read_data(plan, self._planner).wait()
        call, storage = self.call, self.storage
        if call is not None and storage is not None and any(feature.whole for feature in self.features.all):
            with storage.engine(storage.read_index(), self.options.verify) as engine:
                self.features.each("loaded", partial(read_whole, call, storage, engine))
        if call is not None:
            self.features.each("put")
            call.store()
        self.report.note(call, *((storage.index, storage.stats) if storage is not None else (None, None)))
        if call is not None:
            self.features.each("done", self.report, is_coordinator=self.ranks.is_coordinator)
        self.report.seconds["read"] = time.perf_counter() - begun
        return b""


def _fingerprint(reader: FileSystemReader) -> bytes:
    return blake2b(encode_manifest(reader.read_index())).digest()


def _read_metadata(reader: StorageReader, rank: int) -> tuple[Metadata, bool]:
    """Return the global metadata, or this rank's own where the checkpoint was saved without collectives."""
    try:
        return reader.read_metadata(), True
    except (OSError, CheckpointNotFoundError) as error:
        if "kwargs" not in inspect.signature(reader.read_metadata).parameters:
            raise
        try:
            return reader.read_metadata(rank=rank), False
        except (OSError, CheckpointNotFoundError):
            raise error from None
    except (EOFError, AttributeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CorruptCheckpointError(f"the checkpoint's metadata cannot be read: {error}") from error
