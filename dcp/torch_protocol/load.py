"""A load by torch's protocol: plans made of objects, for a planner or storage that overrides a step.

The sequence of calls is the one that torch documents for StorageReader and LoadPlanner.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from hashlib import blake2b
from typing import TYPE_CHECKING

import msgpack
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.quantized_hf_storage import (
    QuantizedHuggingFaceStorageReader as TorchQuantizedReader,
)

from dcp.features.per_rank import PerRankValues
from dcp.features.stateful import GivenState, Stored
from dcp.features.strictness import unexpected_keys
from dcp.loading.load import LoadEngine, whole_reader
from dcp.loading.report import LoadReport
from dcp.planners.load.options import LoadOptions
from dcp.planners.torch_plans import index_from_metadata
from dcp.ranks.handshake import begin, check_same_checkpoint
from dcp.ranks.options import of_load
from dcp.storage.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError, PlanError
from dcp.storage.formats.native.manifest import encode_manifest
from dcp.storage.torch_compat import weight_scales
from dcp.torch_protocol.calls import PICKLED, call_with_optional, one_each

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
    from torch.distributed.checkpoint.storage import StorageReader

    from dcp.loading.planner import DefaultLoadPlanner
    from dcp.ranks.collectives import Ranks
    from dcp.storage.torch_storage.reader import FileSystemReader

__all__ = ["ProtocolLoad"]


class ProtocolLoad(LoadEngine):
    """One load with any planner and any storage; ``ours`` and ``storage`` are the same where they are of this
    package, else None."""

    def __init__(
        self,
        reader: StorageReader,
        planner: LoadPlanner,
        ranks: Ranks,
        options: LoadOptions,
        ours: DefaultLoadPlanner | None,
        storage: FileSystemReader | None,
    ) -> None:
        super().__init__(ranks, options, ours, storage)
        self._reader = reader
        self._planner = planner
        self._together = True
        self._share: Callable[[], LoadPlan] | None = None

    def run(self, targets: GivenState, report: LoadReport) -> None:
        """Metadata and plan; what nobody takes; what the planner makes of the plan, by the reader."""
        begun = time.perf_counter()
        ranks, storage = self.ranks, self._storage
        refuses = self.options.unexpected == "error"
        places = begin(
            ranks,
            self._place,
            manner=["by torch's protocol"],
            options=of_load(self.options, self._ours, storage),
            kinds=targets.kinds,
        )

        def plan() -> None:
            self._share = ranks.reduce_scatter(
                "plan",
                lambda: self._local_plan(targets),
                lambda plans: one_each(
                    self._reader.prepare_global_plan(self._planner.create_global_plan(plans)), len(plans)
                ),
                sent=PICKLED,
                reply=PICKLED,
            )
            if storage is not None:  # of others nobody knows what a checkpoint is known by
                check_same_checkpoint(ranks, places, lambda: _fingerprint(storage) if self._together else b"")
            if refuses and (planner := self._ours) is not None:
                ranks.reduce_alike("unexpected", lambda: self._left(planner), _check_left)

        self.fit(targets, plan)
        report.seconds["plan"] = time.perf_counter() - begun
        begun = time.perf_counter()
        self.ranks.all_gather("read", self._read)
        report.seconds["read"] = time.perf_counter() - begun
        if self._ours is not None:
            report.note_plan(self._ours.call)
        if self._storage is not None:
            if self._storage.index is not None:
                report.note_source(self._storage.index)
            report.note_reading(self._storage.stats)

    def _place(self) -> str:
        if self._storage is not None:
            return self._storage.place.url
        return str(getattr(self._reader, "checkpoint_id", ""))

    def _local_plan(self, targets: GivenState) -> LoadPlan:
        reader, planner, ranks = self._reader, self._planner, self.ranks
        metadata, self._together = _read_metadata(reader, ranks.rank)
        if self._storage is not None:
            self._storage.use_verify(self.options.verify)
        planner.set_up_planner(targets.state(_stored(metadata, ranks.rank)), metadata, ranks.is_coordinator)
        if self._ours is not None:
            self._ours.adopt()
        call_with_optional(
            reader.set_up_storage_reader,
            (metadata, ranks.is_coordinator),
            {"rank": ranks.rank, "use_collectives": self._together},
        )
        plan = planner.create_local_plan()
        if self._ours is not None:
            self._ours.check_chosen()
            own = _per_rank(self._ours)
            if own is not None and own.rescaled and self._storage is None:
                raise PlanError(
                    f"{type(reader).__name__} cannot read the states of all ranks, which rescaling "
                    f"{own.rescaled[0].name!r} needs: load with dcp.FileSystemReader, or by as many "
                    "ranks as saved"
                )
        return reader.prepare_local_plan(plan)

    def _read(self) -> bytes:
        if self._share is None:
            raise CheckpointError("the load was not planned")
        plan = self._planner.finish_plan(self._share())
        self._reader.read_data(plan, self._planner).wait()
        ours, storage = self._ours, self._storage
        own = _per_rank(ours) if ours is not None else None
        if ours is not None and storage is not None and own is not None and own.rescaled:
            with storage.engine(storage.read_index(), self.options.verify) as engine:
                for session in ours.call.sessions:
                    session.loaded(whole_reader(ours.call, storage, engine))
        return b""

    def _left(self, planner: DefaultLoadPlanner) -> bytes:
        """Names that this rank does not take, and those of them that it should have a place for."""
        reader = self._reader
        # What a reader makes other tensors of is no tensor of the model.
        scales = weight_scales(reader) if isinstance(reader, TorchQuantizedReader) else set()
        lost = [name for name in planner.call.lost if name not in scales]
        names = list(planner.metadata.state_dict_metadata) if lost and planner.metadata is not None else []
        if not self._together and lost:
            raise unexpected_keys(names, lost)  # of metadata that this rank alone has
        return bytes(
            msgpack.packb([list(planner.call.unexpected), lost, names if self.ranks.is_coordinator else []])
        )


def _per_rank(planner: DefaultLoadPlanner) -> PerRankValues | None:
    return next((each for each in planner.call.sessions if isinstance(each, PerRankValues)), None)


def _check_left(ranks: list[bytes]) -> bytes:
    """As `dcp.features.strictness.check_left`, by names: each rank has read metadata of its own."""
    told = [msgpack.unpackb(part) for part in ranks]
    left = set.intersection(*(set(unexpected) for unexpected, _, _ in told))
    lost = [name for name in dict.fromkeys(name for _, lost, _ in told for name in lost) if name in left]
    if lost:
        raise unexpected_keys(max((names for _, _, names in told), key=len), lost)
    return b""


def _stored(metadata: Metadata, rank: int) -> Stored:
    entries = metadata.state_dict_metadata
    values = {name for name, kind in entries.items() if isinstance(kind, BytesStorageMetadata)}
    return Stored(entries, values, lambda: index_from_metadata(metadata), rank)


def _fingerprint(reader: FileSystemReader) -> bytes:
    return blake2b(encode_manifest(reader.read_index())).digest()


def _read_metadata(reader: StorageReader, rank: int) -> tuple[Metadata, bool]:
    """The global metadata, or this rank's own where the checkpoint was saved without collectives."""
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
