"""Ranges that are read by a URL which was signed once: when, by which, and what happens if it is refused."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from dcp.demo.s3_server import S3Server
from dcp.storage.stores.handles import Views
from dcp.storage.stores.objects.client import Failure, RequestError
from dcp.storage.stores.objects.options import ObjectOptions
from dcp.storage.stores.objects.s3.direct import SignedUrl
from dcp.storage.stores.objects.s3.service import S3Client
from tests.support.fault_plan import Fault, Kind
from tests.support.fault_proxy import FaultProxy

_SIZE = 100_000
_DENIED = Fault(Kind.ANSWER, status=403, code="AccessDenied")
_EXPIRED = Fault(Kind.ANSWER, status=400, code="ExpiredToken")
_BUSY = Fault(Kind.ANSWER, status=503, code="SlowDown", headers=(("Retry-After", "7"),))


def _client(server: S3Server | FaultProxy, **options: Any) -> S3Client:
    return S3Client("dcp-test", {**server.storage_options, **options}, ObjectOptions())


def _read(client: S3Client, key: str, begin: int = 0, size: int = _SIZE, **more: Any) -> bytes:
    data = bytearray(size)
    half = size // 2
    client.get(key, begin, Views([memoryview(data)[:half], memoryview(data)[half:]]), **more)
    return bytes(data)


def _content(seed: str) -> bytes:
    return random.Random(seed).randbytes(_SIZE)


def _prefix(s3_root: str) -> str:
    return s3_root.rpartition("/")[2]


def _signed(proxy: FaultProxy) -> list[bool]:
    """Of each GET whether its URL was signed, and not the request."""
    gets = proxy.requests("GetObject")
    assert all(("X-Amz-Signature" in get.query) != ("authorization" in get.headers) for get in gets)
    return ["X-Amz-Signature" in get.query for get in gets]


def test_ranges_go_by_one_signed_url(s3_proxy: FaultProxy, s3_root: str) -> None:
    """All ranges of an object have one URL; size, tag and time are what HeadObject says."""
    client, key = _client(s3_proxy), f"{_prefix(s3_root)}/a b+ü"
    data = _content("direct")
    etag = client.put(key, data)
    assert _read(client, key) == data
    assert _read(client, key, 70, 30, etag=etag) == data[70:100]
    assert client.get(key, 5, Views([memoryview(bytearray(9))])) == client.head(key)
    assert _signed(s3_proxy) == [True, True, True]
    assert len({get.query["X-Amz-Signature"] for get in s3_proxy.requests("GetObject")}) == 1


def test_threads_that_begin_an_object_together_sign_once(s3_server: S3Server, s3_root: str) -> None:
    """Signing costs as much processor time as several requests; objects have each their own URL."""
    client, keys = _client(s3_server), [f"{_prefix(s3_root)}/{name}" for name in "ab"]
    for key in keys:
        client.put(key, _content(key))
    signed, sign, begin = [], client._signed_url, threading.Barrier(8)

    def counted(key: str) -> SignedUrl | None:
        signed.append(key)
        return sign(key)

    client._signed_url = counted  # type: ignore[method-assign]

    def read(number: int) -> bool:
        begin.wait(60)
        return _read(client, keys[number % 2]) == _content(keys[number % 2])

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(8)))
    assert sorted(signed) == keys


def test_a_refused_url_is_asked_for_the_ordinary_way(s3_proxy: FaultProxy, s3_root: str) -> None:
    """Bytes come all the same; where URLs are refused again and again, none is tried any more."""
    client, prefix = _client(s3_proxy), _prefix(s3_root)
    data = {f"{prefix}/{number}": _content(str(number)) for number in range(5)}
    for key, content in data.items():
        client.put(key, content)
    for key in list(data)[:3]:
        s3_proxy.spoil(_DENIED, operation="GetObject", key=key)
    assert {key: _read(client, key) for key in data} == data
    assert _signed(s3_proxy) == [True, False] * 3 + [False] * 2


def test_refusals_that_end_are_forgotten(s3_proxy: FaultProxy, s3_root: str) -> None:
    """One object that is refused now and then does not spoil the way for the others."""
    client, key = _client(s3_proxy), f"{_prefix(s3_root)}/key"
    client.put(key, _content("again"))
    for nth in (1, 4, 7, 10):
        s3_proxy.spoil(_DENIED, operation="GetObject", key=key, nth=nth)
    for _ in range(8):
        _read(client, key)
    assert _signed(s3_proxy) == [True, False, True] * 4


def test_urls_that_end_do_not_end_the_way(s3_proxy: FaultProxy, s3_root: str) -> None:
    """Credentials that expire in a load make all URLs void at once: they are signed anew."""
    client, prefix = _client(s3_proxy), _prefix(s3_root)
    data = {f"{prefix}/{number}": _content(str(number)) for number in range(4)}
    for key, content in data.items():
        client.put(key, content)
        assert _read(client, key) == content
    s3_proxy.log.clear()
    for key in data:
        s3_proxy.spoil(_EXPIRED, operation="GetObject", key=key)
    for _ in range(2):
        assert {key: _read(client, key) for key in data} == data
    assert _signed(s3_proxy) == [True, False] * 4 + [True] * 4


def test_objects_that_are_gone_do_not_end_the_way(s3_proxy: FaultProxy, s3_root: str) -> None:
    """A checkpoint that is deleted while it is read tells nothing of the service."""
    client, prefix = _client(s3_proxy), _prefix(s3_root)
    for number in range(4):
        with pytest.raises(RequestError) as missing:
            _read(client, f"{prefix}/absent-{number}")
        assert missing.value.kind is Failure.MISSING
    client.put(f"{prefix}/there", _content("there"))
    s3_proxy.log.clear()
    assert _read(client, f"{prefix}/there") == _content("there")
    assert _signed(s3_proxy) == [True]


def test_answers_that_settle_it_are_not_asked_for_twice(s3_proxy: FaultProxy, s3_root: str) -> None:
    """Another tag, a range behind the end, and a busy service mean the same to whoever asks."""
    client, key = _client(s3_proxy), f"{_prefix(s3_root)}/key"
    client.put(key, _content("kinds"))
    etag = client.head(key).etag
    for kind, begin, size, tag in (
        (Failure.CONDITION, 0, _SIZE, '"0123456789abcdef0123456789abcdef"'),
        (Failure.RANGE, _SIZE, 10, etag),
        (Failure.RANGE, _SIZE - 5, 10, etag),
    ):
        with pytest.raises(RequestError) as failed:
            _read(client, key, begin, size, etag=tag)
        assert failed.value.kind is kind
    s3_proxy.spoil(_BUSY, operation="GetObject")
    with pytest.raises(RequestError, match="503 SlowDown") as busy:
        _read(client, key)
    assert (busy.value.kind, busy.value.retry_after_seconds) == (Failure.PASSING, 7.0)
    assert _signed(s3_proxy) == [True] * 4


def test_a_missing_object_is_missing(s3_server: S3Server, s3_root: str) -> None:
    """A key, and a bucket, that are not there are told apart."""
    with pytest.raises(RequestError) as missing:
        _read(_client(s3_server), f"{_prefix(s3_root)}/absent")
    assert missing.value.kind is Failure.MISSING
    elsewhere = S3Client("no-such-bucket", s3_server.storage_options, ObjectOptions())
    with pytest.raises(RequestError, match="no bucket 'no-such-bucket'"):
        _read(elsewhere, "key")


@pytest.mark.parametrize(
    "options",
    [
        {"s3_additional_kwargs": {"RequestPayer": "requester"}},
        {"config_kwargs": {"connector_args": {"use_dns_cache": False}}},
    ],
)
def test_what_a_url_cannot_say_goes_the_ordinary_way(
    s3_proxy: FaultProxy, s3_root: str, options: dict[str, Any]
) -> None:
    """Settings that are headers, and those of aiohttp's connections, are heeded."""
    client, key = _client(s3_proxy, **options), f"{_prefix(s3_root)}/key"
    data = _content("ordinary")
    client.put(key, data)
    assert _read(client, key) == data
    assert _signed(s3_proxy) == [False]


