"""Both clients against the real application, over a real socket."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load as load_safetensors
from safetensors.torch import load_file

import dcp
from dcp.server.client import (
    Client,
    ForbiddenError,
    JobCancelledError,
    NotFoundError,
    PreconditionFailedError,
    UnauthorizedError,
    UnprocessableError,
    WaitTimeoutError,
)
from tests.service.client.conftest import MakeClient
from tests.support.app import App, running_app


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a folder with two steps of a run in the root "main"."""
    folder = tmp_path_factory.mktemp("template")
    with dcp.CheckpointManager(folder / "main" / "run", mode="sync", no_dist=True) as manager:
        for step in (1, 2):
            manager.save(step, state_at(step), metrics={"loss": 1 / step}, force=True)
    return folder


@pytest.fixture
def app(template: Path, tmp_path: Path) -> Iterator[App]:
    """Start the application over a copy of the template."""
    shutil.copytree(template, tmp_path, dirs_exist_ok=True)
    with running_app(f"sqlite:///{tmp_path / 'catalog.sqlite'}", tmp_path) as running:
        yield running


def state_at(step: int) -> dict[str, object]:
    """Return the state of the checkpoint at a step."""
    return {
        "model": {
            "weight": torch.arange(12, dtype=torch.float32).reshape(3, 4) + step,
            "bias": torch.full((5,), step, dtype=torch.bfloat16),
        },
        "lr": 0.1,
    }


def registered(client: Client) -> list[int]:
    """Return the ids of the checkpoints, by step."""
    return [client.register(f"run/step-0000000{step}", root="main").id or 0 for step in (1, 2)]


def test_checkpoints_are_listed_and_shown(connect: MakeClient, tmp_path: Path) -> None:
    """Registered checkpoints are listed, filtered, sorted, read in pages and shown."""
    client = connect("read", "write")
    assert [(root.name, root.is_configured) for root in client.roots()] == [("main", True), ("other", True)]
    first = client.register("step-00000001", root_url=str(tmp_path / "main" / "run"), tags=["good"])
    assert (first.root, first.key, first.is_new, first.is_present) == (
        "main",
        "run/step-00000001",
        True,
        True,
    )
    one, two = registered(client)
    assert one == first.id
    assert [found.step for found in client.checkpoints(root="main", page_size=1)] == [2, 1]
    assert [len(page) for page in client.checkpoints(page_size=1).pages()] == [1, 1]
    best = client.checkpoints(metric="loss<0.9", sort="metric:loss").first()
    assert best is not None and best.id == two and best.metrics == {"loss": 0.5}
    assert client.checkpoints(tag=["none"]).first() is None
    assert [found.id for found in client.checkpoints(tag="good", state=["committed", "vanished"])] == [one]
    detail = client.checkpoint(two)
    assert (detail.format, detail.tensor_count, detail.world_size) == ("dcp", 2, 1)
    assert detail.committed_at.tzinfo is not None
    since = client.checkpoints(since=detail.committed_at).all()
    assert two in [found.id for found in since] and len(since) <= 2
    (run,) = client.runs(root="main")
    assert (run.key, run.checkpoint_count, run.latest_step) == ("run", 2, 2)
    assert client.run(run.id) == run
    series = client.run_series(run.id, "loss", points=1)
    assert (series.run_id, series.metric, len(series.points)) == (run.id, "loss", 1 if series.count else 0)
    assert [node.id for node in client.lineage(one).nodes] == [one]


def test_labels(connect: MakeClient) -> None:
    """Tags, pins, metrics and aliases are set and removed; a stale ETag is refused."""
    client = connect("read", "write")
    one, two = registered(client)
    before = client.checkpoint(one)
    tagged = client.add_tag(one, "team/a:b", etag=before.etag)
    assert tagged.tags == ("team/a:b",)
    with pytest.raises(PreconditionFailedError):
        client.pin(one, etag=before.etag)
    assert client.pin(one).is_pinned
    assert not client.unpin(one).is_pinned
    assert client.remove_tag(one, "team/a:b").tags == ()
    assert client.set_metrics(one, {"eval/acc": 0.9, "loss": None}).metrics == {"eval/acc": 0.9}
    run = before.run_id
    alias = client.set_alias(run, "best", one)
    assert [each.name for each in client.aliases(run)] == ["best"]
    moved = client.set_alias(run, "best", two, etag=alias.etag)
    assert client.alias(run, "best").checkpoint_id == two
    with pytest.raises(PreconditionFailedError):
        client.delete_alias(run, "best", etag=alias.etag)
    client.delete_alias(run, "best", etag=moved.etag)
    with pytest.raises(NotFoundError):
        client.alias(run, "best")


