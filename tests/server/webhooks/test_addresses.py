"""Where a webhook may go: a corpus of URLs and addresses, and names that change what they resolve to."""

from __future__ import annotations

import pytest

from dcp.server.settings import Settings
from dcp.server.webhooks.addresses import (
    Allowed,
    RefusedUrlError,
    WebhookUrl,
    parse_url,
    permitted_addresses,
    resolve_host,
)

NOTHING = Allowed()
LOOPBACK = Allowed.parse(["127.0.0.0/8"])

NOT_PUBLIC = [
    "0.0.0.0",
    "0.1.2.3",
    "10.0.0.1",
    "100.64.0.1",
    "100.100.100.200",  # metadata, Alibaba
    "127.0.0.1",
    "127.255.255.254",
    "168.63.129.16",  # Azure's own services
    "169.254.169.254",  # metadata, nearly everywhere
    "172.16.0.1",
    "172.31.255.255",
    "192.0.0.192",  # metadata, Oracle
    "192.0.2.1",
    "192.88.99.1",
    "192.168.1.1",
    "198.18.0.1",
    "198.51.100.7",
    "203.0.113.7",
    "224.0.0.1",
    "239.255.255.255",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::127.0.0.1",  # compatible, long deprecated
    "::ffff:127.0.0.1",
    "::ffff:10.0.0.1",
    "::ffff:a9fe:a9fe",
    "::ffff:0:127.0.0.1",
    "64:ff9b::127.0.0.1",
    "64:ff9b::a9fe:a9fe",
    "64:ff9b:1::1",
    "100::1",
    "2001::1",  # Teredo
    "2001:10::1",
    "2001:db8::1",
    "2002:7f00:1::1",  # 6to4 of 127.0.0.1
    "2002:0808:0808::1",
    "2606:4700::5efe:10.0.0.1",  # ISATAP
    "2606:4700::200:5efe:127.0.0.1",
    "3fff::1",
    "5f00::1",
    "fc00::1",
    "fd00:ec2::254",  # metadata, AWS
    "fe80::1",
    "febf::1",
    "fec0::1",
    "ff02::1",
]

PUBLIC = [
    "1.1.1.1",
    "8.8.8.8",
    "172.32.0.1",
    "100.128.0.1",
    "192.0.1.1",
    "223.255.255.255",
    "2606:4700::1111",
]


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_addresses_that_are_not_public_are_refused_written_and_resolved(address: str) -> None:
    """As the host of the URL, and as what a name resolves to, also as the last of several addresses."""
    host = f"[{address}]" if ":" in address else address
    with pytest.raises(RefusedUrlError, match="webhook_allow_private"):
        parse_url(f"https://{host}/hook", NOTHING)
    target = parse_url("https://hooks.example.com/hook", NOTHING)
    with pytest.raises(RefusedUrlError, match="webhook_allow_private"):
        permitted_addresses(target, NOTHING, lambda host, port: [address])
    with pytest.raises(RefusedUrlError, match="webhook_allow_private"):
        permitted_addresses(target, NOTHING, lambda host, port: ["1.1.1.1", address])


@pytest.mark.parametrize("address", [*PUBLIC, "64:ff9b::1.1.1.1", "::ffff:8.8.8.8"])
def test_public_addresses_are_taken(address: str) -> None:
    """The guard does not refuse what is everybody's, nor that in the clothes of IPv6."""
    host = f"[{address}]" if ":" in address else address
    parse_url(f"https://{host}/hook", NOTHING)
    target = parse_url("https://hooks.example.com/hook", NOTHING)
    assert permitted_addresses(target, NOTHING, lambda host, port: [address, address]) == (address,)


@pytest.mark.parametrize(
    "host",
    [
        "2130706433",  # 127.0.0.1 in one number
        "017700000001",
        "0x7f000001",
        "0x7f.0.0.1",
        "0x7F.1",
        "127.1",
        "127.0.1",
        "0177.0.0.1",
        "127.0.0.01",
        "127.0.0.1.",
        "0",
        "0x",
        "1.1.1.1.1",
        "256.1.1.1",
        "8.8",
        "foo.1",
        "foo.0x1",
        "[::1%25eth0]",
        "[fe80::1%eth0]",
        "[1.2.3.4]",
        "[::1",
        "[v1.a]",
        "localhost",
        "LocalHost.",
        "a.localhost",
        "\uff11\uff12\uff17.0.0.1",  # digits of full width
        "\u2460\u2461\u2466.0.0.1",  # in circles
        "127\u30020\u30020\u30021",  # with full stops of another script
        "ex%61mple.com",
        "%31%32%37.0.0.1",
        "-a.example.com",
        "a..example.com",
        ".example.com",
        "a" * 64 + ".example.com",
        "exa mple.com",
        "exa\tmple.com",
        "example.com\x00",
        "",
    ],
)
def test_hosts_in_other_forms_are_refused(host: str) -> None:
    """Numbers, half addresses, zones, escapes, look-alikes and names of this machine: nothing is guessed."""
    for port in ("", ":8443"):
        with pytest.raises(RefusedUrlError):
            parse_url(f"https://{host}{port}/hook", NOTHING)


