import re
from pathlib import Path

import pytest
import torch

import dcp
from dcp.demo.places import newest_checkpoint
from dcp.demo.s3_server import S3Server
from tests.support.s3 import raw_s3

README = Path(__file__).parents[1] / "README.md"


def test_python_examples_run_as_they_stand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3_server: S3Server
) -> None:
    """The README's Python blocks, one after the other, with nothing but a model given.

    But for those that need the service, which tests/server/test_readme_service.py starts.
    """
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    blocks = [block for block in blocks if "dcp.server" not in block]
    assert len(blocks) == 8
    monkeypatch.chdir(tmp_path)
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    with raw_s3(s3_server) as server:
        server.client.create_bucket(Bucket="my-bucket")
    names: dict[str, object] = {"model": torch.nn.Linear(3, 4)}
    for block in blocks:
        exec(compile(block, str(README), "exec"), names)
    assert (tmp_path / "checkpoints" / "step-00001000" / "manifest.msgpack").exists()
    report = names["report"]
    assert getattr(report, "unexpected") == ["rng.rank-0"]  # noqa: B009 - names are objects to mypy
    assert names["state"]["step"] == 1000  # type: ignore[index]
    assert names["weights"]["weight"].dtype is torch.bfloat16  # type: ignore[index]
    assert names["restored"] is None
    manager = dcp.CheckpointManager(tmp_path / "checkpoints" / "run", no_dist=True)
    assert manager.all_steps() == [50, 90, 100]  # each 50th, the last two; the best is one of them
    manager.close()
    assert dcp.open_index(tmp_path / "checkpoints" / "by-hand").tensor_count == 2
    assert dcp.open_index("s3://my-bucket/runs/by-hand").tensor_count == 2
    assert newest_checkpoint("s3://my-bucket/runs/first") == "step-00000010"
    torch_state = torch.load(tmp_path / "model.pt", weights_only=True)
    assert torch_state["model"]["weight"].dtype == torch.bfloat16
    assert len(list((tmp_path / "checkpoints" / "from-file").glob("*.distcp"))) >= 1