def test_contents_and_differences(connect: MakeClient) -> None:
    """The client returns names, trees, values, slices, shards, files and differences."""
    client = connect("read", "write")
    one, two = registered(client)
    assert [(t.fqn, t.kind, t.shape) for t in client.tensors(two, page_size=1)] == [
        ("lr", "object", None),
        ("model.bias", "tensor", (5,)),
        ("model.weight", "tensor", (3, 4)),
    ]
    assert [t.fqn for t in client.tensors(two, glob="*.bias")] == ["model.bias"]
    assert [(node.name, node.tensors) for node in client.tensor_tree(two)] == [("lr", 0), ("model", 2)]
    np.testing.assert_array_equal(
        client.tensor(two, "model.weight"), np.arange(12, dtype=np.float32).reshape(3, 4) + 2
    )
    np.testing.assert_array_equal(client.tensor(two, "model.weight", "1,:2"), [6.0, 7.0])
    (bias,) = load_safetensors(client.tensor_bytes(two, "model.bias")).values()
    assert torch.equal(bias, torch.full((5,), 2, dtype=torch.bfloat16))
    shards = {tensor.fqn: tensor.chunks for tensor in client.shards(two)}
    assert [chunk.sizes for chunk in shards["model.weight"]] == [(3, 4)]
    assert [(share.rank, share.tensors) for share in client.rank_shares(two)] == [(0, 2)]
    assert "manifest.msgpack" in [file.name for file in client.files(two)]
    difference = client.diff(two, one)
    assert {tensor.fqn for tensor in difference.tensors} == {"model.weight", "model.bias"}
    with pytest.raises(NotFoundError):
        client.statistics(two)


def test_downloads(connect: MakeClient, tmp_path: Path) -> None:
    """A checkpoint is downloaded as a file that libraries read, and its own files unchanged."""
    client = connect("read", "write")
    _, two = registered(client)
    seen: list[tuple[int, int]] = []
    path = client.download(two, tmp_path / "model.safetensors", on_bytes=lambda *at: seen.append(at))
    loaded = load_file(path)
    assert torch.equal(loaded["model.weight"], state_at(2)["model"]["weight"])  # type: ignore[index]
    assert seen[-1] == (path.stat().st_size, path.stat().st_size)
    with pytest.raises(FileExistsError):
        client.download(two, path)
    client.download(two, path, only="*.bias", dtype="float32", overwrite=True)
    assert load_file(path)["model.bias"].dtype is torch.float32
    saved = torch.load(client.download(two, tmp_path / "model.pt", format="torch"), weights_only=True)
    assert torch.equal(saved["model"]["bias"], state_at(2)["model"]["bias"])  # type: ignore[index]
    assert saved["lr"] == 0.1
    manifest = client.download_file(two, "manifest.msgpack", tmp_path / "manifest")
    source = tmp_path / "main" / "run" / "step-00000002" / "manifest.msgpack"
    assert manifest.read_bytes() == source.read_bytes()
    assert [each.name for each in tmp_path.glob(".*.part*")] == []


def test_each_status_raises_its_own_error(connect: MakeClient) -> None:
    """Each status raises its own error, with the detail and the request id of the service."""
    with pytest.raises(UnauthorizedError):
        connect(key="dcp_wrong").roots()
    reader = connect("read")
    with pytest.raises(ForbiddenError) as forbidden:
        reader.register("run/step-00000001", root="main")
    assert forbidden.value.extra["scope"] == "write"
    with pytest.raises(NotFoundError) as missing:
        reader.checkpoint(12345)
    assert "12345" in missing.value.detail and missing.value.request_id
    with pytest.raises(UnprocessableError):
        reader.checkpoints(sort="nonsense").first()
    with pytest.raises(ValueError, match="time zone"):
        reader.checkpoints(since=datetime(2026, 1, 1))
    assert reader.request("GET", "/checkpoints", params={"limit": 1})["items"] == []


def test_jobs(connect: MakeClient) -> None:
    """Jobs are submitted, listed, cancelled and retried; submitting the same job twice returns one job."""
    client = connect("read", "write")
    one, _ = registered(client)
    job = client.verify(one)
    assert (job.kind, job.state, job.checkpoint_id) == ("verify", "queued", one)
    assert client.verify(one).id == job.id
    scan = client.scan("main", below="run")
    assert [found.id for found in client.jobs()] == [scan.id, job.id]
    assert [found.id for found in client.jobs(kind="verify", checkpoint_id=one)] == [job.id]
    assert client.cancel(job.id).state == "cancelled"
    with pytest.raises(JobCancelledError):
        client.wait(job)
    kinds = [event.kind for event in client.watch(job.id)]
    assert kinds[0] == "submitted" and kinds[-1] == "end"
    assert client.retry(job.id).state == "queued"
    assert client.job_tasks(job.id).all() == []
    with pytest.raises(WaitTimeoutError):
        client.wait(job.id, timeout_seconds=0.05)
