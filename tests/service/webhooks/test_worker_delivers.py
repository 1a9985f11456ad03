"""From a checkpoint on disk to a receiver, by a real service and its worker."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.support.hook_bench import verify
from tests.support.receivers import Receiver
from tests.support.service import Service, wait_until


def test_what_is_registered_and_verified_is_told_by_the_worker(tmp_path: Path) -> None:
    """A webhook made over HTTP gets both events, signed and in order; their deliveries are listed."""
    root = tmp_path / "runs"
    (root / "first").mkdir(parents=True)
    save_file({"weight": np.arange(6, dtype=np.float32)}, root / "first" / "model-7.safetensors")
    settings = {
        "roots": {"runs": {"url": str(root), "scan_seconds": 0}},
        "webhook_allow_private": ["127.0.0.0/8"],
        "poll_seconds": 0.1,
        "webhook_key": "a key of the operator, long enough",  # DCP_SERVER_WEBHOOK_KEY in its environment
    }
    with Receiver(answers=[503]) as receiver, Service(tmp_path / "service", settings) as service:
        client = service.client()
        hook = client.post("/api/v1/webhooks", json={"url": receiver.url, "roots": ["runs"]})
        assert hook.status_code == 201, hook.text
        deliveries = f"/api/v1/webhooks/{hook.json()['id']}/deliveries"
        body = {"root": "runs", "key": "first/model-7.safetensors"}
        made = client.post("/api/v1/checkpoints", json=body)
        assert made.status_code == 201, made.text
        (failed,) = wait_until(
            lambda: [item for item in client.get(deliveries).json()["items"] if item["status_code"] == 503],
            "the first attempt failed",
        )
        assert (failed["state"], failed["attempts"]) == ("waiting", 1)
        again = client.post(f"{deliveries}/{failed['id']}/redeliver")  # instead of ten seconds of waiting
        assert again.status_code == 202, again.text
        wait_until(lambda: len(receiver.requests) >= 2, "it was taken")
        checkpoint_id = made.json()["id"]
        assert client.post(f"/api/v1/checkpoints/{checkpoint_id}/verifications").status_code == 202
        wait_until(lambda: len(receiver.requests) >= 3, "the verification is told")
        wait_until(
            lambda: all(item["state"] == "delivered" for item in client.get(deliveries).json()["items"]),
            "all is written down",
        )
    told = [json.loads(request.body) for request in receiver.requests]
    assert [event["type"] for event in told] == ["checkpoint.committed"] * 2 + ["checkpoint.verified"]
    assert told[0] == told[1]
    assert {event["data"]["checkpoint"]["id"] for event in told} == {checkpoint_id}
    for request in receiver.requests:
        assert verify([hook.json()["secret"]], request.headers, request.body, time.time())
    secret = hook.json()["secret"].removeprefix("whsec_")
    assert secret not in service.log()
    files = [path for path in (tmp_path / "service").rglob("*.sqlite*") if path.is_file()]
    assert files and not [path for path in files if secret.encode() in path.read_bytes()]
