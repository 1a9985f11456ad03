"""Plug-ins of `docs/how-to/write-a-plug-in.md`, used by the entry points of an installed package."""

from __future__ import annotations

import configparser
import importlib
import json
import os
import re
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dcp
from dcp.features import registry
from dcp.server.client import Client as ClientOfService
from dcp.storage.stores.contract import StoreContract
from tests.support.programs import run_program
from tests.support.ranks import run_ranks
from tests.support.receivers import Receiver
from tests.support.service import Service, wait_until

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/how-to/write-a-plug-in.md"
EXTENSIONS = ROOT / "examples" / "extensions"
FILES = sorted(EXTENSIONS.glob("*.py"))
MODEL = {
    "weight": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "bias": torch.ones(4, dtype=torch.int64),
}
_MOST_LINES = 80


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Install the plug-ins as pip does, with the page's entry points. Return the environment."""
    folder = tmp_path_factory.mktemp("site")
    for file in FILES:
        (folder / file.name).write_text(file.read_text())
    metadata = folder / "extensions-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: extensions\nVersion: 1.0\n")
    points = configparser.ConfigParser()
    for block in re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL):
        points.read_dict(tomllib.loads(block)["project"]["entry-points"])
    with (metadata / "entry_points.txt").open("w") as written:
        points.write(written)
    path = os.pathsep.join(filter(None, (str(folder), str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path}


def run(environment: dict[str, str], *arguments: object) -> str:
    """Run a program, such as ``-m dcp``, in a process of its own, and return the output."""
    done = run_program(*map(str, arguments), env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    """Save a run by dcp as a folder and as an archive, and a checkpoint of the new format."""
    run_folder = tmp_path / "data" / "run"
    dcp.save(dict(MODEL), checkpoint_id=run_folder / "step-00000003", no_dist=True)
    for name, tensor in MODEL.items():
        (tmp_path / "data" / "arrays" / "step-7").mkdir(parents=True, exist_ok=True)
        np.save(tmp_path / "data" / "arrays" / "step-7" / f"{name}.npy", tensor.numpy())
    archive = tmp_path / "runs.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in sorted(run_folder.rglob("*")):
            file.write(path, path.relative_to(tmp_path / "data"))
    return {"data": tmp_path / "data", "zip": archive, "npy": tmp_path / "data" / "arrays" / "step-7"}


def test_the_page_shows_each_file_unchanged() -> None:
    """The page shows each file, unchanged; each file has less than 80 lines."""
    page = PAGE.read_text()
    for file in FILES:
        text = file.read_text()
        assert f"```python\n{text}```" in page, file.name
        assert len(text.splitlines()) < _MOST_LINES, file.name
    assert len(FILES) == 6


def test_the_example_of_a_test_of_a_store() -> None:
    """The page's test class has all tests of the contract of stores."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (block,) = [one for one in blocks if "class TestMyStore" in one]
    names: dict[str, Any] = {}
    exec(block, names)
    assert issubclass(names["TestMyStore"], StoreContract)


def test_a_store_in_one_file(installed: dict[str, str], places: dict[str, Path], tmp_path: Path) -> None:
    """``dcp ls``, ``dcp show``, ``dcp verify``, ``dcp convert`` and ``dcp.load`` accept the store's URLs."""
    top = f"zip://{places['zip']}"
    listed = json.loads(run(installed, "-m", "dcp", "ls", f"{top}/run", "--json"))
    assert [(row["name"], row["state"], row["format"]) for row in listed] == [
        ("step-00000003", "committed", "dcp")
    ]
    assert "step-00000003" in run(installed, "-m", "dcp", "ls", "-r", top)
    url = listed[0]["url"]
    shown = json.loads(run(installed, "-m", "dcp", "show", url, "--json"))
    assert {row["fqn"] for row in shown["tensors"]} == MODEL.keys()
    run(installed, "-m", "dcp", "verify", url)
    run(installed, "-m", "dcp", "convert", url, tmp_path / "out.pt", "--to", "torch")
    refused = run_program("-m", "dcp", "convert", url, f"{top}/out", "--to", "dcp", env=installed)
    assert (refused.returncode, "is read-only (ZipStore)" in refused.stderr) == (3, True)
    assert_equal(torch.load(tmp_path / "out.pt"))
    loaded = tmp_path / "loaded.pt"
    run(installed, "-c", _LOAD, url, loaded)
    assert_equal(torch.load(loaded))


def test_a_format_in_one_file(installed: dict[str, str], places: dict[str, Path], tmp_path: Path) -> None:
    """The format can be listed, shown, verified, loaded, converted from and to, and is in the help."""
    folder = places["npy"]
    listed = json.loads(run(installed, "-m", "dcp", "ls", folder.parent, "--json"))
    assert [(row["name"], row["state"], row["format"], row["step"]) for row in listed] == [
        ("step-7", "complete", "npy", 7)
    ]
    shown = json.loads(run(installed, "-m", "dcp", "show", folder, "--json"))
    assert {row["fqn"]: row["shape"] for row in shown["tensors"]} == {"weight": [2, 3], "bias": [4]}
    run(installed, "-m", "dcp", "verify", folder)
    loaded = tmp_path / "loaded.pt"
    run(installed, "-c", _LOAD, folder, loaded)
    assert_equal(torch.load(loaded))
    run(installed, "-m", "dcp", "convert", folder, tmp_path / "dcp", "--to", "dcp")
    convert = ("-m", "dcp", "convert", tmp_path / "dcp", tmp_path / "again", "--to", "npy")
    run(installed, *convert)
    assert_equal({path.stem: torch.from_numpy(np.load(path)) for path in (tmp_path / "again").glob("*.npy")})
    run(installed, "-m", "dcp", "convert", tmp_path / "dcp", tmp_path / "again", "--to", "npy", "--overwrite")
    assert "npy]" in run(installed, "-m", "dcp", "convert", "--help")


def test_errors_without_plug_ins_list_known_formats(places: dict[str, Path], tmp_path: Path) -> None:
    """Without the plug-ins errors list the known formats, and suggest a similar name."""
    with pytest.raises(dcp.CheckpointNotFoundError):
        dcp.open_index(places["npy"])
    with pytest.raises(
        dcp.errors.OptionError, match=r"one of dcp, torch, safetensors, not 'safetensor'\. Did you mean"
    ):
        dcp.convert(places["data"] / "run" / "step-00000003", tmp_path / "x", to="safetensor")


def test_a_feature_in_one_file(installed: dict[str, str], tmp_path: Path) -> None:
    """A save has the feature's result in the manifest; a feature on one rank is an error on all ranks."""
    run(installed, "-c", _SAVE, tmp_path / "checkpoint")
    found = dcp.open_index(tmp_path / "checkpoint").provenance["min_max"]
    assert found == {"weight": (0, 5), "bias": (1, 1)}
    for outcome in run_ranks(2, with_feature_on_rank_1, str(tmp_path / "two"), "save", "min_max", "MinMax"):
        assert "'features' is not the same" in outcome and "'digests', 'min_max']" in outcome


def test_a_feature_of_loads_in_one_file(installed: dict[str, str], tmp_path: Path) -> None:
    """A load finds entries under other names; a feature on one rank only is an error on all ranks."""
    dcp.save({"model.layers.0.self_attn.q_proj.weight": MODEL["weight"], "step": 1}, checkpoint_id=tmp_path)
    run(installed, "-c", _LOAD_HUB, tmp_path)
    for outcome in run_ranks(2, with_feature_on_rank_1, str(tmp_path), "load", "hub_names", "HubNames"):
        assert "'features' is not the same" in outcome and "'strictness', 'hub_names']" in outcome


def with_feature_on_rank_1(
    rank: int, world_size: int, place: str, act: str, module: str, feature: str
) -> str:
    """Save or load with the feature on rank 1 only, and return the error."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(dcp.errors.PlanError) as caught:
        if rank == 1:
            patch.syspath_prepend(str(EXTENSIONS))
            own, kind = getattr(importlib.import_module(module), feature), f"{act.upper()}_FEATURES"
            patch.setattr(registry, kind, [*getattr(registry, kind), own])
        getattr(dcp, act)({"step": 1}, checkpoint_id=place)
    return str(caught.value)


def test_a_planner_by_one_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The overridden step changes names in the checkpoint; the rest equals a save without the planner."""
    monkeypatch.syspath_prepend(str(EXTENSIONS))
    from plain_names import PlainNamesPlanner  # the folder of a user's script

    state = {"model": {"_orig_mod.weight": torch.ones(2), "layer._orig_mod.bias": torch.zeros(3)}, "step": 1}
    place = tmp_path / "checkpoint"
    dcp.save(state, checkpoint_id=place, planner=PlainNamesPlanner(), no_dist=True)
    assert set(dcp.open_index(place).fqns) == {"model.weight", "model.layer.bias"}
    found: dict[str, Any] = {"model": {"weight": torch.zeros(2), "layer.bias": torch.ones(3)}, "step": 0}
    dcp.load(found, checkpoint_id=place, no_dist=True)
    assert torch.equal(found["model"]["weight"], torch.ones(2))
    assert found["step"] == 1


# -- the catalog ---------------------------------------------------------------------------------------------


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """Yield a receiver for posts of new checkpoints."""
    with Receiver() as running:
        yield running


@pytest.fixture
def service(
    installed: dict[str, str], places: dict[str, Path], tmp_path: Path, receiver: Receiver
) -> Iterator[Service]:
    """Start a service with both places as roots."""
    roots = {"data": {"url": str(places["data"])}, "zip": {"url": f"zip://{places['zip']}"}}
    settings = {"roots": roots, "database_url": f"sqlite:///{tmp_path}/catalog.sqlite"}
    settings["features"] = {"nan_counts": {"url": receiver.url}}
    environment = {"PYTHONPATH": installed["PYTHONPATH"]}
    with Service(tmp_path / "service", settings, environment=environment) as running:
        yield running


def test_a_feature_of_the_service_in_one_file(
    service: Service, places: dict[str, Path], receiver: Receiver
) -> None:
    """A job counts NaNs, a page linked from the checkpoint shows the counts, and commits are posted."""
    state = {"layer.weight": torch.tensor([1.0, torch.nan, torch.nan]), "layer.bias": torch.ones(1)}
    dcp.save(state, checkpoint_id=places["data"] / "run" / "step-00000009", no_dist=True)
    with service.client() as client, ClientOfService(service.url) as catalog:
        found = catalog.register("run/step-00000009", root="data")
        job = catalog.wait(catalog.submit("nan_counts", {"checkpoint_id": found.id}).id)
        assert job.result == {"layers": {"layer": 2}}
        pages = {"accept": "text/html"}
        page = client.get(f"/checkpoints/{found.id}/nans", headers=pages)
        assert (page.status_code, "layer" in page.text, 'class="num">2<' in page.text) == (200, True, True)
        shown = client.get(f"/checkpoints/{found.id}", headers=pages).text
        assert f"/checkpoints/{found.id}/nans" in shown and "Count NaNs by layer</button>" in shown

    def posted() -> bool:
        return any(found.id in json.loads(one.body)["checkpoints"] for one in receiver.requests)

    wait_until(posted, "the new checkpoint is posted")


_FEATURE = """
import sys
from dcp.server.core.feature import Feature
feature = Feature("mine", __name__, templates={"a.html": "fine"})
"""

WRONG = {
    "import nothing_like_it": "cannot be imported",
    "feature.kinds = [str]": "is not a job kind",
    "feature.name = 'drift'": "2 features have a name 'drift'",
    "feature.work = ['absent']": "mine.absent cannot be imported",
    "feature.templates = {'a.html': '{% if %}'}": "template mine/a.html, line 1",
    "feature.consumer('mine', kinds=['checkpoint.comitted'])(print)": "kind 'checkpoint.comitted'; kinds are",
    "feature.schedule('clean-up', 1.0)(print)": "2 features have a consumer or schedule 'clean-up'",
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_failing_feature_stops_the_start(installed: dict[str, str], tmp_path: Path, wrong: str) -> None:
    """The start fails with one line that names the problem, the feature and the package."""
    (tmp_path / "mine.py").write_text(f"{_FEATURE}{wrong}\n")
    metadata = tmp_path / "their_package-2.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 2.1\n")
    (metadata / "entry_points.txt").write_text("[dcphub.service_features]\nmine = mine:feature\n")
    environment = {**installed, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = run_program("-m", "dcp", "serve", "--port", "0", cwd=tmp_path, env=environment)
    assert done.returncode not in (0, 70) and "internal error" not in done.stderr, done.stderr
    assert WRONG[wrong] in done.stderr and "of the package their-package 2.1" in done.stderr, done.stderr


@pytest.mark.exhaustive
def test_the_catalog_reads_both_plug_ins(service: Service) -> None:
    """The service scans, lists and shows both, reads tensors, and converts to the new format."""
    with service.client() as client:

        def listed(**query: str) -> list[dict[str, Any]]:
            answer = client.get("/api/v1/checkpoints", params=query)
            assert answer.status_code == 200, answer.text
            return [item for item in answer.json()["items"] if item["structure_id"] is not None]

        (array,) = wait_until(lambda: listed(root="data", format="npy"), "the folder of arrays is found")
        assert (array["key"], array["state"], array["step"]) == ("arrays/step-7", "committed", 7)
        detail = client.get(f"/api/v1/checkpoints/{array['id']}").json()
        assert detail["format"] == "npy"
        tensors = client.get(f"/api/v1/checkpoints/{array['id']}/tensors").json()["items"]
        assert {row["fqn"] for row in tensors} == MODEL.keys()
        data = client.get(f"/api/v1/checkpoints/{array['id']}/tensors/data", params={"fqn": "bias"})
        assert data.status_code == 200, data.text
        (zipped,) = wait_until(lambda: listed(root="zip"), "the archive is found")
        assert (zipped["key"], zipped["format"]) == ("run/step-00000003", "dcp")
        job = client.post(
            "/api/v1/jobs",
            json={
                "kind": "convert",
                "params": {
                    "checkpoint_id": zipped["id"],
                    "to": "npy",
                    "target_root": "data",
                    "target_key": "new",
                },
            },
        )
        assert job.status_code in (200, 201, 202), job.text
        wait_until(lambda: [row for row in listed(format="npy") if row["key"] == "new"], "it is converted")
        schema = client.get("/openapi.json")
        assert '"npy"' in schema.text
        assert client.get("/api/v1/roots/zip").json()["readonly"]
        jobs = [{"kind": "delete", "params": {"checkpoint_ids": [zipped["id"]]}}]
        convert = {"checkpoint_id": array["id"], "to": "dcp", "target_root": "zip", "target_key": "new"}
        jobs += [{"kind": "convert", "params": convert}]
        refusals = [client.post("/api/v1/jobs", json=job) for job in jobs]
        refusals += [client.delete(f"/api/v1/checkpoints/{zipped['id']}")]
        assert [(one.status_code, "read-only" in one.text) for one in refusals] == [(403, True)] * 3


def assert_equal(found: dict[str, torch.Tensor]) -> None:
    """Assert that the tensors equal the model's."""
    assert found.keys() == MODEL.keys()
    for name, tensor in MODEL.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


_LOAD = """
import sys, torch, dcp
state = {"weight": torch.zeros(2, 3), "bias": torch.zeros(4, dtype=torch.int64)}
dcp.load(state, checkpoint_id=sys.argv[1], no_dist=True)
torch.save(state, sys.argv[2])
"""

_SAVE = """
import sys, torch, dcp
state = {"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.ones(4, dtype=torch.int64)}
dcp.save(state, checkpoint_id=sys.argv[1], no_dist=True)
"""

_LOAD_HUB = """
import sys, torch, dcp
state = {"module": {"layers.0.wq.weight": torch.zeros(2, 3)}, "step": 0}
dcp.load(state, checkpoint_id=sys.argv[1], no_dist=True)
assert state["step"] == 1 and state["module"]["layers.0.wq.weight"].sum() == 15, state
"""
