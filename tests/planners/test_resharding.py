"""Save by one layout, load by another: the identity, with every byte written and read exactly once."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp.planners.codec import (
    decode_save_columns,
    decode_write_columns,
    encode_save_columns,
    encode_write_columns,
)
from dcp.planners.global_plan import GlobalSavePlan, plan_save
from dcp.planners.load_plan import plan_load
from tests.planners.simulation import (
    ITEM_BYTES,
    read,
    save_columns,
    tensor_shapes,
    wanted_columns,
    whole_tensor,
    worlds,
    write,
)


@settings(deadline=None, max_examples=150)
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
