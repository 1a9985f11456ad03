"""From what a writer process reported to what the trainer's future gives."""

from __future__ import annotations

import pickle

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from dcp.background.error_codec import Verdict
from dcp.background.future import SaveFuture, SaveOutcome
from dcp.saving.engine import SaveOrder
from dcp.storage.errors import CheckpointConflictError, WriterProcessError
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.formats.opening.folder import open_index
from dcp.storage.torch_storage.metadata import LazyMetadata

__all__ = ["end_future"]


def end_future(
    future: SaveFuture,
    order: SaveOrder,
    found: Verdict,
    outcome: SaveOutcome | None,
    metadata: bytes | None,
    rank: int,
) -> None:
    """End ``future`` as ``found`` says; ``outcome`` and ``metadata`` are what this rank's writer reported."""
    error = found.error
    if error is None:
        try:
            result = _metadata(order, found.save_id, metadata, rank)
        except WriterProcessError as unknown:
            error = unknown
        except Exception as unknown:  # noqa: BLE001 - whatever it is, a caller waits for the future
            error = WriterProcessError(
                "the checkpoint is committed, but its metadata cannot be given: "
                f"{type(unknown).__name__}: {unknown}",
                committed=True,
                rank=rank,
            )
            error.__cause__ = unknown
        else:
            future.outcome = outcome if outcome is not None else SaveOutcome(found.save_id)
            future.set_result(result)
            return
    future.set_exception(error)


def _metadata(order: SaveOrder, save_id: str, sent: bytes | None, rank: int) -> Metadata:
    writer = order.engine.storage
    if writer is not None:
        store = writer.open_store(writer.path)
        own_rank = None if order.options.use_collectives else rank

        def index() -> CheckpointIndex:
            found = open_index(store, rank=own_rank)
            if found.provenance.get("save_id", save_id) != save_id:
                raise CheckpointConflictError(
                    f"{store.url} holds another checkpoint than the one whose metadata is asked for: it was "
                    "replaced since; look at metadata before the next save to the same id",
                    path=store.url,
                )
            return found

        return LazyMetadata.of(index, StorageMeta(checkpoint_id=writer.path, save_id=save_id))
    if sent is None:
        raise WriterProcessError(
            f"the checkpoint is committed, but the writer process of rank {rank} died before it said so; "
            "its metadata has to be read from the storage",
            committed=True,
            rank=rank,
        )
    metadata: Metadata = pickle.loads(sent)
    return metadata
