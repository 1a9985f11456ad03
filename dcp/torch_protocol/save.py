"""A save by torch's protocol: plans made of objects, for a planner or storage that overrides a step.

The sequence of calls is the one that torch documents for StorageWriter and SavePlanner. Plans and results
travel as `dcp.torch_protocol.plan_transport` packs them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult

from dcp.planners.save.planner import DefaultSavePlanner
from dcp.ranks.handshake import begin, check_same_target
from dcp.ranks.options import of_save
from dcp.saving.rank_state import PlanOptions, warn_of_foreign, warn_of_keys
from dcp.storage.formats.open import open_index
from dcp.storage.torch_metadata import LazyMetadata
from dcp.storage.writer import FileSystemWriter
from dcp.torch_protocol import plan_transport
from dcp.torch_protocol.calls import call_with_optional

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

    from dcp.ranks.collectives import Ranks

__all__ = ["save"]


def save(
    state: Callable[[], dict[str, Any]],
    writer: StorageWriter,
    ranks: Ranks,
    planner: SavePlanner,
    *,
    use_collectives: bool = True,
) -> Metadata:
    """Save what ``state`` gives with any planner and any storage; returns the metadata that the planner
    made."""
    made: list[Metadata] = []
    manner = ["by torch's protocol"] if use_collectives else ["by torch's protocol", "without collectives"]
    options = of_save(writer, PlanOptions.of(planner) if isinstance(planner, DefaultSavePlanner) else None)
    places = begin(ranks, lambda: _place_of(writer), manner=manner, options=options)
    if use_collectives:
        check_same_target(
            ranks, places, lambda: writer.store if isinstance(writer, FileSystemWriter) else None
        )
    scattered = len(set(places)) > 1

    def local_plan() -> SavePlan:
        given = state()
        call_with_optional(
            planner.set_up_planner,
            (given,),
            {"storage_meta": writer.storage_meta(), "is_coordinator": ranks.is_coordinator},
        )
        call_with_optional(
            writer.set_up_storage_writer,
            (ranks.is_coordinator,),
            {"rank": ranks.rank, "use_collectives": use_collectives},
        )
        plan = planner.create_local_plan()
        if ranks.is_coordinator:
            _warn_of_foreign(plan, planner.state_dict if hasattr(planner, "state_dict") else given)
            warn_of_keys(planner.foreign_keys if isinstance(planner, DefaultSavePlanner) else {})
        return writer.prepare_local_plan(plan)

    def global_plan(plans: list[SavePlan]) -> list[SavePlan]:
        plans, metadata = planner.create_global_plan(plans)
        made[:] = [metadata]
        return writer.prepare_global_plan(plans)

    def write(plan: SavePlan) -> list[WriteResult]:
        future = writer.write_data(planner.finish_plan(plan), planner)
        future.wait()
        return list(future.value())

    def finish(results: list[list[WriteResult]]) -> bytes:
        writer.finish(metadata=made[0], results=results)
        # What our writer published can be read again; a foreign storage need not be readable at all.
        return b"" if isinstance(writer, FileSystemWriter) else plan_transport.pack(made[0])

    try:
        if use_collectives:
            reply = ranks.reduce_scatter(
                "plan",
                lambda: plan_transport.pack(local_plan()),
                lambda parts: [
                    plan_transport.pack(plan)
                    for plan in global_plan([plan_transport.unpack(p) for p in parts])
                ],
            )
            published = ranks.reduce_broadcast(
                "write",
                lambda: plan_transport.pack(write(plan_transport.unpack(reply))),
                lambda parts: finish([plan_transport.unpack(part) for part in parts]),
            )
        else:
            ranks.all_gather("save", lambda: finish([write(global_plan([local_plan()])[0])]))
    except BaseException:
        if isinstance(writer, FileSystemWriter) and (
            ranks.is_coordinator or scattered or not use_collectives
        ):
            writer.discard()
        raise
    if made:
        return made[0]
    if isinstance(writer, FileSystemWriter):
        store = writer.store
        return LazyMetadata.of(lambda: open_index(store), writer.storage_meta())
    metadata: Metadata = plan_transport.unpack(published)
    return metadata


def _place_of(writer: StorageWriter) -> str:
    return (
        writer.store.url
        if isinstance(writer, FileSystemWriter)
        else str(getattr(writer, "checkpoint_id", ""))
    )


def _warn_of_foreign(plan: SavePlan, values: Mapping[str, Any]) -> None:
    """As a save on columns does, by what the planner was given; what it makes of that is its own."""
    names = (item.index.fqn for item in plan.items if item.type is WriteItemType.BYTE_IO)
    named = {name: values[name] for name in names if name in values}
    warn_of_foreign([*named], [*named.values()])
