"""Digests and the proof of a resume on a real S3 server: kept, compared, and read where something differs."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dcp
from dcp.storage.stores import open_store
from tests.support.fault_doors import findings, given, run
from tests.support.ranks import run_ranks
from tests.support.s3 import S3Server


def _state_of(world_size: int, version: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (world_size,))
    full = torch.arange(60.0).reshape(12, 5) * version
    return {"w": distribute_tensor(full, mesh, [Shard(0)]), "b": torch.full((3,), version), "step": version}


def save_prove_and_damage(rank: int, world_size: int, url: str, options: dict[str, Any]) -> list[str]:
    """A save and a proof; and another one where an element of one shard is another one."""
    writer = dcp.FileSystemWriter(url, digests=True, open_store=lambda path: open_store(path, options))
    state = _state_of(world_size, 1)
    dcp.save(state, storage_writer=writer)
    whole = dcp.prove(state, url, storage_options=options)
    if rank == 1:
        state["w"].to_local()[0, 0] += 1
    return [whole.to_json(), dcp.prove(state, url, storage_options=options).to_json()]


def _load_and_prove(rank: int, world_size: int, url: str, options: dict[str, Any]) -> str:
    state = _state_of(world_size, 2)
    dcp.load(state, checkpoint_id=url, storage_options=options)
    return dcp.prove(state, url, storage_options=options).to_json()


def test_proofs_and_digests_on_s3(s3_server: S3Server, s3_root: str) -> None:
    """Proves a save and a resume on other ranks by the manifest alone, and reads where a rank differs."""
    options, url, copy = s3_server.storage_options, f"{s3_root}/step-2", f"{s3_root}/copy"
    whole, damaged = map(dcp.Proof.of_json, run_ranks(3, save_prove_and_damage, url, options)[0])
    assert whole.ok and whole.bytes_read == 0 and whole.world_size == 3, whole.findings
    assert [(one.kind, one.fqn, one.ranks) for one in damaged.findings] == [("tensor", "w", (1,))]
    assert damaged.bytes_read > 0
    resumed = dcp.Proof.of_json(run_ranks(2, _load_and_prove, url, options)[0])
    assert resumed.ok and resumed.bytes_read == 0 and resumed.world_size == 2, resumed.findings
    assert findings(url, **options) == set()
    dcp.convert(url, copy, to="dcp", only="w", storage_options=options, target_options=options)
    told = [run("digest", copy, "--json", *more, *given(options)).out for more in ((), ("--recompute",))]
    assert told[0].count("blake") == told[1].count("blake") and told[0]
