"""A load by torch's protocol: plans made of objects, for a planner or storage that overrides a step.

The sequence of calls is the one that torch documents for StorageReader and LoadPlanner.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING

from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.quantized_hf_storage import (
    QuantizedHuggingFaceStorageReader as TorchQuantizedReader,
)

from dcp.loading.feature import LoadFeature, Stored, Target
from dcp.loading.load import LoadEngine, read_whole
from dcp.loading.report import LoadReport
from dcp.planners.load.options import LoadOptions
from dcp.planners.torch_plans import index_from_metadata
from dcp.ranks.collectives import begin, check_same_checkpoint
from dcp.storage.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError, PlanError
from dcp.storage.formats.native.manifest import encode_manifest
from dcp.storage.torch_compat import weight_scales
from dcp.torch_protocol.calls import PICKLED, call_with_optional, one_each

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
    from torch.distributed.checkpoint.storage import StorageReader

    from dcp.default_planner import DefaultLoadPlanner
    from dcp.ranks.collectives import Ranks
    from dcp.storage.torch_storage.reader import FileSystemReader

__all__ = ["ProtocolLoad"]


class ProtocolLoad(LoadEngine):
    """One load with any planner and any storage; ``ours`` and ``storage`` are the same where they are of this
    package, else None. Views are for loads on columns alone, the other steps of features for ``ours``."""

    def __init__(
        self,
        reader: StorageReader,
        planner: LoadPlanner,
        ranks: Ranks,
        options: LoadOptions,
        ours: DefaultLoadPlanner | None,
        storage: FileSystemReader | None,
        features: Sequence[type[LoadFeature]],
    ) -> None:
        super().__init__(ranks, options, ours, storage, features)
        self._reader = reader
        self._planner = planner
        self._together = True
        self._share: Callable[[], LoadPlan] | None = None

    def run(self, target: Target, report: LoadReport) -> None:
        """Read metadata and plan, find entries that no rank takes, and read by planner and reader."""
        begun = time.perf_counter()
        ranks, storage = self.ranks, self._storage
        manner = ["by torch's protocol"]
        kinds = target.kinds if ranks.world_size > 1 else None
        places = begin(ranks, self._place, manner=manner, options=self.agreed, kinds=kinds)

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
            if storage is not None:  # other packages' readers have no fingerprint of a checkpoint
                check_same_checkpoint(ranks, places, lambda: _fingerprint(storage) if self._together else b"")
            if self._ours is not None:
                ranks.reduce_alike("unexpected", lambda: self.findings(is_shared=self._together), self.judge)

        self.fit(target, plan)
        report.seconds["plan"] = time.perf_counter() - begun
        ranks.all_gather("read", lambda: self._read(report))

    def _place(self) -> str:
        if self._storage is not None:
            return self._storage.place.url
        return str(getattr(self._reader, "checkpoint_id", ""))

    def _local_plan(self, target: Target) -> LoadPlan:
        reader, planner, ranks, ours = self._reader, self._planner, self.ranks, self._ours
        metadata, self._together = _read_metadata(reader, ranks.rank)
        if self._storage is not None:
            self._storage.use_verify(self.options.verify)
        planner.set_up_planner(target.state(_stored(metadata, ranks.rank)), metadata, ranks.is_coordinator)
        if ours is not None:
            ours.adopt()
        call_with_optional(
            reader.set_up_storage_reader,
            (metadata, ranks.is_coordinator),
            {"rank": ranks.rank, "use_collectives": self._together},
        )
        plan = planner.create_local_plan()
        if ours is not None:
            ours.check_chosen()
            if isinstance(reader, TorchQuantizedReader):
                ours.call.scales = weight_scales(reader)
            rescaled = [name for feature in ours.call.features.part for name in feature.whole]
            if rescaled and self._storage is None:
                raise PlanError(
                    f"{type(reader).__name__} cannot read the states of all ranks, which rescaling "
                    f"{rescaled[0]!r} needs: load with dcp.FileSystemReader, or by as many "
                    "ranks as saved"
                )
        return reader.prepare_local_plan(plan)

    def _read(self, report: LoadReport) -> bytes:
        if self._share is None:
            raise CheckpointError("the load was not planned")
        begun = time.perf_counter()
        plan = self._planner.finish_plan(self._share())
        self._reader.read_data(plan, self._planner).wait()
        ours, storage = self._ours, self._storage
        if ours is not None and storage is not None and any(one.whole for one in ours.call.features.part):
            with storage.engine(storage.read_index(), self.options.verify) as engine:
                self.features.each("loaded", partial(read_whole, ours.call, storage, engine))
        if ours is not None:
            ours.call.store()
        report.note(
            None if ours is None else ours.call,
            None if storage is None else storage.index,
            None if storage is None else storage.stats,
        )
        if ours is not None:
            self.features.each("done", report, is_coordinator=self.ranks.is_coordinator)
        report.seconds["read"] = time.perf_counter() - begun
        return b""


def _stored(metadata: Metadata, rank: int) -> Stored:
    entries = metadata.state_dict_metadata
    values = {name for name, kind in entries.items() if isinstance(kind, BytesStorageMetadata)}
    return Stored(entries, values, lambda: index_from_metadata(metadata), rank)


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
