"""Encoding of `.metadata` for torch. Internal: arbitrary indexes; saves make few kinds."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.formats.torch.metadata_writer import encode_torch_metadata
from dcp.storage.torch_compat import strides_of, tensor_properties
from tests.support.formats_indexes import index_of, rich_state_dict, stock_save


def decode(index: CheckpointIndex) -> Metadata:
    """Return the Metadata that stock torch reads from the encoded index."""
    metadata = pickle.loads(encode_torch_metadata(index, checkpoint_id="here", save_id="abc"))
    assert isinstance(metadata, Metadata)
    return metadata


def test_encoded_metadata_equals_stocks(tmp_path: Path) -> None:
    """The metadata of a stock save, decoded and encoded by dcp, is equal: each object has exactly the
    attributes of stock torch."""
    original = stock_save(tmp_path, rich_state_dict())
    copy = decode(index_of(original))
    for fqn, entry in original.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata) and strides_of(entry.properties) is not None:
            # since torch 2.15, which stores the strides of the saved tensor; older versions refuse strides
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
