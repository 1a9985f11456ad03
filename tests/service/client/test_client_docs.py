"""Examples of docs/how-to/use-the-client.md and of the catalog's part of find-the-best-and-export.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from dcp.server.client import Client
from tests.support.app import running_app
from tests.support.job_workers import served_by
from tests.support.sockets import listening

PAGE = Path(__file__).parents[3] / "docs/how-to/use-the-client.md"
BEST = PAGE.with_name("find-the-best-and-export.md")


def test_the_blocks_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code blocks of the page run in order against a service with a worker, at another address."""
    monkeypatch.chdir(tmp_path)
    url = f"sqlite:///{tmp_path / 'catalog.sqlite'}"
    roots = {"checkpoints": {"url": str(tmp_path / "checkpoints"), "scan_seconds": 0}}
    quick: dict[str, Any] = {"work_folder": tmp_path / "work", "poll_seconds": 0.05}
    with (
        running_app(url, tmp_path, auth="off", roots=roots, **quick) as app,
        listening(app.app) as address,
        served_by(app.service.settings),
    ):
        text = PAGE.read_text().replace("http://127.0.0.1:8470", address)
        names: dict[str, object] = {}
        for block in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            exec(compile(block, str(PAGE), "exec"), names)
        with Client(address) as client:
            aliases = [checkpoint.aliases for checkpoint in client.checkpoints(sort="step")]
            assert aliases == [(), (), ("best",)]
            assert names["job"].state == "succeeded"  # type: ignore[attr-defined]
        names["client"].close()  # type: ignore[attr-defined]
    assert (tmp_path / "best.safetensors").stat().st_size
    assert (tmp_path / "manifest.msgpack").read_bytes()


def test_the_best_checkpoint_is_found_and_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page trains and scans a run, sorts by a metric and downloads the step with the lowest value."""
    monkeypatch.chdir(tmp_path)
    url = f"sqlite:///{tmp_path / 'catalog.sqlite'}"
    roots = {"runs": {"url": str(tmp_path / "runs"), "scan_seconds": 0}}
    train, find = re.findall(r"^```python\n(.*?)^```", BEST.read_text(), re.MULTILINE | re.DOTALL)
    exec(compile(train, str(BEST), "exec"), {})
    quick: dict[str, Any] = {"work_folder": tmp_path / "work", "poll_seconds": 0.05}
    with (
        running_app(url, tmp_path, auth="off", roots=roots, **quick) as app,
        listening(app.app) as address,
        served_by(app.service.settings),
    ):
        with Client(address) as client:
            client.wait(client.scan("runs"), timeout_seconds=120)
        exec(compile(find.replace("http://127.0.0.1:8470", address), str(BEST), "exec"), {})
    assert "200 0.4" in capsys.readouterr().out.splitlines()
    assert load_file("best-of-catalog.safetensors").keys() == {"model.weight", "model.bias"}
