"""Webhook URLs and signatures. Internal: addresses and responses that a test cannot get from a network."""

from __future__ import annotations

import base64
import socket
import ssl
import time
from collections.abc import Callable

import pytest
from pydantic import ValidationError
from standardwebhooks import Webhook

from dcp.server.core.settings import Settings
from dcp.server.features.webhooks.addresses import (
    Allowed,
    RefusedUrlError,
    WebhookUrl,
    parse_url,
    permitted_addresses,
)
from dcp.server.features.webhooks.hooks import (
    SEALED_PREFIX,
    Sealer,
    SealError,
    check_secret,
    headers_for,
    new_secret,
)
from dcp.server.features.webhooks.sending import ReceiverAnswer, SendError, post
from tests.support.receivers import CERTIFICATES, Receiver, drip, raw_server

NOTHING = Allowed()
LOOPBACK = Allowed.parse(["127.0.0.0/8"])

NOT_PUBLIC = """
0.0.0.0 0.1.2.3 10.0.0.1 100.64.0.1 127.0.0.1 127.255.255.254 172.16.0.1 172.31.255.255 192.0.2.1 192.88.99.1
192.168.1.1 198.18.0.1 198.51.100.7 203.0.113.7 224.0.0.1 239.255.255.255 240.0.0.1 255.255.255.255
169.254.169.254 100.100.100.200 192.0.0.192 fd00:ec2::254 168.63.129.16
:: ::1 ::127.0.0.1 ::ffff:127.0.0.1 ::ffff:10.0.0.1 ::ffff:a9fe:a9fe ::ffff:0:127.0.0.1
64:ff9b::127.0.0.1 64:ff9b::a9fe:a9fe 64:ff9b:1::1 100::1 2001:10::1 2001:db8::1 3fff::1 5f00::1
2001::1 2002:7f00:1::1 2002:0808:0808::1 2606:4700::5efe:10.0.0.1 2606:4700::200:5efe:127.0.0.1
fc00::1 fe80::1 febf::1 fec0::1 ff02::1
"""
"""Private, reserved and multicast addresses; on the third line, metadata and other services of clouds; then
IPv6, also with IPv4 inside (mapped, NAT64, Teredo, 6to4, ISATAP)."""

PUBLIC = "1.1.1.1 8.8.8.8 172.32.0.1 100.128.0.1 192.0.1.1 223.255.255.255 2606:4700::1111"


@pytest.mark.parametrize("address", NOT_PUBLIC.split())
def test_addresses_that_are_not_public_are_refused(address: str) -> None:
    """Addresses that are not public are refused as the host and as any result of a resolution."""
    host = f"[{address}]" if ":" in address else address
    with pytest.raises(RefusedUrlError, match="webhook_allow_private"):
        parse_url(f"https://{host}/hook", NOTHING)
    target = parse_url("https://hooks.example.com/hook", NOTHING)
    with pytest.raises(RefusedUrlError, match="webhook_allow_private"):
        permitted_addresses(target, NOTHING, lambda host, port: [address])
    with pytest.raises(RefusedUrlError, match="webhook_allow_private"):
        permitted_addresses(target, NOTHING, lambda host, port: ["1.1.1.1", address])


@pytest.mark.parametrize("address", [*PUBLIC.split(), "64:ff9b::1.1.1.1", "::ffff:8.8.8.8"])
def test_public_addresses_are_accepted(address: str) -> None:
    """Public addresses are accepted, also as IPv4 in IPv6."""
    host = f"[{address}]" if ":" in address else address
    parse_url(f"https://{host}/hook", NOTHING)
    target = parse_url("https://hooks.example.com/hook", NOTHING)
    assert permitted_addresses(target, NOTHING, lambda host, port: [address, address]) == (address,)


HOSTS = """
2130706433 017700000001 0x7f000001 0x7f.0.0.1 0x7F.1 127.1 127.0.1 0177.0.0.1 127.0.0.01 127.0.0.1. 0 0x
1.1.1.1.1 256.1.1.1 8.8 foo.1 foo.0x1 [::1%25eth0] [fe80::1%eth0] [1.2.3.4] [::1 [v1.a]
localhost LocalHost. a.localhost ex%61mple.com %31%32%37.0.0.1 -a.example.com a..example.com .example.com
"""
LOOK_ALIKES = ["\uff11\uff12\uff17.0.0.1", "\u2460\u2461\u2466.0.0.1", "127\u30020\u30020\u30021"]
"""Full-width and circled digits, and full stops of another script."""
UNUSUAL = ["a" * 64 + ".example.com", "exa mple.com", "exa\tmple.com", "example.com\x00", ""]


