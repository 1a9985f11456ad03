"""An index without some of its entries. Internal: pure, for any choice of entries, where a drop makes one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dcp
from dcp.storage.formats.dropped import DroppedPart, dropped_from, noted_in, without
from dcp.storage.formats.index import CheckpointIndex
from tests.support.examples import examples


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> CheckpointIndex:
    """Of tensors of all sorts, in a file each, tied and empty ones among them, and values of which two are
    equal."""
    weight = torch.arange(12.0).view(3, 4)
    state: dict[str, Any] = {
        "a": {
            "w": weight,
            "tied": weight,
            "turned": torch.arange(6).view(2, 3).t(),
            "none": torch.zeros(0, 2),
        },
        "b": {"scalar": torch.tensor(3), "half": torch.ones(5, dtype=torch.bfloat16), "lr": 0.1, "empty": {}},
        "c": {"lr": 0.1, "name": "x", 7: {"deep": torch.ones(2)}},
    }
    folder = tmp_path_factory.mktemp("dropped")
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=False, digests=True)
    dcp.save(state, storage_writer=writer, no_dist=True)
    return dcp.open_index(folder)


@examples(60)
@given(data=st.data())
def test_what_stays_is_as_it_was(index: CheckpointIndex, data: st.DataObject) -> None:
    """Whatever goes: each tensor has its shape, place and checksums, each value its value, and no file is
    named that nothing is in."""
    names = [*index.fqns, *index.objects.fqns]
    dropped = set(data.draw(st.lists(st.sampled_from(names), unique=True)))
    found = without(index, dropped)
    found.check()
    assert [*found.fqns, *found.objects.fqns] == [name for name in names if name not in dropped]
    for row, name in enumerate(found.fqns):
        old = index.position[name]
        assert (found.shape(row), found.dtype(row)) == (index.shape(old), index.dtype(old))
        assert found.digests[row] == index.digests[old]
        assert found.stride_orders.get(row) == index.stride_orders.get(old)
        for new, before in zip(found.chunks(row), index.chunks(old), strict=True):
            assert found.box(new) == index.box(before)
            places = [
                (one.files[one.chunk_files[at]], int(one.payload_offsets[at]), one.block_crcs(at).tolist())
                for one, at in ((found, new), (index, before))
            ]
            assert places[0] == places[1]
    for row, name in enumerate(found.objects.fqns):
        old = index.objects.position[name]
        assert (
            found.objects.values[found.objects.plain[row]] == index.objects.values[index.objects.plain[old]]
        )
    used = set(found.chunk_files.tolist()) | set(found.objects.files[found.objects.files >= 0].tolist())
    assert used == set(range(len(found.files)))
    assert set(found.planner_data) == set(names) - dropped


@pytest.mark.parametrize(
    "note",
    [
        None,
        5,
        "optimizer",
        [None, 3, "x", []],
        [{"name": 3, "patterns": ["a"], "time": 1.0}],
        [{"name": "a", "patterns": "a", "time": 1.0}],
        [{"name": "a", "patterns": ["a"], "time": "now"}],
    ],
)
def test_a_note_by_a_stranger_is_none(note: Any) -> None:
    """What no drop writes says nothing, and does no harm."""
    assert dropped_from({"dropped": note}) == ()


def test_a_note_is_read_as_it_was_written() -> None:
    """Behind those from before; times that no calendar has are told all the same."""
    part = DroppedPart("optimizer", ("a*", "b"), 1.5, 3, 2, 100)
    provenance = noted_in(noted_in({"save_id": "x"}, part), part)
    assert dropped_from(provenance) == (part, part)
    assert provenance["save_id"] == "x"
    assert str(DroppedPart("ema", (), 1e300, 0, 0, 0)) == "ema was dropped on an unknown day"
