"""Numbers of requests, by the log of a proxy: each request costs money and, at a distance, some 30 ms."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dcp
from tests.support.fault_doors import given, run
from tests.support.fault_proxy import FaultProxy
from tests.support.faulty_saves import assert_loads, small_state
from tests.support.s3 import S3Server, raw_s3
from tests.support.values import full_tensor, raw

_STEPS = 1000
_TENSORS = 5000


def test_small_tensors_share_requests(s3_proxy: FaultProxy, s3_root: str) -> None:
    """5,000 tensors of 1 KiB are saved with a dozen requests and loaded with half a dozen."""
    block = full_tensor("small", (_TENSORS, 256), torch.float32)
    state = {f"tensor.{number}": block[number].clone() for number in range(_TENSORS)}
    options = s3_proxy.storage_options
    dcp.save(state, checkpoint_id=s3_root, storage_options=options, no_dist=True)
    counts = s3_proxy.counts()
    assert counts["PutObject"] + counts["UploadPart"] <= 6, counts
    assert counts.total() <= 13, counts
    s3_proxy.log.clear()
    loaded = torch.zeros_like(block)
    views = {f"tensor.{number}": loaded[number] for number in range(_TENSORS)}
    dcp.load(views, checkpoint_id=s3_root, storage_options=options, no_dist=True)
    assert raw(loaded) == raw(block)
    counts = s3_proxy.counts()
    assert counts["GetObject"] <= 5, counts
    assert counts.total() <= 6, counts
    with raw_s3(s3_proxy.server) as direct:
        stored = sum(direct.list(s3_root).values())
    assert sum(request.response_bytes for request in s3_proxy.log) <= stored


def test_a_partial_load_reads_only_its_bytes(s3_proxy: FaultProxy, s3_root: str) -> None:
    """A partial load reads only the bytes of its tensors; large tensors are read by several MiB."""
    shape = (48, 1 << 16)  # 12 MiB
    state = {name: full_tensor(name, shape, torch.float32) for name in ("one", "two")}
    options = s3_proxy.storage_options
    dcp.save(state, checkpoint_id=s3_root, storage_options=options, no_dist=True)
    s3_proxy.log.clear()
    wanted = {"two": torch.zeros(shape)}
    dcp.load(wanted, checkpoint_id=s3_root, storage_options=options, no_dist=True)
    assert raw(wanted["two"]) == raw(state["two"])
    data = s3_proxy.requests("GetObject", "distcp$")
    assert sum(request.response_bytes for request in data) <= 1.05 * state["two"].nbytes
    assert len(data) <= 4, [request.range for request in data]


@pytest.fixture(scope="module")
def steps(s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write the manifests of 1,000 steps, of which only the last has data, and return the root."""
    url = f"s3://{s3_server.bucket}/{tmp_path_factory.mktemp('steps').name}"
    last = f"{url}/step-{_STEPS:08d}"
    dcp.save(small_state("last"), checkpoint_id=last, storage_options=s3_server.storage_options, no_dist=True)
    with raw_s3(s3_server) as direct:
        manifest = direct.read(f"{last}/manifest.msgpack")
        direct.write_many(
            [(f"{url}/step-{step:08d}/manifest.msgpack", manifest) for step in range(1, _STEPS)]
        )
    return url


def test_command_line_lists_steps_by_listings(s3_proxy: FaultProxy, steps: str) -> None:
    """`dcp ls --quick` opens none of 1,000 steps."""
    outcome = run("ls", steps, "--quick", "--json", *given(s3_proxy.storage_options))
    assert outcome.status == 0, outcome.err
    assert [entry["step"] for entry in outcome.json] == list(range(1, _STEPS + 1))
    assert s3_proxy.requests("GetObject") == []
    assert s3_proxy.requests("HeadObject") == []
    assert s3_proxy.counts().total() <= 4, s3_proxy.counts()


def test_manager_finds_steps_by_listings(s3_proxy: FaultProxy, steps: str) -> None:
    """The manager lists all steps and restores the newest without a request for each other step. A save
    requests only its own step."""
    settings: dict[str, Any] = {"mode": "sync", "verify_saved": "off", "no_dist": True}
    with dcp.CheckpointManager(steps, storage_options=s3_proxy.storage_options, **settings) as manager:
        assert manager.all_steps() == list(range(1, _STEPS + 1))
        assert manager.latest() == _STEPS
        assert s3_proxy.requests("GetObject") == []
        assert s3_proxy.counts().total() <= 6, s3_proxy.counts()
        s3_proxy.log.clear()
        state: dict[str, Any] = {"weight": torch.zeros(100, 100), "note": None}
        restored = manager.restore(state)
        assert restored is not None
        assert restored.step == _STEPS
        assert raw(state["weight"]) == raw(small_state("last")["weight"])
        assert s3_proxy.counts().total() <= 8, s3_proxy.counts()
        s3_proxy.log.clear()
        manager.save(_STEPS + 1, small_state("next"), force=True)
        asked = [request.key or request.query["prefix"] for request in s3_proxy.log]
        committed = next(at for at, key in enumerate(asked) if key.endswith(f"{_STEPS + 1}/manifest.msgpack"))
        assert {key.split("/")[1] for key in asked[:committed]} == {f"step-{_STEPS + 1:08d}"}
        assert manager.wait(60)


def test_small_checkpoints_cost_few_requests(s3_proxy: FaultProxy, s3_root: str) -> None:
    """A save and a load of one small file have a maximum number of requests."""
    options = {**s3_proxy.storage_options, "conditional_writes": "trust"}
    dcp.save(small_state("one"), checkpoint_id=s3_root, storage_options=options, no_dist=True)
    assert s3_proxy.counts()["PutObject"] == 3  # data, manifest, .metadata
    assert s3_proxy.counts().total() <= 10, s3_proxy.counts()
    s3_proxy.log.clear()
    assert_loads(s3_root, small_state("one"), options)
    assert s3_proxy.counts().total() <= 5, s3_proxy.counts()
