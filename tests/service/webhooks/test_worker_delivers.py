"""Delivery from a checkpoint on disk to a receiver, by a service and its worker."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.support.app import running_app
from tests.support.hook_bench import verify
from tests.support.job_workers import served_by
from tests.support.receivers import Receiver
from tests.support.service import wait_until


def test_the_worker_sends_registrations_and_verdicts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A registration and a verification are sent in order and signed; the deliveries are listed."""
    (tmp_path / "runs").mkdir()
    save_file({"weight": np.arange(6, dtype=np.float32)}, tmp_path / "runs/model-7.safetensors")
    roots = {"runs": {"url": str(tmp_path / "runs"), "scan_seconds": 0}}
    given: dict[str, Any] = {"webhook_allow_private": ["127.0.0.0/8"], "poll_seconds": 0.1, "auth": "off"}
    given |= {"webhook_key": "a key of the operator, long enough", "work_folder": tmp_path / "work"}
    with (
        Receiver(answers=[503]) as receiver,
        running_app(f"sqlite:///{tmp_path / 'catalog.sqlite'}", tmp_path, roots=roots, **given) as app,
    ):
        client = app.base
        hook = client.post("/api/v1/webhooks", json={"url": receiver.url, "roots": ["runs"]}).json()
        deliveries = f"/api/v1/webhooks/{hook['id']}/deliveries"

        def listed() -> list[Any]:
            items: list[Any] = client.get(deliveries).json()["items"]
            return items

        with served_by(app.service.settings):
            body = {"root": "runs", "key": "model-7.safetensors"}
            number = client.post("/api/v1/checkpoints", json=body).json()["id"]
            (failed,) = wait_until(
                lambda: [one for one in listed() if one["status_code"] == 503], "a failure"
            )
            assert (failed["state"], failed["attempts"]) == ("waiting", 1)
            client.post(f"{deliveries}/{failed['id']}/redeliver")  # instead of waiting ten seconds
            wait_until(lambda: len(receiver.requests) >= 2, "it was taken")
            client.post(f"/api/v1/checkpoints/{number}/verifications")
            wait_until(lambda: len(receiver.requests) >= 3, "the event of the verification")
            wait_until(lambda: {one["state"] for one in listed()} == {"delivered"}, "all is written down")
    events = [json.loads(request.body) for request in receiver.requests]
    assert [event["type"] for event in events] == ["checkpoint.committed"] * 2 + ["checkpoint.verified"]
    assert events[0] == events[1] and {event["data"]["checkpoint"]["id"] for event in events} == {number}
    for request in receiver.requests:
        assert verify([hook["secret"]], request.headers, request.body, time.time())
    secret = hook["secret"].removeprefix("whsec_")
    assert secret not in "".join(capfd.readouterr())
    files = list(tmp_path.glob("*.sqlite*"))
    assert files and not [path for path in files if secret.encode() in path.read_bytes()]
