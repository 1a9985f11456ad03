"""Checkpoints with millions of tensors or chunks: limits that keep hostile files out must not refuse them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import dcp
from dcp.storage import commit
from dcp.storage.commit_names import MANIFEST_NAME
from dcp.storage.formats import dtypes
from dcp.storage.formats.checksums import crc32
from dcp.storage.formats.index import CheckpointIndex, Int64, starts
from dcp.storage.stores import PosixStore

PROBE = bytes(range(256))
SAVE_ID = "abcdef01"


def large_index(chunks: int) -> CheckpointIndex:
    """A tensor of 256 bytes, and one of so many chunks of irregular sizes, at irregular places of one
    file."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 60_000, chunks)
    places = np.cumsum(rng.integers(300, 60_000, chunks) + sizes) - sizes
    code = dtypes.BY_NAME["uint8"].code

    def column(first: int, others: Int64) -> Int64:
        return np.concatenate([np.array([first], np.int64), others])

    sizes_of_all, places_of_all = column(len(PROBE), sizes), column(0, places)
    crcs = rng.integers(0, 1 << 32, chunks + 1, dtype=np.uint64).astype(np.uint32)
    crcs[0] = crc32(PROBE)
    return CheckpointIndex(
        format="dcp",
        fqns=("probe", "w"),
        dtype_codes=np.array([code, code], np.uint8),
        shape_start=starts([1, 1]),
        shape_values=np.array([len(PROBE), sizes.sum()]),
        requires_grad=np.zeros(2, np.uint8),
        chunk_start=np.array([0, 1, chunks + 1]),
        chunk_offsets=column(0, np.cumsum(sizes) - sizes),
        chunk_sizes=sizes_of_all,
        chunk_files=np.zeros(chunks + 1, np.int64),
        record_offsets=places_of_all,
        record_lengths=sizes_of_all,
        payload_offsets=places_of_all,
        payload_lengths=sizes_of_all,
        crc_start=np.arange(chunks + 2),
        crcs=crcs,
        files=(f"__0_0.{SAVE_ID}.distcp",),
        file_sizes=np.array([places_of_all[-1] + sizes_of_all[-1]]),
        provenance={"save_id": SAVE_ID},
    )


@pytest.mark.exhaustive
def test_a_manifest_of_more_than_64_mebibytes(tmp_path: Path) -> None:
    """Seven million chunks are committed, listed, replaced, and loaded from."""
    index, store = large_index(7_000_000), PosixStore(tmp_path)
    with (tmp_path / index.files[0]).open("wb") as file:
        file.write(PROBE)
        file.truncate(int(index.file_sizes[0]))  # sparse: nobody reads the rest
    names, nothing_yet = commit.Names(), commit.previous_state(store, commit.Names())
    commit.commit(
        store, index, nothing_yet, names=names, save_id=SAVE_ID, durable=False, torch_compatible=False
    )
    assert (tmp_path / MANIFEST_NAME).stat().st_size > 64 << 20
    state = {"probe": torch.zeros(len(PROBE), dtype=torch.uint8)}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert bytes(state["probe"].tolist()) == PROBE
    assert commit.previous_state(store, names).files == tuple(index.files)
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    assert dcp.open_index(tmp_path).chunk_count == 1
    assert not (tmp_path / index.files[0]).exists()


@pytest.mark.exhaustive
def test_a_million_tensors_alike(tmp_path: Path) -> None:
    """They are saved and loaded, with the manifest and, as stock left it, without one."""
    values = torch.arange(1_000_000, dtype=torch.float32)
    state = {f"layer.{row}.weight": values[row : row + 1].clone() for row in range(len(values))}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path, sync_files=False), no_dist=True)
    for has_manifest in (True, False):
        for tensor in state.values():
            tensor.zero_()
        if not has_manifest:
            (tmp_path / MANIFEST_NAME).unlink()
        dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
        assert torch.equal(torch.cat(list(state.values())), values)
