"""Deliveries to real receivers, on both databases: content, recipients, retries and recorded outcomes."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.app import running_app
from tests.support.databases import MakeDatabase
from tests.support.hook_bench import MAX_ATTEMPTS, NOW, RETRY_SECONDS, Bench, verify
from tests.support.receivers import Receiver, raw_server

DAY = 86_400.0


@pytest.fixture
def bench(make_database: MakeDatabase, tmp_path: Path) -> Iterator[Bench]:
    """Start the application on each database."""
    given = {"webhook_allow_private": ["127.0.0.0/8"], "webhook_seconds": 20.0, "auth": "off"}
    with running_app(make_database(), tmp_path, clock=lambda: NOW, **given) as app:
        yield Bench(app)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """Start a receiver that accepts each request by default."""
    with Receiver() as started:
        yield started


def types(receiver: Receiver) -> list[str]:
    """Return the types of the received events, in order."""
    return [json.loads(request.body)["type"] for request in receiver.requests]


def test_events_are_signed_and_have_all_data(bench: Bench, receiver: Receiver) -> None:
    """A delivery has type, time, checkpoint and data of the event, signed with the webhook's secret."""
    hook = bench.hook(receiver.url)
    bench.emit(mode="full", at=NOW + 0.25)
    assert bench.round(NOW + 1) == 1
    request = receiver.requests[0]
    assert json.loads(request.body) == {
        "type": "checkpoint.committed",
        "timestamp": "2026-09-21T14:13:20.250Z",
        "data": {
            "root": "main",
            "checkpoint": {
                "id": bench.checkpoint_ids["main"],
                "root": "main",
                "run": "first",
                "key": "first/step-7",
                "step": 7,
                "format": "dcp",
                "href": f"/api/v1/checkpoints/{bench.checkpoint_ids['main']}",
            },
            "detail": {"mode": "full"},
        },
    }
    assert request.headers["content-type"] == "application/json"
    assert verify([hook.secret], request.headers, request.body, NOW + 1)
    assert request.headers["webhook-id"].startswith("evt_")
    assert not verify(["whsec_" + "A" * 44], request.headers, request.body, NOW + 1)
    (delivery,) = bench.deliveries(hook)
    assert (delivery.state, delivery.status_code, delivery.attempt) == ("delivered", 204, 1)
    assert bench.round(NOW + 5) == 0


def test_webhooks_get_their_events_and_roots_only(bench: Bench) -> None:
    """A webhook gets later events of its kinds and roots, and none while disabled."""
    with Receiver() as one, Receiver() as two, Receiver() as three, Receiver() as four:
        bench.emit(at=NOW - 1)
        bench.hook(one.url)
        bench.hook(two.url, events=("checkpoint.verified",))
        bench.hook(three.url, root="other")
        disabled = bench.hook(four.url)
        bench.change(disabled, is_enabled=False)
        bench.emit("checkpoint.committed", "main")
        bench.emit("checkpoint.verified", "other")
        bench.emit("something.else", "other")
        bench.emit("checkpoint.deleted", "")  # not for webhooks with given roots
        bench.round()
        bench.change(disabled, is_enabled=True)
        bench.round(NOW + 1)
        assert types(one) == ["checkpoint.committed", "checkpoint.verified", "checkpoint.deleted"]
        assert types(two) == ["checkpoint.verified"]
        assert types(three) == ["checkpoint.verified"]
        assert types(four) == []


def test_failed_deliveries_are_retried_then_fail(bench: Bench, receiver: Receiver) -> None:
    """A retry has the same id and body and a new signature; the last attempt fails the delivery."""
    hook = bench.hook(receiver.url)
    bench.emit()
    now = NOW
    receiver.answers = [500] * MAX_ATTEMPTS
    for attempt in range(1, MAX_ATTEMPTS + 1):
        assert bench.round(now) == 1
        (delivery,) = bench.deliveries(hook)
        assert (delivery.attempt, delivery.status_code) == (attempt, 500)
        if attempt == MAX_ATTEMPTS:
            break
        pause = delivery.due_seconds - now
        assert 0.9 * RETRY_SECONDS[attempt - 1] <= pause <= 1.1 * RETRY_SECONDS[attempt - 1] + 30
        assert bench.round(delivery.due_seconds - 0.1) == 0
        now = delivery.due_seconds
    assert (delivery.state, delivery.error) == ("failed", "status 500: expected 2xx")
    assert bench.round(now + 100 * DAY) == 0
    assert len({request.body for request in receiver.requests}) == 1
    assert len({request.headers["webhook-id"] for request in receiver.requests}) == 1
    assert len({request.headers["webhook-signature"] for request in receiver.requests}) == MAX_ATTEMPTS


def test_redirects_are_failures(bench: Bench, receiver: Receiver) -> None:
    """A redirect is not followed and counts as a failure."""
    with Receiver() as inner:
        hook = bench.hook(receiver.url)
        bench.emit()
        receiver.answers = [(307, {"Location": inner.url})]
        bench.round()
        (delivery,) = bench.deliveries(hook)
        assert delivery.error == "status 307: redirects are not followed"
        assert inner.requests == []


