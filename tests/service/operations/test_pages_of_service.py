"""Examples of docs/tutorial/catalog.md and docs/reference/rest-conventions.md, on a real service."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

from dcp.server.client import Client
from tests.support.ports import free_port
from tests.support.service import DcpProcess, wait_until

ROOT = Path(__file__).parents[3]


def blocks_of(page: str) -> list[str]:
    """Return the Python blocks of a page that use the service."""
    found = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    return [block for block in found if "dcp.server" in block]


def test_the_examples_run_against_their_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The examples register, find, tag, verify and download; the file has the values of the model."""
    monkeypatch.chdir(tmp_path)
    (block,) = blocks_of("docs/tutorial/catalog.md")
    readme = (ROOT / "docs/tutorial/catalog.md").read_text()
    (line,) = re.findall(r"^dcp serve [^#\n]*", readme, re.MULTILINE)
    (folder,) = re.findall(r"^mkdir -p (\S+)", readme, re.MULTILINE)
    (tmp_path / folder).mkdir()
    (own_port,) = set(re.findall(r"127\.0\.0\.1:(\d+)", block))
    assert shlex.split(line)[-2:] == ["--port", own_port]
    port = free_port()
    names: dict[str, Any] = {}
    command = [*shlex.split(line)[1:], "--port", str(port)]
    address = f"http://127.0.0.1:{port}"
    with DcpProcess(command, tmp_path, {}) as service, Client(address) as client:
        wait_until(lambda: httpx.get(f"{address}/readyz", timeout=60).is_success, "the service is ready")
        exec(compile(block.replace(f"http://127.0.0.1:{own_port}", address), "catalog.md", "exec"), names)
        best = client.checkpoint(names["best"].id)
        assert (best.run, best.step, best.tags, best.verification) == ("tuned", 30, ("release",), "good")
        downloaded = load_file(tmp_path / "best.safetensors")
        assert set(downloaded) == {"model.weight", "model.bias"}
        assert torch.equal(downloaded["model.weight"], names["model"].weight)
        (example,) = blocks_of("docs/reference/rest-conventions.md")
        (tmp_path / "model.safetensors").unlink(missing_ok=True)
        exec(compile(example.replace("http://127.0.0.1:8470", address), "api.md", "exec"), {})
        assert capsys.readouterr().out.splitlines()[0].split()[1:3] == ["tuned", "30"]
        assert (tmp_path / "model.safetensors").stat().st_size > 60
        assert service.exit_status is None