def test_a_proxy_is_used(s3_server: S3Server) -> None:
    """What has to go through a proxy is not sent past it."""
    proxies = {"http": "http://127.0.0.1:9", "https": "http://127.0.0.1:9"}
    assert _client(s3_server)._signed_url("key") is not None
    assert _client(s3_server, config_kwargs={"proxies": proxies})._signed_url("key") is None


def test_urls_for_amazon_are_signed_for_their_region() -> None:
    """By version 4 and at the bucket's own endpoint: also those that are handed out."""
    keys = {"key": "AKIDEXAMPLE", "secret": "secret", "client_kwargs": {"region_name": "eu-west-1"}}
    client = S3Client("some-bucket", keys, ObjectOptions())
    signed = client._signed_url("run/__0_0.distcp")
    assert signed is not None
    for url in (signed.url, client.presigned_url("run/__0_0.distcp", 60)):
        parts = urlsplit(url)
        query = parse_qs(parts.query)
        assert (parts.scheme, parts.hostname) == ("https", "some-bucket.s3.eu-west-1.amazonaws.com")
        assert query["X-Amz-Algorithm"] == ["AWS4-HMAC-SHA256"]
        assert query["X-Amz-Credential"][0].split("/")[2:] == ["eu-west-1", "s3", "aws4_request"]
        assert query["X-Amz-SignedHeaders"] == ["host"]


def test_public_buckets_and_old_signatures_are_as_the_user_says() -> None:
    """Nothing is signed for anonymous readers, and what the configuration names is kept."""
    public = S3Client("some-bucket", {"anon": True}, ObjectOptions())._signed_url("key")
    assert public is not None and "?" not in public.url
    old = {"key": "AKIDEXAMPLE", "secret": "secret", "config_kwargs": {"signature_version": "s3"}}
    signed = S3Client("some-bucket", old, ObjectOptions())._signed_url("key")
    assert signed is not None and "AWSAccessKeyId=" in signed.url
