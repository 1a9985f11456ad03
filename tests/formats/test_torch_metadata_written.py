"""`.metadata` written from columns. Internal: any index at all, where few saves would make one."""

from __future__ import annotations

import dataclasses
import io
import pickle
import pickletools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata

from dcp.errors import PlanError
from dcp.storage.formats import dtypes
from dcp.storage.formats.index import UNKNOWN, CheckpointIndex
from dcp.storage.formats.torch.metadata.writer import MAX_PLAIN_DEPTH, encode_torch_metadata
from dcp.storage.torch_compat import strides_of, tensor_properties
from tests.support.examples import examples
from tests.support.formats_metadata import (
    assert_same,
    decode_torch_metadata,
    index_of,
    indexes,
    make_index,
    rich_state_dict,
    stock_save,
)

COLUMNS = (
    "dtype_codes",
    "requires_grad",
    "shape_start",
    "shape_values",
    "chunk_start",
    "chunk_offsets",
    "chunk_sizes",
    "record_offsets",
    "record_lengths",
    "payload_lengths",
)


def decode(index: CheckpointIndex) -> Metadata:
    """What stock reads from the encoded index."""
    metadata = pickle.loads(encode_torch_metadata(index, checkpoint_id="here", save_id="abc"))
    assert isinstance(metadata, Metadata)
    return metadata


def test_equals_what_stock_wrote(tmp_path: Path) -> None:
    """The metadata of a stock save, through our index and encoder, is equal to the original."""
    original = stock_save(tmp_path, rich_state_dict())
    copy = decode(index_of(original))
    for entry in original.state_dict_metadata.values():
        if isinstance(entry, TensorStorageMetadata) and strides_of(entry.properties) is not None:
            # from torch 2.15 on: of the tensor that was saved, and refused by older ones
            entry.properties = tensor_properties(entry.properties.dtype, entry.properties.requires_grad, None)
    expected_meta = StorageMeta(checkpoint_id="here", save_id="abc")
    assert copy == dataclasses.replace(original, storage_meta=expected_meta)
    assert original.storage_data is not None and copy.storage_data is not None
    hints = {key: key.index for key in original.storage_data}
    assert {key: key.index for key in copy.storage_data} == hints
    assert [type(value) for value in copy.planner_data.values()] == [tuple] * len(original.planner_data)


def test_instances_and_attributes_are_stock_ones(tmp_path: Path) -> None:
    """Each object has exactly the instance state that stock gives it: no extra and no missing attribute."""
    original = stock_save(tmp_path, {"a": torch.ones(2, 3), "b": "text"})
    copy = decode(index_of(original))
    for name in ("a", "b"):
        assert vars(copy.state_dict_metadata[name]).keys() == vars(original.state_dict_metadata[name]).keys()
    for ours, theirs in zip(
        sorted(copy.storage_data, key=lambda key: str(key.fqn)),
        sorted(original.storage_data, key=lambda key: str(key.fqn)),
        strict=True,
    ):
        assert vars(ours) == vars(theirs)
        assert vars(copy.storage_data[ours]) == vars(original.storage_data[theirs])
    tensor = copy.state_dict_metadata["a"]
    assert isinstance(tensor, TensorStorageMetadata)
    assert type(tensor.size) is torch.Size
    assert type(tensor.chunks[0].offsets) is torch.Size
    assert tensor.properties.memory_format is torch.contiguous_format


def test_objects_without_blob_are_left_out() -> None:
    """An object stored only as a plain value has no place in .metadata; the others are complete."""
    index = make_index({}, ["stored", "plain"])
    objects = dataclasses.replace(
        index.objects, files=np.array([0, -1]), plain=np.array([-1, 0]), values=[b"\xc0"]
    )
    copy = decode(dataclasses.replace(index, objects=objects))
    assert list(copy.state_dict_metadata) == ["stored"]
    assert list(copy.storage_data) == [MetadataIndex("stored")]


@pytest.mark.parametrize(
    "data",
    [
        None,
        {},
        {"a": ("a", 0, "b"), "b": (), "c": (1 << 70, -1, -(1 << 40), 1 << 31, 1 << 5000)},
        {"a": (True, 1)},
        {"a": (1, True)},
        {1: ("a",)},
        {"a": ["list"], "b": {"deep": [1.5, None, b"x", ("t",)]}},
        "text\ud800",
    ],
)
def test_planner_data_keeps_values_and_types(data: Any) -> None:
    """Mappings and other plain data arrive equal, with exact types: True does not become 1."""
    copy = decode(make_index({}, planner_data=data)).planner_data
    assert repr(copy) == repr(data)


def test_planner_data_that_is_not_plain_is_refused() -> None:
    """Objects of other classes, and nesting without end, are refused with the type or limit named."""
    with pytest.raises(PlanError, match=r"torch\.Size") as caught:
        decode(make_index({}, planner_data={"a": {"b": torch.Size([1])}}))
    assert caught.value.type_name == "torch.Size"
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(PlanError, match=str(MAX_PLAIN_DEPTH)):
        decode(make_index({}, planner_data=endless))


@examples(60)
@given(indexes())
def test_round_trip_through_stock(index: CheckpointIndex) -> None:
    """For any index, stock's unpickler (C and Python) gives objects whose index is the same again."""
    index.check()
    data = encode_torch_metadata(index, checkpoint_id="c", save_id="s")
    pickletools.dis(data, out=io.StringIO())  # raises on a malformed stack, memo or frame
    names = set(index.dtype_codes.tolist())
    if not all(hasattr(torch, dtypes.BY_CODE[code].name) for code in names):
        return
    metadata = pickle.loads(data)
    assert pickle._Unpickler(io.BytesIO(data)).load() == metadata
    again = index_of(metadata)
    assert (again.fqns, again.objects.fqns) == (index.fqns, index.objects.fqns)
    assert repr(again.planner_data) == repr(index.planner_data)
    for name in COLUMNS:
        np.testing.assert_array_equal(getattr(again, name), getattr(index, name), err_msg=name)
    assert [again.files[f] for f in again.chunk_files] == [index.files[f] for f in index.chunk_files]
    assert again.objects.offsets.tolist() == index.objects.offsets.tolist()


@examples(60)
@given(indexes())
def test_round_trip_through_ours(index: CheckpointIndex) -> None:
    """decode(encode(index)) is the index again, in all that the format can hold."""
    data = encode_torch_metadata(index, checkpoint_id="c", save_id="s")
    again = decode_torch_metadata(data)
    assert_same(again, dataclasses.replace(index, files=list(index.files)))
    assert again.provenance == {"save_id": "s", "checkpoint_id": "c", "torch_metadata_version": "1.0.0"}
    assert (again.file_sizes == UNKNOWN).all()
