"""What is written for torch. Internal: any index as `.metadata`; saves make few such."""

from __future__ import annotations

import dataclasses
import io
import pickle
import pickletools
from pathlib import Path

import torch
from hypothesis import given
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from dcp.storage.formats import dtypes
from dcp.storage.formats.index import UNKNOWN, CheckpointIndex
from dcp.storage.formats.torch.metadata.writer import encode_torch_metadata
from dcp.storage.torch_compat import strides_of, tensor_properties
from tests.support.examples import examples
from tests.support.formats_indexes import (
    assert_same,
    decode_torch_metadata,
    index_of,
    indexes_of_torch,
    rich_state_dict,
    stock_save,
)


def decode(index: CheckpointIndex) -> Metadata:
    """What stock reads from the encoded index."""
    metadata = pickle.loads(encode_torch_metadata(index, checkpoint_id="here", save_id="abc"))
    assert isinstance(metadata, Metadata)
    return metadata


def test_equals_what_stock_wrote(tmp_path: Path) -> None:
    """The metadata of a stock save, through our index and encoder, is the original: each object with exactly
    the attributes that stock gives it."""
    original = stock_save(tmp_path, rich_state_dict())
    copy = decode(index_of(original))
    for fqn, entry in original.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata) and strides_of(entry.properties) is not None:
            # from torch 2.15 on: of the tensor that was saved, and refused by older ones
            entry.properties = tensor_properties(entry.properties.dtype, entry.properties.requires_grad, None)
        assert vars(copy.state_dict_metadata[fqn]).keys() == vars(entry).keys()
    expected_meta = StorageMeta(checkpoint_id="here", save_id="abc")
    assert copy == dataclasses.replace(original, storage_meta=expected_meta)
    places = {str(vars(key)): vars(info) for key, info in original.storage_data.items()}
    assert {str(vars(key)): vars(info) for key, info in copy.storage_data.items()} == places
    assert [type(value) for value in copy.planner_data.values()] == [tuple] * len(original.planner_data)
    tensor = copy.state_dict_metadata["weights"]
    assert isinstance(tensor, TensorStorageMetadata)
    assert type(tensor.size) is type(tensor.chunks[0].offsets) is torch.Size
    assert tensor.properties.memory_format is torch.contiguous_format


@examples(60)
@given(indexes_of_torch())
def test_any_index_comes_back(index: CheckpointIndex) -> None:
    """Of what is encoded stock's unpickler (C and Python) and our reader make the index again."""
    index.check()
    data = encode_torch_metadata(index, checkpoint_id="c", save_id="s")
    pickletools.dis(data, out=io.StringIO())  # raises on a malformed stack, memo or frame
    again = decode_torch_metadata(data)
    assert_same(again, index)
    assert again.provenance == {"save_id": "s", "checkpoint_id": "c", "torch_metadata_version": "1.0.0"}
    assert (again.file_sizes == UNKNOWN).all()
    if all(hasattr(torch, dtypes.BY_CODE[code].name) for code in set(index.dtype_codes.tolist())):
        metadata = pickle.loads(data)
        assert pickle._Unpickler(io.BytesIO(data)).load() == metadata
        assert_same(index_of(metadata), index)
