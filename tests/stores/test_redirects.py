"""Requests for a bucket in the wrong region or at the wrong endpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import dcp
from dcp.errors import StorageError
from dcp.storage.stores import open_store
from tests.support.scripted_service import Answer, scripted_service

_BODY = "<?xml version='1.0'?><Error><Code>{}</Code><Message>Use another endpoint.</Message>{}</Error>"


@contextmanager
def _elsewhere(status: int, code: str, *, extra: str = "", **headers: str) -> Iterator[dict[str, object]]:
    """Yield options of a service that redirects every request, with a long retry_seconds."""
    answer = Answer(status, _BODY.format(code, extra).encode(), headers)
    with scripted_service(lambda _: answer) as service:
        yield {"endpoint_url": service.url, "key": "k", "secret": "s", "retry_seconds": 3600.0}


def _check(options: dict[str, object], *words: str) -> None:
    store = open_store("s3://bucket/run", options)
    for act in (
        lambda: store.list(),
        lambda: store.stat("m"),
        lambda: store.read("m", limit_bytes=9),
        lambda: store.publish("m", b"1", durable=True),
        lambda: store.open_read("data", expected_bytes=9).pread(9, 0),
        lambda: dcp.load({"n": 1}, checkpoint_id=store.url, storage_options=options, no_dist=True),
    ):
        with pytest.raises(StorageError, match="the bucket 'bucket' belongs to") as failed:
            act()
        assert failed.value.facts["attempts"] == 1
        for word in (*words, "region_name", "AWS_ENDPOINT_URL"):
            assert word in str(failed.value)


@pytest.mark.parametrize("status", [pytest.param(301, marks=pytest.mark.exhaustive), 307])
def test_a_redirect_without_the_region(status: int) -> None:
    """botocore looks up the region and is redirected again; this causes neither recursion nor retries."""
    with _elsewhere(status, "PermanentRedirect") as options:
        _check(options, "another region or endpoint")


def test_a_redirect_with_the_region() -> None:
    """The error has the region that the service names."""
    with _elsewhere(301, "PermanentRedirect", **{"x-amz-bucket-region": "eu-west-1"}) as options:
        _check(options, 'client_kwargs={"region_name": "eu-west-1"}')
