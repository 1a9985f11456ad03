"""A manifest's summary says what its index says."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given, settings

from dcp.storage.errors import CheckpointFormatError
from dcp.storage.formats.index import UNKNOWN, CheckpointIndex
from dcp.storage.formats.native.manifest import encode_manifest
from dcp.storage.formats.native.manifest_summary import summarize_manifest
from tests.formats.test_manifest import resealed
from tests.support.formats_indexes import indexes


@settings(max_examples=30)
@given(indexes())
def test_as_the_index(index: CheckpointIndex) -> None:
    """Whatever the index is, and whatever plain data it carries: tuples, large numbers, bytes."""
    data = encode_manifest(index)
    summary = summarize_manifest(data)
    assert summary.format == index.format
    assert summary.file_count == len(index.files)
    known = not (index.file_sizes == UNKNOWN).any()
    assert summary.bytes == (sum(index.file_sizes.tolist()) if known else None)
    assert msgpack.packb(repr(summary.provenance)) == msgpack.packb(repr(dict(index.provenance)))
    assert repr(summary.user) == repr(dict(index.user))
    assert summary.torch_metadata_crc == index.torch_metadata_crc
    assert summary.replaced_torch_metadata_crc == index.replaced_torch_metadata_crc


@pytest.mark.parametrize(
    "change",
    [
        lambda fields: fields.pop("files"),
        lambda fields: fields.update(files=7),
        lambda fields: fields["tensors"].pop("shapes"),
        lambda fields: fields.update(user=[1, 0, b"\xc0"]),
        lambda fields: fields.update(provenance=[1, 0, b"\xc1"]),
        lambda fields: fields.update(format=7),
        lambda fields: fields.update(torch_metadata_crc=-1),
    ],
)
def test_hostile_fields_are_refused(change: Any) -> None:
    """What no writer produces is an error of the format, and no other."""
    with pytest.raises(CheckpointFormatError):
        summarize_manifest(resealed(change))