@pytest.mark.parametrize("host", [*HOSTS.split(), *LOOK_ALIKES, *UNUSUAL])
def test_hosts_in_other_forms_are_refused(host: str) -> None:
    """Numbers, partial addresses, zones, escapes, look-alikes and local names are refused as hosts."""
    for port in ("", ":8443"):
        with pytest.raises(RefusedUrlError):
            parse_url(f"https://{host}{port}/hook", NOTHING)


URLS = """
https://user:password@example.com/ https://user@example.com/ https://example.com@127.0.0.1/
https://127.0.0.1\\@example.com/ https://example.com\\.evil.com/ https://example.com/#fragment
https://example.com#@127.0.0.1/ https:/example.com/ https:example.com //example.com/ example.com/hook
ftp://example.com/ file:///etc/passwd gopher://127.0.0.1:6379/_FLUSHALL dict://127.0.0.1:11211/
data:text/plain,x jar:https://example.com!/ https://example.com/é https://example.com:/x:y@z:
https://example.com:99999/ https://example.com:443443/ https://example.com:-1/ https://example.com:0x1bb/
"""
SPACED = [
    " https://example.com/",
    "https://example.com/ ",
    "https://example.com/a b",
    "https://example.com/\n",
]
PORTS = [f"https://example.com:{port}/" for port in (0, 1, 22, 25, 53, 110, 444, 1023, 2049, 6667, 65536)]
"""Ports of other protocols, such as mail: a webhook must not reach them."""
BROKEN = ["https://1.1.1.1 @127.0.0.1/", "https://example.com/\r\nX-Injected: 1", ""]


@pytest.mark.parametrize(
    "url", [*URLS.split(), *SPACED, *BROKEN, "https://example.com/" + "a" * 2048, *PORTS]
)
def test_urls_in_other_forms_are_refused(url: str) -> None:
    """Credentials, fragments, other schemes, white space and ambiguous URLs are refused."""
    with pytest.raises(RefusedUrlError):
        parse_url(url, Allowed.parse(["127.0.0.0/8", "example.com"]))


def test_urls_are_split_into_their_parts() -> None:
    """The host is lowercase without a final dot, the port that of the scheme, path and query unchanged."""
    assert parse_url("https://Hooks.Example.com/a/%2e?b=c@d", NOTHING) == WebhookUrl(
        "https", "hooks.example.com", 443, "/a/%2e?b=c@d"
    )
    assert parse_url("HTTPS://example.com.", NOTHING).path == "/"
    assert parse_url("https://example.com?q=1", NOTHING).path == "/?q=1"
    assert parse_url("https://example.com:8443/", NOTHING).host_header == "example.com:8443"
    assert parse_url("https://example.com:443/", NOTHING).host_header == "example.com"
    six = parse_url("https://[2606:4700:0::1111]:8443/", NOTHING)
    assert (six.host, six.host_header) == ("2606:4700::1111", "[2606:4700::1111]:8443")


def test_plain_http_needs_an_allowed_host() -> None:
    """Plain HTTP is for allowed networks and hosts; a name with another address is refused when sent."""
    with pytest.raises(RefusedUrlError, match="https"):
        parse_url("http://hooks.example.com/", NOTHING)
    with pytest.raises(RefusedUrlError, match="https"):
        parse_url("http://1.1.1.1/", LOOPBACK)
    assert parse_url("http://127.0.0.1:8080/", LOOPBACK).port == 8080
    target = parse_url("http://hooks.example.com/", LOOPBACK)
    assert permitted_addresses(target, LOOPBACK, lambda host, port: ["127.0.0.1"]) == ("127.0.0.1",)
    with pytest.raises(RefusedUrlError, match="https"):
        permitted_addresses(target, LOOPBACK, lambda host, port: ["127.0.0.1", "1.1.1.1"])


