"""Address guard: webhooks reach public addresses, and addresses allowed by the operator.

A person who sets a URL must not make the service connect to addresses reachable by the service only: its own
ports, neighbours in its network, or the metadata service of a cloud. URLs are accepted in their plain form
only. The host is resolved once per delivery, every address is checked, and the connection uses a checked
address, so changing DNS answers gain nothing.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import Final

Address = IPv4Address | IPv6Address
Resolve = Callable[[str, int], Sequence[str]]
"""Host name and port to addresses; raises OSError."""

MAX_URL_LENGTH: Final = 2048

_URL: Final = re.compile(
    r"(?P<scheme>[Hh][Tt][Tt][Pp][Ss]?)://"
    r"(?P<host>\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253})"
    r"(?::(?P<port>[0-9]{1,5}))?"
    r"(?P<path>(?:/[!-~]*)?(?:\?[!-~]*)?)"
)
_LABEL: Final = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER: Final = re.compile(r"[0-9]+|0x[0-9a-f]*")

# From IANA's registries of special-purpose addresses: the non-global ranges; and the address of Azure's
# own services, which is public in form only.
_IPV4_REFUSED: Final = tuple(
    IPv4Network(network)
    for network in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "168.63.129.16/32",
        "169.254.0.0/16",
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.88.99.0/24",
        "192.168.0.0/16",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",
        "240.0.0.0/4",
    )
)
_IPV6_GLOBAL: Final = IPv6Network("2000::/3")
_IPV6_REFUSED: Final = tuple(
    IPv6Network(network) for network in ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")
)
_NAT64: Final = IPv6Network("64:ff9b::/96")
_ISATAP: Final = (0x00005EFE, 0x02005EFE)

# Ports below 1024 belong to other protocols; above, the ports refused by browsers for the same reason.
_HTTP_PORTS: Final = (80, 443)
_REFUSED_PORTS: Final = frozenset(
    {1719, 1720, 1723, 2049, 3659, 4045, 4190, 5060, 5061, 6000, 6566, 6679, 6697, 10080, *range(6665, 6670)}
)


class RefusedUrlError(ValueError):
    """Refused URL; the message explains the reason to the author of the URL."""


@dataclass(frozen=True, slots=True)
class WebhookUrl:
    """A URL, taken apart: ``host`` in lower case and without brackets, ``path`` with the query."""

    scheme: str
    host: str
    port: int
    path: str

    @property
    def address(self) -> Address | None:
        """Host, if it is an address."""
        return _address(self.host)

    @property
    def host_header(self) -> str:
        """Value of the ``Host`` header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        usual = 443 if self.scheme == "https" else 80
        return host if self.port == usual else f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Allowed:
    """Networks and host names that are allowed although not public, also without TLS."""

    networks: tuple[IPv4Network | IPv6Network, ...] = ()
    hosts: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, entries: Sequence[str]) -> Allowed:
        """Parse entries of ``webhook_allow_private``: ``10.0.0.0/8``, ``fd00::/8``, ``192.168.1.7``,
        ``hooks.internal``."""
        networks: list[IPv4Network | IPv6Network] = []
        hosts: set[str] = set()
        for entry in entries:
            try:
                networks.append(ipaddress.ip_network(entry))
            except ValueError:
                if "/" in entry or ":" in entry:
                    raise
                hosts.add(_host_name(entry))
        return cls(tuple(networks), frozenset(hosts))

    def covers(self, host: str, address: Address) -> bool:
        """Return True if the operator has allowed the host, or a network of the address."""
        plain = _unwrapped(address)
        return host in self.hosts or any(
            plain in network for network in self.networks if network.version == plain.version
        )

    def __bool__(self) -> bool:
        return bool(self.networks or self.hosts)