@pytest.mark.parametrize(
    "url",
    [
        "https://user:password@example.com/",
        "https://user@example.com/",
        "https://example.com@127.0.0.1/",
        "https://1.1.1.1 @127.0.0.1/",
        "https://127.0.0.1\\@example.com/",
        "https://example.com\\.evil.com/",
        "https://example.com/#fragment",
        "https://example.com#@127.0.0.1/",
        "https:/example.com/",
        "https:example.com",
        "//example.com/",
        "example.com/hook",
        "ftp://example.com/",
        "file:///etc/passwd",
        "gopher://127.0.0.1:6379/_FLUSHALL",
        "dict://127.0.0.1:11211/",
        "data:text/plain,x",
        "jar:https://example.com!/",
        " https://example.com/",
        "https://example.com/ ",
        "https://example.com/a b",
        "https://example.com/\r\nX-Injected: 1",
        "https://example.com/\n",
        "https://example.com/é",
        "https://example.com:/x:y@z:",
        "https://example.com:99999/",
        "https://example.com:443443/",
        "https://example.com:-1/",
        "https://example.com:0x1bb/",
        "https://example.com/" + "a" * 2048,
        "",
    ],
)
def test_urls_in_other_forms_are_refused(url: str) -> None:
    """Credentials, fragments, other schemes, white space, line breaks, and what parsers disagree on."""
    with pytest.raises(RefusedUrlError):
        parse_url(url, Allowed.parse(["127.0.0.0/8", "example.com"]))


@pytest.mark.parametrize("port", [0, 1, 22, 25, 53, 110, 444, 1023, 2049, 6000, 6667, 10080, 65536])
def test_ports_of_other_protocols_are_refused(port: int) -> None:
    """A webhook is not a way to speak to mail servers and the like, wherever they are."""
    with pytest.raises(RefusedUrlError):
        parse_url(f"https://example.com:{port}/", LOOPBACK)


def test_urls_are_taken_apart() -> None:
    """Host in lower case and without its last dot, the port of the scheme, path and query as they are."""
    assert parse_url("https://Hooks.Example.com/a/%2e?b=c@d", NOTHING) == WebhookUrl(
        "https", "hooks.example.com", 443, "/a/%2e?b=c@d"
    )
    assert parse_url("HTTPS://example.com.", NOTHING).path == "/"
    assert parse_url("https://example.com?q=1", NOTHING).path == "/?q=1"
    assert parse_url("https://example.com:8443/", NOTHING).host_header == "example.com:8443"
    assert parse_url("https://example.com:443/", NOTHING).host_header == "example.com"
    six = parse_url("https://[2606:4700:0::1111]:8443/", NOTHING)
    assert (six.host, six.host_header) == ("2606:4700::1111", "[2606:4700::1111]:8443")


def test_http_is_for_what_the_operator_names_only() -> None:
    """Plain text goes to allowed networks and hosts; a name that leads elsewhere is refused when sent to."""
    with pytest.raises(RefusedUrlError, match="https"):
        parse_url("http://hooks.example.com/", NOTHING)
    with pytest.raises(RefusedUrlError, match="https"):
        parse_url("http://1.1.1.1/", LOOPBACK)
    assert parse_url("http://127.0.0.1:8080/", LOOPBACK).port == 8080
    target = parse_url("http://hooks.example.com/", LOOPBACK)
    assert permitted_addresses(target, LOOPBACK, lambda host, port: ["127.0.0.1"]) == ("127.0.0.1",)
    with pytest.raises(RefusedUrlError, match="https"):
        permitted_addresses(target, LOOPBACK, lambda host, port: ["127.0.0.1", "1.1.1.1"])


def test_allowed_networks_and_hosts_open_no_more_than_they_say() -> None:
    """10.1.0.0/16 allows just that, in IPv6's clothes too; a host's name allows whatever it resolves to."""
    entries = ("10.1.0.0/16", "fd12::/16", "192.168.7.7", "Hooks.Internal.")
    allowed = Allowed.parse(Settings(webhook_allow_private=entries).webhook_allow_private)
    for url in (
        "https://10.1.2.3/",
        "https://[::ffff:10.1.2.3]/",
        "https://[fd12::1]/",
        "http://192.168.7.7/",
    ):
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
def test_entries_that_mean_nothing_are_refused(entry: str) -> None:
    """A mistake in the settings does not silently allow nothing, or something else."""
    with pytest.raises(ValueError):
        Allowed.parse([entry])
    with pytest.raises(ValueError, match="webhook_allow_private"):
        Settings(webhook_allow_private=(entry,))


def test_what_resolves_to_nothing_or_to_no_address_is_no_target() -> None:
    """An empty answer and a scoped address are not connected to."""
    target = parse_url("https://hooks.example.com/", NOTHING)
    with pytest.raises(OSError, match="no address"):
        permitted_addresses(target, NOTHING, lambda host, port: [])
    with pytest.raises(RefusedUrlError):
        permitted_addresses(target, NOTHING, lambda host, port: ["fe80::1%eth0"])
    with pytest.raises(RefusedUrlError):
        permitted_addresses(target, NOTHING, lambda host, port: ["not-an-address"])


def test_the_systems_resolver_is_asked_for_addresses() -> None:
    """localhost resolves to loopback, which the guard then judges."""
    assert set(resolve_host("localhost", 443)) <= {"127.0.0.1", "::1"}
