"""`dcp.prove`: whether what was saved is what is in the model now."""

from __future__ import annotations

import os
from collections.abc import Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from dcp.calls.arguments import stateful_to_plain
from dcp.calls.plain_errors import plain_errors
from dcp.features.saved_map import mapped_state
from dcp.inspection.values.tensor_reading import open_tensors
from dcp.planners.columns import SectionCache
from dcp.planners.load.selection import Patterns, Selection
from dcp.planners.save.planner import DefaultSavePlanner
from dcp.planners.weight_maps.weight_map import WeightMap
from dcp.proving.comparison import RankDigests, compare_ranks, digests_of_rank
from dcp.proving.proof import Proof
from dcp.ranks.collectives import Ranks, begin, check_same_checkpoint, raise_on_all_ranks, works_alone
from dcp.ranks.exchanges import DEFAULT_TIMEOUT_SECONDS
from dcp.storage.formats.native.manifest import encode_manifest

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["prove"]


@plain_errors
def prove(
    state_dict: dict[str, Any],
    checkpoint_id: str | os.PathLike[str],
    *,
    process_group: ProcessGroup | None = None,
    no_dist: bool = False,
    only: Patterns | None = None,
    exclude: Patterns | None = None,
    map: WeightMap | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    storage_options: Mapping[str, Any] | None = None,
) -> Proof:
    """Compare a state dict with a checkpoint; every rank of the process group calls it alike.

    Names, dtypes, shapes, the bytes of tensors (by their digests) and values: of models, optimizers, data
    loaders and generators, in whatever mesh, as `dcp.save` would take them now. Replicas are compared on each
    rank. Where the manifest has digests nothing but that is read, unless something differs.

    Args:
        state_dict: What `dcp.load` has filled, or `dcp.save` has saved; nothing of it changes.
        checkpoint_id: A path or URL of a checkpoint or file of any format.
        process_group: The ranks that have the state; the default group without it.
        no_dist: This process alone has it.
        only: Shell globs on flat keys, as for `dcp.load`: what they match, and everything below.
        exclude: The same for what is left out.
        map: From the model definition of ``state_dict`` to that of the checkpoint, as for `dcp.save`: after a
            load through a map its ``inverse``. The names of all else are those behind it.
        timeout_seconds: The longest wait for other ranks.
        storage_options: Those of the file system of a URL, as for `dcp.save`.

    Returns:
        A `Proof`, the same on all ranks, with what differs on which of them.

    Raises:
        PlanError: The state could not be saved as it is, or the ranks called different operations.
        CheckpointNotFoundError: Nothing is committed there.
        CorruptCheckpointError: Bytes that had to be read are not those that were committed.
        CollectiveTimeoutError: Ranks did not answer in time.
    """
    alone = works_alone(process_group, no_dist=no_dist, operation="load")
    ranks = Ranks(process_group, use_dist=not alone, timeout_seconds=timeout_seconds, operation="prove")
    with raise_on_all_ranks(ranks):
        weights = None if map is None else WeightMap.of(map)
    shown = {"only": only, "exclude": exclude, "map": weights and weights.mark}
    places = begin(ranks, lambda: os.fspath(checkpoint_id), options=shown)

    def fingerprint() -> bytes:
        with open_tensors(checkpoint_id, storage_options=storage_options) as reader:
            return blake2b(encode_manifest(reader.index)).digest()

    check_same_checkpoint(ranks, places, fingerprint)

    def local() -> bytes:
        planner = DefaultSavePlanner(replica_check="off")
        planner.rank = ranks.rank
        planner.set_up_planner(stateful_to_plain(state_dict), is_coordinator=ranks.is_coordinator)
        own = planner.create_local_columns(digests=False)
        if weights is not None:
            own = mapped_state(own, weights, is_part=ranks.world_size > 1)
        return digests_of_rank(own).encode()

    def compared(shown: list[bytes]) -> bytes:
        sections: SectionCache = {}
        selection = Selection.of(only, exclude)
        with open_tensors(checkpoint_id, storage_options=storage_options, verify="full") as reader:
            save_id = reader.index.provenance.get("save_id")
            decoded = [RankDigests.decode(own, sections) for own in shown]
            return compare_ranks(decoded, reader, selection, save_id).to_json().encode()

    return Proof.of_json(ranks.reduce_broadcast("prove", local, compared).decode())