def parse_url(url: str, allowed: Allowed) -> WebhookUrl:
    """Parse a URL, and raise RefusedUrlError for reasons known without its addresses."""
    if len(url) > MAX_URL_LENGTH:
        raise RefusedUrlError(f"the URL has more than {MAX_URL_LENGTH} characters")
    match = _URL.fullmatch(url)
    if match is None or "\\" in match["path"] or "#" in match["path"]:
        raise RefusedUrlError(
            "a URL is http(s)://HOST[:PORT]/PATH?QUERY in ASCII, without user name, password and fragment"
        )
    scheme = match["scheme"].lower()
    host = match["host"].lower()
    host = _literal(host[1:-1]) if host.startswith("[") else _host_name(host)
    port = int(match["port"]) if match["port"] else (443 if scheme == "https" else 80)
    if port not in _HTTP_PORTS and (not 1024 <= port <= 65535 or port in _REFUSED_PORTS):
        raise RefusedUrlError(f"port {port} is not allowed: use 80, 443, or 1024 and above")
    path = match["path"] or "/"
    target = WebhookUrl(scheme, host, port, path if path.startswith("/") else f"/{path}")
    address = target.address
    if address is not None:
        _check(target, address, allowed)
    elif host == "localhost" or host.endswith(".localhost"):
        if not (host in allowed.hosts or allowed.networks):
            raise RefusedUrlError(f"{host} is this machine; allow access with `webhook_allow_private`")
    elif scheme == "http" and not allowed:
        raise RefusedUrlError(_NEEDS_TLS)
    return target


def permitted_addresses(target: WebhookUrl, allowed: Allowed, resolve: Resolve) -> tuple[str, ...]:
    """Return the addresses to connect to; a forbidden address refuses all of them.

    Raises RefusedUrlError, or OSError for an unresolved name.
    """
    literal = target.address
    found = [str(literal)] if literal is not None else list(dict.fromkeys(resolve(target.host, target.port)))
    if not found:
        raise OSError(f"{target.host} has no address")
    for text in found:
        address = _address(text)
        if address is None:
            raise RefusedUrlError(f"{target.host} does not resolve to an address")
        _check(target, address, allowed)
    return tuple(found)


def resolve_host(host: str, port: int) -> list[str]:
    """Ask the system for the addresses of a host."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    return [str(entry[4][0]) for entry in found]


_NEEDS_TLS: Final = (
    "public addresses require https; `webhook_allow_private` can allow http for private addresses"
)


def _check(target: WebhookUrl, address: Address, allowed: Allowed) -> None:
    if allowed.covers(target.host, address):
        return
    if not _is_public(address):
        raise RefusedUrlError(
            f"{target.host} is not a public address; allow access with `webhook_allow_private`"
        )
    if target.scheme == "http":
        raise RefusedUrlError(_NEEDS_TLS)


def _is_public(address: Address) -> bool:
    plain = _unwrapped(address)
    if isinstance(plain, IPv4Address):
        return not any(plain in network for network in _IPV4_REFUSED)
    if plain not in _IPV6_GLOBAL or any(plain in network for network in _IPV6_REFUSED):
        return False
    interface = int(plain) & (2**64 - 1)
    if interface >> 32 in _ISATAP:
        return _is_public(IPv4Address(interface & 0xFFFFFFFF))
    return True


def _unwrapped(address: Address) -> Address:
    # IPv4 addresses within IPv6 are checked as IPv4.
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address in _NAT64:
            return IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def _address(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _literal(text: str) -> str:
    try:
        return str(IPv6Address(text))
    except ValueError:
        raise RefusedUrlError(f"[{text}] is not an IPv6 address") from None


def _host_name(text: str) -> str:
    host = text.lower().removesuffix(".")
    labels = host.split(".")
    # Sockets treat a host that ends in a number as an address: 2130706433, 0x7f.1, 127.1, 0177.0.0.1
    if _NUMBER.fullmatch(labels[-1]):
        try:
            return str(IPv4Address(host))
        except ValueError:
            raise RefusedUrlError(f"{host} is not an IPv4 address of four numbers") from None
    if not all(_LABEL.fullmatch(label) for label in labels):
        raise RefusedUrlError(f"{host!r} is not a valid host name")
    return host