def test_allowed_networks_and_hosts_are_exact() -> None:
    """An allowed network has exactly its addresses, also as IPv4 in IPv6; an allowed host any address."""
    entries = ("10.1.0.0/16", "fd12::/16", "192.168.7.7", "Hooks.Internal.")
    allowed = Allowed.parse(Settings(webhook_allow_private=entries).webhook_allow_private)
    for url in ("https://10.1.2.3", "https://[::ffff:10.1.2.3]", "https://[fd12::1]", "http://192.168.7.7"):
        parse_url(url, allowed)
    for url in ("https://10.2.0.1/", "https://[fd13::1]/", "https://192.168.7.8/", "https://127.0.0.1/"):
        with pytest.raises(RefusedUrlError):
            parse_url(url, allowed)
    named = parse_url("http://hooks.internal:8080/", allowed)
    assert permitted_addresses(named, allowed, lambda host, port: ["172.16.0.9"]) == ("172.16.0.9",)
    other = parse_url("https://hooks.internal.example.com/", allowed)
    with pytest.raises(RefusedUrlError):
        permitted_addresses(other, allowed, lambda host, port: ["172.16.0.9"])


@pytest.mark.parametrize("entry", ["10.0.0.1/8", "10.0.0.0/33", "fe80::/129", "not a host", "a/b", ""])
def test_invalid_entries_are_refused(entry: str) -> None:
    """Invalid entries of webhook_allow_private stop the start."""
    with pytest.raises(ValueError):
        Allowed.parse([entry])
    with pytest.raises(ValueError, match="webhook_allow_private"):
        Settings(webhook_allow_private=(entry,))


def test_hosts_without_an_address_are_refused() -> None:
    """A name without an address, or with a scoped address, is refused."""
    target = parse_url("https://hooks.example.com/", NOTHING)
    with pytest.raises(OSError, match="no address"):
        permitted_addresses(target, NOTHING, lambda host, port: [])
    for wrong in ("fe80::1%eth0", "not-an-address"):
        with pytest.raises(RefusedUrlError):
            permitted_addresses(target, NOTHING, lambda host, port, wrong=wrong: [wrong])  # type: ignore[misc]


# -- signatures ----------------------------------------------------------------------------------------------

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
BODY = b'{"test": 2432232314}'


def test_the_standards_example_gives_its_signature() -> None:
    """The example of the Standard Webhooks specification gives its signature."""
    assert headers_for([SECRET], "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330.0, BODY) == {
        "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
        "webhook-timestamp": "1614265330",
        "webhook-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
    }


def test_new_secrets_differ_and_sign() -> None:
    """New secrets have 32 random bytes in the format of receivers' libraries; weak secrets are refused."""
    secrets = {new_secret() for _ in range(20)}
    assert len(secrets) == 20
    for secret in secrets:
        check_secret(secret)
        assert len(base64.b64decode(secret.removeprefix("whsec_"))) == 32
        headers = headers_for([SECRET, secret], "evt_1", time.time(), BODY)
        assert Webhook(secret).verify(BODY, headers) == Webhook(SECRET).verify(BODY, headers)
    for weak in ("", "abc", "whsec_", "whsec_%%%%", "whsec_" + "A" * 20, "whsec_" + "A" * 120):
        with pytest.raises(ValueError):
            check_secret(weak)


# -- single requests -----------------------------------------------------------------------------------------

TRUSTING = ssl.create_default_context(cafile=CERTIFICATES / "authority.pem")
HANG_SECONDS = 60.0


def send(
    target: WebhookUrl,
    *addresses: str,
    body: bytes = b"{}",
    timeout_seconds: float = 30.0,
    context: ssl.SSLContext = TRUSTING,
) -> ReceiverAnswer:
    """Call `post` with an additional header."""
    return post(target, addresses, {"X-Mine": "1"}, body, timeout_seconds=timeout_seconds, context=context)


def test_requests_use_the_checked_address() -> None:
    """The request goes to the given address without a resolution, and the certificate must fit the URL."""
    with Receiver(tls=True) as receiver:
        target = WebhookUrl("https", "hooks.example.com", receiver.port, "/a?b=c")
        assert send(target, "127.0.0.1", body=b'{"x":1}') == ReceiverAnswer(204, None)
        request = receiver.requests[0]
        assert (request.method, request.path, request.body) == ("POST", "/a?b=c", b'{"x":1}')
        assert request.headers["host"] == f"hooks.example.com:{receiver.port}"
        assert request.headers["x-mine"] == "1"


