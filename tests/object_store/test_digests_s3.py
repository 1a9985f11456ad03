"""Digests and the proof of a resume on a real S3 server: kept, compared, and read where something differs."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.checkpoint.state_dict import set_state_dict

import dcp
from dcp.demo.s3_server import S3Server
from dcp.inspection.values.digests import digests
from dcp.inspection.verification import verify
from dcp.proving.proof import Proof
from dcp.storage.stores.opening import OpenWith
from tests.save_load.test_prove import Training
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.exhaustive

OF_RANKS = ["loader", "generator", "random"]


def save_prove_and_damage(rank: int, world: int, url: str, options: dict[str, Any]) -> tuple[str, str]:
    """Two steps, a save, a proof; then one element of one shard is another one."""
    training = Training(rank, world, "fsdp", seed=1)
    training.step(2)
    writer = dcp.FileSystemWriter(url, digests=True, open_store=OpenWith(options))
    dcp.save(training.state(), storage_writer=writer)
    state = training.state()
    whole = dcp.prove(state, url, storage_options=options)
    if rank == 1:
        state["model"]["up.weight"].to_local()[0, 0] += 1
    return whole.to_json(), dcp.prove(state, url, storage_options=options).to_json()


def load_and_prove(rank: int, world: int, url: str, options: dict[str, Any]) -> str:
    """Other ranks, of other values before."""
    training = Training(rank, world, "fsdp", seed=2)
    state = {key: value for key, value in training.state().items() if key not in OF_RANKS}
    dcp.load(state, checkpoint_id=url, storage_options=options, exclude=OF_RANKS)
    set_state_dict(
        training.model,
        training.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    now = {key: value for key, value in training.state().items() if key not in OF_RANKS}
    return dcp.prove(now, url, exclude=OF_RANKS, storage_options=options).to_json()


def test_proofs_and_digests_on_s3(s3_server: S3Server, s3_root: str) -> None:
    """Three ranks save and are proved, two resume and are: by the manifest alone. What one rank has otherwise
    is told by reading that part."""
    options, url = s3_server.storage_options, f"{s3_root}/step-2"
    whole, damaged = map(Proof.of_json, run_ranks(3, save_prove_and_damage, url, options)[0])
    assert whole.ok and whole.bytes_read == 0 and whole.world_size == 3, whole.findings
    assert [(one.kind, one.fqn, one.ranks) for one in damaged.findings] == [
        ("tensor", "model.up.weight", (1,))
    ]
    assert damaged.bytes_read > 0
    resumed = Proof.of_json(run_ranks(2, load_and_prove, url, options)[0])
    assert resumed.ok and resumed.bytes_read == 0 and resumed.world_size == 2, resumed.findings
    assert verify(url, storage_options=options).findings == []
    copy = f"{s3_root}/copy"
    dcp.convert(
        url, copy, to="dcp", only="model", dtype="bfloat16", storage_options=options, target_options=options
    )
    told = digests(copy, storage_options=options)
    read = digests(copy, recompute=True, storage_options=options)
    assert told.bytes_read == 0 and told.digest == read.digest