def test_status_410_or_long_failure_disables(bench: Bench, receiver: Receiver) -> None:
    """410 disables a webhook at once, other failures after days; enabling clears the reason and sends."""
    gone, failing = bench.hook(receiver.url), bench.hook(receiver.url)
    bench.change(failing, is_enabled=False)
    bench.emit()
    receiver.answers = [410]
    bench.round()
    assert bench.state(gone).disabled_reason == "the receiver responded with 410 Gone"
    bench.change(failing, is_enabled=True)
    bench.emit()
    receiver.answers = [500, 500]
    bench.round()
    bench.attempts_are(MAX_ATTEMPTS - 1)
    bench.round(NOW + 6 * DAY + 60)
    state = bench.state(failing)
    assert (state.is_enabled, state.disabled_reason) == (False, "all deliveries failed for 6 days")
    assert bench.audited("webhook.disable") == [f"webhook:{failing.id}", f"webhook:{gone.id}"]
    assert bench.round(NOW + 7 * DAY) == 0
    enabled = bench.change(gone, is_enabled=True)
    assert (enabled.disabled_reason, enabled.failing_since) == (None, None)
    assert bench.round(NOW + 7 * DAY) == 1
    assert bench.deliveries(gone)[0].state == "delivered"


def test_deliveries_of_a_killed_sender_are_sent(bench: Bench, receiver: Receiver) -> None:
    """Deliveries of a killed sender are sent after its lease ends; its late outcome is not recorded."""
    hook = bench.hook(receiver.url)
    bench.emit()
    record = bench.claim(hook, 80.0)
    assert bench.round(NOW + 79) == 0
    assert bench.round(NOW + 81) == 1
    record(NOW + 82)
    (delivery,) = bench.deliveries(hook)
    assert (delivery.state, delivery.attempt, delivery.status_code) == ("delivered", 2, 204)
    assert bench.state(hook).failing_since is None


def test_concurrent_senders_send_each_event_once(bench: Bench, receiver: Receiver) -> None:
    """Four concurrent senders send 40 events to two webhooks once each."""
    with Receiver() as other:
        bench.hook(receiver.url)
        bench.hook(other.url)
        for _ in range(40):
            bench.emit()
        with ThreadPoolExecutor(4) as pool:
            for _ in range(3):
                for sent in [pool.submit(bench.round) for _ in range(4)]:
                    sent.result(120)
        for one in (receiver, other):
            identifiers = [request.headers["webhook-id"] for request in one.requests]
            assert len(identifiers) == len({*identifiers}) == 40


def test_a_dead_receiver_delays_no_other(bench: Bench, receiver: Receiver) -> None:
    """A receiver that never answers costs one attempt a round and does not delay other receivers."""

    def silent(connection: socket.socket) -> None:
        while connection.recv(65536):
            pass

    bench.allow("127.0.0.0/8", seconds=0.5)
    with raw_server(silent) as port:
        dead = bench.hook(f"http://127.0.0.1:{port}/")
        alive = bench.hook(receiver.url)
        for _ in range(5):
            bench.emit()
        bench.round()
        bench.allow("127.0.0.0/8")
        bench.round(NOW + 1)  # on a busy machine some may be left for the next round
    assert len(receiver.requests) == len(bench.deliveries(alive)) == 5
    assert [delivery.attempt for delivery in bench.deliveries(dead)] == [1, 0, 0, 0, 0]
    assert bench.deliveries(dead)[0].error == "no response within 0.5 s"


@pytest.mark.parametrize("later", [["169.254.169.254"], ["127.0.0.1", "127.0.0.2"]])
def test_hosts_are_resolved_once_for_each_delivery(
    bench: Bench, receiver: Receiver, later: list[str]
) -> None:
    """A host is resolved once for each delivery, and the checked address is used (no DNS rebinding)."""
    answers = iter([["127.0.0.1"], later])
    bench.allow("127.0.0.1/32")
    hook = bench.hook(f"http://hooks.example.com:{receiver.port}/hook")
    for _ in range(2):
        bench.emit()
        bench.round(NOW, lambda host, port: next(answers))
    assert [delivery.state for delivery in bench.deliveries(hook)] == ["delivered", "waiting"]
    assert len(receiver.requests) == 1
    assert receiver.requests[0].headers["host"] == f"hooks.example.com:{receiver.port}"
    error = bench.deliveries(hook)[1].error or ""
    assert error.startswith("refused: hooks.example.com is not a public address")
    assert next(answers, None) is None
    direct = bench.hook(receiver.url)  # checked again when sent: the settings have changed
    bench.allow()
    bench.emit()
    bench.round(NOW, lambda host, port: ["127.0.0.1"])
    assert len(receiver.requests) == 1
    assert (bench.deliveries(direct)[0].error or "").startswith("refused:")


def test_rotated_secrets_sign_both_until_the_overlap_ends(bench: Bench, receiver: Receiver) -> None:
    """After a rotation both secrets sign until the overlap ends."""
    hook = bench.hook(receiver.url)
    old = hook.secret
    new = bench.rotate(hook, 3600.0)
    for at in (NOW + 10, NOW + 3610):
        bench.emit(at=at)
        bench.round(at)
    during, after = receiver.requests
    for secret in (old, new):
        assert verify([secret], during.headers, during.body, NOW + 10)
    assert verify([new], after.headers, after.body, NOW + 3610)
    assert not verify([old], after.headers, after.body, NOW + 3610)
