"""One request: to the address that was judged, under the name of the URL, within its time."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable

import pytest

from dcp.server.webhooks.addresses import WebhookUrl
from dcp.server.webhooks.sending import ReceiverAnswer, SendError, post
from tests.support.receivers import CERTIFICATES, Receiver, drip, raw_server

TRUSTING = ssl.create_default_context(cafile=CERTIFICATES / "authority.pem")
HANG_SECONDS = 60.0


def send(
    target: WebhookUrl,
    *addresses: str,
    body: bytes = b"{}",
    timeout_seconds: float = 30.0,
    context: ssl.SSLContext = TRUSTING,
) -> ReceiverAnswer:
    """`post` with a header of its own."""
    return post(target, addresses, {"X-Mine": "1"}, body, timeout_seconds=timeout_seconds, context=context)


def test_a_request_goes_to_the_address_under_the_name_of_the_url() -> None:
    """Nobody resolves the name: hooks.example.com is reached at the address given, and proves to be it."""
    with Receiver(tls=True) as receiver:
        target = WebhookUrl("https", "hooks.example.com", receiver.port, "/a?b=c")
        assert send(target, "127.0.0.1", body=b'{"x":1}') == ReceiverAnswer(204, None)
        request = receiver.requests[0]
        assert (request.method, request.path, request.body) == ("POST", "/a?b=c", b'{"x":1}')
        assert request.headers["host"] == f"hooks.example.com:{receiver.port}"
        assert request.headers["x-mine"] == "1"


def test_certificates_of_others_and_of_nobody_are_refused() -> None:
    """A certificate for another name, and one that nobody trusted has signed; nothing is sent."""
    with Receiver(tls=True) as receiver:
        with pytest.raises(SendError, match="certificate"):
            send(WebhookUrl("https", "other.example.com", receiver.port, "/"), "127.0.0.1")
        with pytest.raises(SendError, match="certificate"):
            send(
                WebhookUrl("https", "hooks.example.com", receiver.port, "/"),
                "127.0.0.1",
                context=ssl.create_default_context(),
            )
        assert receiver.requests == []


def test_redirects_are_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it points to, the second server hears nothing. Nor does a proxy of the environment."""
    with Receiver() as inner, Receiver() as proxy:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.port}")
        monkeypatch.setenv("all_proxy", f"http://127.0.0.1:{proxy.port}")
        for status in (301, 302, 303, 307, 308):
            with Receiver(answers=[(status, {"Location": inner.url})]) as receiver:
                target = WebhookUrl("http", "127.0.0.1", receiver.port, "/")
                assert send(target, "127.0.0.1").status == status
        assert inner.requests == proxy.requests == []


def test_the_next_address_is_tried_where_one_takes_no_connection() -> None:
    """A host with two addresses, one of which is dead, is reached; with none it is an error that says so."""
    with Receiver() as receiver:
        target = WebhookUrl("http", "hooks.example.com", receiver.port, "/")
        assert send(target, "127.0.0.2", "127.0.0.1").status == 204
        with pytest.raises(SendError, match="refused"):
            send(target, "127.0.0.3", "127.0.0.2")


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("120", 120.0), ("999999999999", 86_400.0), ("-1", None), ("soon", None), ("", None)],
)
def test_retry_after_is_read_as_seconds_within_bounds(value: str, seconds: float | None) -> None:
    """A receiver may ask for a day at most."""
    with Receiver(answers=[(503, {"Retry-After": value})]) as receiver:
        answer = send(WebhookUrl("http", "127.0.0.1", receiver.port, "/"), "127.0.0.1")
    assert answer == ReceiverAnswer(503, seconds)


def _silent(connection: socket.socket) -> None:
    while connection.recv(65536):
        pass


def _drips_headers(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nX-Long: ")
    drip(connection, b"a", 0.05)


def _continues(connection: socket.socket) -> None:
    drip(connection, b"HTTP/1.1 100 Continue\r\n\r\n", 0.05)


@pytest.mark.parametrize("act", [_silent, _drips_headers, _continues])
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_no_receiver_stretches_the_time(act: Callable[[socket.socket], None], scheme: str) -> None:
    """Silence, a byte now and then, interim answers without end, also where TLS should begin: cut off."""
    with raw_server(act) as port:
        began = time.monotonic()
        with pytest.raises(SendError):
            send(WebhookUrl(scheme, "127.0.0.1", port, "/"), "127.0.0.1", timeout_seconds=0.4)
        assert time.monotonic() - began < HANG_SECONDS / 6  # of the 20 seconds that the server would go on


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\x00" * 100,
        b"SSH-2.0-OpenSSH_9.9\r\n",
        b"HTTP/1.1 abc OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 10_000,
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 1_000_000,
    ],
    ids=["nothing", "zeros", "ssh", "status", "many-headers", "long-header"],
)
def test_what_is_no_answer_is_an_error(answer: bytes) -> None:
    """Other protocols, and heads without end: an error, and bounded memory."""

    def act(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(answer)

    with raw_server(act) as port, pytest.raises(SendError):
        send(WebhookUrl("http", "127.0.0.1", port, "/"), "127.0.0.1", timeout_seconds=HANG_SECONDS)


def test_bodies_are_not_read() -> None:
    """An endless body costs nothing: the status is what counts."""

    def act(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        drip(connection, b"x" * 65536, 0.01)

    with raw_server(act) as port:
        answer = send(WebhookUrl("http", "127.0.0.1", port, "/"), "127.0.0.1", timeout_seconds=HANG_SECONDS)
    assert answer.status == 200
