"""A bucket that is asked for in the wrong region or at the wrong endpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

import dcp
from dcp.errors import StorageError
from dcp.storage.stores import open_store

_BODY = "<?xml version='1.0'?><Error><Code>{}</Code><Message>Use another endpoint.</Message>{}</Error>"


@contextmanager
def _elsewhere(status: int, code: str, *, extra: str = "", **headers: str) -> Iterator[dict[str, object]]:
    """A service that sends everybody away, on a port of its own; options for it that are patient."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = _BODY.format(code, extra).encode()
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value.replace("HERE", endpoint))
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = answer

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield {"endpoint_url": endpoint, "key": "k", "secret": "s", "retry_seconds": 3600.0}
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


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
        with pytest.raises(StorageError, match="'bucket' was asked for in the wrong place") as failed:
            act()
        assert failed.value.facts["attempts"] == 1
        for word in (*words, "region_name", "AWS_ENDPOINT_URL"):
            assert word in str(failed.value)


@pytest.mark.parametrize("status", [pytest.param(301, marks=pytest.mark.exhaustive), 307])
def test_a_redirection_that_does_not_say_where(status: int) -> None:
    """botocore asks for the region, and is redirected again; that is no recursion of ours, nor patience."""
    with _elsewhere(status, "PermanentRedirect") as options:
        _check(options, "another region or endpoint")


def test_a_redirection_that_names_the_region() -> None:
    """What the service says is passed on."""
    with _elsewhere(301, "PermanentRedirect", x_amz_bucket_region="eu-west-1") as options:
        _check(options, 'client_kwargs={"region_name": "eu-west-1"}')


def test_a_signature_for_another_region() -> None:
    """As AWS answers it at an endpoint that serves all regions."""
    region = "<Region>eu-west-1</Region>"
    with _elsewhere(400, "AuthorizationHeaderMalformed", extra=region) as options:
        store = open_store("s3://bucket/run", options)
        with pytest.raises(StorageError, match="belongs to region eu-west-1"):
            store.list()
