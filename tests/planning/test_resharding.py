"""Save by one layout, load by another: the identity, with every byte written and read exactly once."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp.planners.load.plan import plan_load
from dcp.planners.save.global_plan import GlobalSavePlan, plan_save
from dcp.planners.wire.codec import (
    decode_save_columns,
    decode_write_columns,
    encode_save_columns,
    encode_write_columns,
)
from tests.support.planning_simulation import (
    ITEM_BYTES,
    Held,
    Layout,
    held_by,
    read,
    save_columns,
    tensor_shapes,
    wanted_columns,
    whole_tensor,
    worlds,
    write,
)


@settings(deadline=None, max_examples=80)
@given(
    data=st.data(), shapes=tensor_shapes, lowest=st.booleans(), split=st.sampled_from([None, 8, 64, 1 << 20])
)
def test_load_after_save_is_the_identity(
    data: st.DataObject, shapes: dict[str, tuple[int, ...]], lowest: bool, split: int | None
) -> None:
    """Any sharding saved, any other loaded: all elements arrive, each read once, each byte stored once."""
    saving, loading = data.draw(worlds(shapes)), data.draw(worlds(shapes))
    sent = [encode_save_columns(save_columns(tensors)) for tensors in saving]
    columns = [decode_save_columns(part) for part in sent]
    plan = plan_save(columns, dedup_to_lowest_rank=lowest, split_bytes=split, check_coverage=True)
    replies = [decode_write_columns(encode_write_columns(writes)) for writes in plan.writes]
    disk = write(GlobalSavePlan(plan.index, replies), saving)
    stored = sum(payload.size for payload in disk.payloads.values())
    assert stored == sum(whole_tensor(shape).size for shape in shapes.values())
    assert sum(disk.written_bytes) == stored * ITEM_BYTES
    for tensors in loading:
        dests = [np.full(held.local.shape, -1, np.int64) for held in tensors.values()]
        counts = read(plan_load(plan.index, wanted_columns(tensors)), disk, dests)
        for held, dest, count in zip(tensors.values(), dests, counts, strict=True):
            assert np.array_equal(dest, held.local)
            assert (count == 1).all()


def test_more_than_a_hundred_ranks() -> None:
    """Saved by 120 ranks, of which many hold nothing, in shards and replicas of shards; loaded by 7, and by
    144 along the other dimension."""
    shapes = {
        "even": (240, 3),
        "uneven": (250,),
        "few": (5, 4),
        "scalar": (),
        "empty": (0, 2),
        "cut": (6, 77),
    }
    saving = Layout((120,), ((0, 1),)), Layout((10, 12), (None, (0, 1))), Layout((10, 12), ((0, 1), (0, 2)))
    loading = Layout((7,), ((0, 1),)), Layout((12, 12), ((1, 1), None))

    def world(layouts: tuple[Layout, ...]) -> list[dict[str, Held]]:
        ranks: list[dict[str, Held]] = [{} for _ in range(layouts[0].world_size)]
        for number, (fqn, shape) in enumerate(shapes.items()):
            layout = layouts[number % len(layouts)]
            deepest = max((step[0] for step in layout.steps if step), default=0)
            if deepest >= len(shape):
                layout = Layout(layout.mesh, tuple(None for _ in layout.mesh))
            for rank, tensors in enumerate(ranks):
                tensors[fqn] = held_by(whole_tensor(shape, number), layout, rank)
        return ranks

    ranks = world(saving)
    columns = [decode_save_columns(encode_save_columns(save_columns(tensors))) for tensors in ranks]
    plan = plan_save(columns, check_coverage=True)
    disk = write(plan, ranks)
    assert sum(payload.size for payload in disk.payloads.values()) == sum(map(math.prod, shapes.values()))
    for layout in loading:
        for tensors in world((layout,)):
            dests = [np.full(held.local.shape, -1, np.int64) for held in tensors.values()]
            read(plan_load(plan.index, wanted_columns(tensors)), disk, dests)
            for held, dest in zip(tensors.values(), dests, strict=True):
                assert np.array_equal(dest, held.local)
