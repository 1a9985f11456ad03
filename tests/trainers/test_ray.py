"""`dcp.integrations.ray`: tested with the real package if installed, and always with a stand-in."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import dcp
from dcp.errors import CheckpointError


class Ray:
    """Stand-in for the part of Ray Train that the plug-in uses, for one worker."""

    def __init__(self, folder: Path, kind: str = "local") -> None:
        self.reports: list[tuple[dict[str, Any], str, str]] = []
        self.nodes: list[str] = []
        storage = SimpleNamespace(
            build_checkpoint_path_from_name=lambda name: f"{folder}/{name}",
            storage_filesystem=SimpleNamespace(type_name=kind),
        )
        train: Any = ModuleType("ray.train")
        train.Checkpoint = lambda path, filesystem: path
        train.CheckpointUploadMode = SimpleNamespace(NO_UPLOAD="no upload")
        train.get_context = lambda: SimpleNamespace(get_storage=lambda: storage)
        train.get_preemption_info = lambda: (
            SimpleNamespace(preempted_node_ids=self.nodes) if self.nodes else None
        )
        train.report = self.report
        self.train = train

    def report(self, metrics: dict[str, Any], *, checkpoint: str, checkpoint_upload_mode: str) -> None:
        """Record a report, and assert that the checkpoint can be loaded."""
        dcp.load({"w": torch.zeros(2)}, checkpoint_id=checkpoint, no_dist=True)
        self.reports.append((metrics, Path(checkpoint).name, checkpoint_upload_mode))


@pytest.fixture
def ray(tmp_path: Path) -> Iterator[Ray]:
    """Put the stand-in in place of the package."""
    made: Any = Ray(tmp_path)
    package: Any = ModuleType("ray")
    package.train = made.train
    names = ("ray", "ray.train", "dcp.integrations.ray")
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    sys.modules.update({"ray": package, "ray.train": made.train})
    yield made
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(before)


def manager_of(**options: Any) -> Any:
    """Return the plug-in's manager."""
    module = importlib.import_module("dcp.integrations.ray")
    return module.RayCheckpointManager(handle_sigterm=False, **options)


def test_committed_steps_are_reported_by_reference(ray: Ray, tmp_path: Path) -> None:
    """A committed step is reported at the next save or the end, with metrics, from the run's folder."""
    with manager_of(every_steps=2) as manager:
        for step in range(1, 6):
            manager.save(step, {"w": torch.ones(2)}, metrics={"loss": 1 / step})
        assert [name for _, name, _ in ray.reports] == ["step-00000002"]
    assert ray.reports == [
        ({"step": 2, "loss": 0.5}, "step-00000002", "no upload"),
        ({"step": 4, "loss": 0.25}, "step-00000004", "no upload"),
    ]
    assert (tmp_path / "dcp" / "step-00000004" / "manifest.msgpack").exists()


def test_a_preemption_saves_once(ray: Ray) -> None:
    """A preemption saves and reports before `save` returns; the next preemption saves again."""
    with manager_of(every_steps=100) as manager:
        for step, nodes in ((1, []), (2, ["a"]), (3, ["a"]), (4, ["a", "b"]), (5, ["b"])):
            ray.nodes = nodes
            manager.save(step, {"w": torch.ones(2)})
            assert [metrics["step"] for metrics, _, _ in ray.reports] == [s for s in (2, 4) if s <= step]
        assert not manager.stop_requested


def test_a_save_that_fails_is_not_reported(ray: Ray, tmp_path: Path) -> None:
    """A failed save is counted by the manager and not reported."""
    with manager_of(retries=0) as manager:
        (tmp_path / "dcp").mkdir()
        (tmp_path / "dcp" / "step-00000001").write_text("in the way")
        manager.save(1, {"w": torch.ones(2)})
        manager.save(2, {"w": torch.ones(2)})
        assert not ray.reports and manager.failures == 1
    assert [name for _, name, _ in ray.reports] == ["step-00000002"]


def test_wrong_options_are_refused(ray: Ray, tmp_path: Path) -> None:
    """Options that Ray decides are refused, and so is a file system without a known URL."""
    for name, value in (("root", tmp_path), ("keep", dcp.Retention(last=1))):
        with pytest.raises(dcp.errors.OptionError, match=rf"{name}.*num_to_keep"):
            manager_of(**{name: value})
    ray.train.get_context = Ray(tmp_path, "abfs").train.get_context
    with pytest.raises(CheckpointError, match="'abfs'"):
        manager_of()


def fitted(folder: Path, *arguments: str, **variables: str) -> Any:
    """Run `tests.support.ray_loop`, and return its result."""
    environment = os.environ | {"RAY_TRAIN_V2_ENABLED": "1", "RAY_USAGE_STATS_ENABLED": "0"} | variables
    environment["PYTHONPATH"] = str(Path(__file__).parents[3])
    environment["RAY_raylet_start_wait_time_s"] = "300"  # for a busy machine
    command = [sys.executable, "-m", "tests.support.ray_loop", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    found = re.search(r"RESULT (\{.*\})", done.stdout)
    assert found is not None, (done.stdout + done.stderr)[-4000:]
    return json.loads(found[1])


if (
    find_spec("ray") is not None
):  # Ray is large and has an environment of its own: make test-trainer TRAINER=ray

    @pytest.mark.exhaustive
    @pytest.mark.parametrize("place", ["folder", "s3"])
    def test_crashed_workers_are_restarted_with_more(
        tmp_path: Path, place: str, request: pytest.FixtureRequest
    ) -> None:
        """One of 2 workers dies after step 4 was saved; Ray restarts them with an equal result. Then 3
        workers resume, and a preemption saves an extra step. Ray finds reports on disk and on S3."""
        server: Any = request.getfixturevalue("s3_server") if place == "s3" else None
        url = request.getfixturevalue("s3_root") if server is not None else ""
        variables = server.environment if server is not None else {}
        result = fitted(tmp_path, "2", "7", "crash", url, **variables)
        assert [rank["w"] for rank in result["ranks"]] == [[28.0] * 4] * 2
        assert [rank["seen"] for rank in result["ranks"]] == [7, 7]
        assert result["metrics"]["step"] == 6 and result["reported"][-1] == "step-00000006"
        result = fitted(tmp_path, "3", "11", "preempt", url, **variables)
        assert [rank["from"] for rank in result["ranks"]] == [6] * 3
        assert [rank["w"] for rank in result["ranks"]] == [[66.0] * 4] * 3
        assert [rank["seen"] for rank in result["ranks"]] == [4 + 5] * 3  # 4 of the 12 seen by 2 workers
        assert {"step-00000008", "step-00000009", "step-00000010"} <= set(result["reported"])
        root, options = (url, server.storage_options) if server is not None else (str(tmp_path), None)
        stored = dcp.read(f"{root}/run/dcp/step-00000010", no_dist=True, storage_options=options)
        assert stored["w"].tolist() == [55.0] * 4