def test_certificates_for_other_hosts_are_refused() -> None:
    """A certificate for another name or of an unknown authority is refused before sending."""
    with Receiver(tls=True) as receiver:
        with pytest.raises(SendError, match="certificate"):
            send(WebhookUrl("https", "other.example.com", receiver.port, "/"), "127.0.0.1")
        with pytest.raises(SendError, match="certificate"):
            named = WebhookUrl("https", "hooks.example.com", receiver.port, "/")
            send(named, "127.0.0.1", context=ssl.create_default_context())
        assert receiver.requests == []


def test_the_next_address_is_tried_after_a_refusal() -> None:
    """If an address refuses the connection, the next one is tried; without a next one an error is raised."""
    with Receiver() as receiver:
        target = WebhookUrl("http", "hooks.example.com", receiver.port, "/")
        assert send(target, "127.0.0.2", "127.0.0.1").status == 204
        with pytest.raises(SendError, match="refused"):
            send(target, "127.0.0.3", "127.0.0.2")


def test_retry_after_is_read_as_seconds_within_bounds() -> None:
    """Retry-After is read as seconds, a day at most."""
    expected = {"120": 120.0, "999999999999": 86_400.0, "-1": None, "soon": None, "": None}
    with Receiver(answers=[(503, {"Retry-After": value}) for value in expected]) as receiver:
        for seconds in expected.values():
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


@pytest.mark.parametrize(
    ("act", "scheme"), [(_silent, "https"), (_drips_headers, "http"), (_continues, "http")]
)
def test_slow_receivers_end_at_the_timeout(act: Callable[[socket.socket], None], scheme: str) -> None:
    """Silence, slow bytes and endless interim responses end at the timeout, also during TLS."""
    with raw_server(act) as port:
        began = time.monotonic()
        with pytest.raises(SendError):
            send(WebhookUrl(scheme, "127.0.0.1", port, "/"), "127.0.0.1", timeout_seconds=0.4)
        assert time.monotonic() - began < HANG_SECONDS / 6  # the server would continue for 20 seconds


@pytest.mark.parametrize(
    "answer",
    [
        *(b"", b"\x00" * 100, b"SSH-2.0-OpenSSH_9.9\r\n", b"HTTP/1.1 abc OK\r\n\r\n"),
        *(b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 10_000, b"HTTP/1.1 200 OK\r\nX: " + b"y" * 1_000_000),
    ],
    ids=["nothing", "zeros", "ssh", "status", "many-headers", "long-header"],
)
def test_other_protocols_raise(answer: bytes) -> None:
    """Other protocols and endless heads raise an error, with bounded memory."""

    def act(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(answer)

    with raw_server(act) as port, pytest.raises(SendError):
        send(WebhookUrl("http", "127.0.0.1", port, "/"), "127.0.0.1", timeout_seconds=HANG_SECONDS)


def test_bodies_are_not_read() -> None:
    """The body of a response is not read: only the status counts."""

    def act(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        drip(connection, b"x" * 65536, 0.01)

    with raw_server(act) as port:
        answer = send(WebhookUrl("http", "127.0.0.1", port, "/"), "127.0.0.1", timeout_seconds=HANG_SECONDS)
    assert answer.status == 200


# -- sealed secrets ------------------------------------------------------------------------------------------

KEY = "first key of the operator, long enough"


def test_changed_sealed_secrets_are_detected() -> None:
    """A changed byte or length of a sealed secret is detected."""
    sealer = Sealer((KEY.encode(),))
    data = base64.urlsafe_b64decode(sealer.seal(new_secret()).removeprefix(SEALED_PREFIX))
    changed = [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in range(len(data))]
    for wrong in (*changed, data[:-1], data[1:], data + b"\0", b""):
        with pytest.raises(SealError):
            sealer.open(SEALED_PREFIX + base64.urlsafe_b64encode(wrong).decode())
    with pytest.raises(SealError):
        sealer.open(SEALED_PREFIX + "no base64")


@pytest.mark.parametrize("wrong", [{"webhook_key": "short"}, {"webhook_key_before": KEY}])
def test_invalid_keys_stop_the_start(wrong: dict[str, str]) -> None:
    """A short key, or a previous key without a current key, stops the start."""
    with pytest.raises(ValidationError, match="webhook_key"):
        Settings.model_validate(wrong)
