"""What the contract does not say: options, conditions that a service ignores, forks, listings, retries."""

from __future__ import annotations

import os
import pickle
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from dcp.demo.s3_server import S3Server
from dcp.errors import CheckpointConflictError, CheckpointError, StorageError, StorageFullError
from dcp.storage.stores import open_store
from dcp.storage.stores.contract import pattern_bytes
from dcp.storage.stores.handles import Buffer
from dcp.storage.stores.objects.client import ABSENT, Condition, Failure, ObjectClient, RequestError, Upload
from dcp.storage.stores.objects.conditions import require_conditional_writes
from dcp.storage.stores.objects.generic.service import FsspecClient
from dcp.storage.stores.objects.options import ObjectOptions
from dcp.storage.stores.objects.requests import Requests, ServiceError
from dcp.storage.stores.objects.s3.errors import request_error
from dcp.storage.stores.objects.s3.service import S3Client
from dcp.storage.stores.objects.store import _WHOLE_PUT_BYTES, FsspecStore
from dcp.storage.stores.objects.writing import part_bytes_for
from tests.support.s3 import RawS3, raw_s3

_MIB = 1 << 20


@pytest.fixture
def store(s3_server: S3Server, s3_root: str) -> FsspecStore:
    """A prefix of its own on the real server."""
    return FsspecStore(s3_root, s3_server.storage_options | {"part_bytes": 5 * _MIB})


@pytest.fixture
def raw(s3_server: S3Server) -> Iterator[RawS3]:
    """Plain requests to the same server."""
    with raw_s3(s3_server) as client:
        yield client


class _HeedlessClient(S3Client):
    """As a service that does not know conditional requests: it writes whatever it is told."""

    def put(self, key: str, data: Buffer, condition: Condition = None) -> str:
        return super().put(key, data)


class _HeedlessStore(FsspecStore):
    def _make_client(self) -> ObjectClient:
        return _HeedlessClient(str(self._bucket), self._filesystem_options, self._options)


def _heedless(s3_server: S3Server, url: str, **options: object) -> FsspecStore:
    # An option of its own, so that it shares no client with the stores that heed conditions.
    return _HeedlessStore(url, s3_server.storage_options | {"concurrency": 3} | options)


def test_a_service_that_ignores_conditions_is_refused(
    s3_server: S3Server, s3_root: str, raw: RawS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found out by trying, before anything is published, and the trial leaves nothing behind."""
    monkeypatch.setattr(_HeedlessClient, "identity", "heedless")
    store = _heedless(s3_server, s3_root)
    with pytest.raises(StorageError, match="conditional_writes") as caught:
        store.publish("m", b"1", durable=True, expected=None)
    assert caught.value.path == s3_root
    assert raw.list(s3_root) == {}
    store.publish("m", b"2", durable=True)  # asks for no comparison
    assert raw.read(f"{s3_root}/m") == b"2"


def test_the_weaker_mode_looks_before_it_writes(s3_server: S3Server, s3_root: str, raw: RawS3) -> None:
    """With conditional_writes="off" a conflict that is there already is still seen."""
    store = _heedless(s3_server, s3_root, conditional_writes="off")
    first = store.publish("m", b"1", durable=True, expected=None)
    with pytest.raises(CheckpointConflictError):
        store.publish("m", b"2", durable=True, expected=None)
    store.publish("m", b"2", durable=True, expected=first)
    with pytest.raises(CheckpointConflictError):
        store.publish("m", b"3", durable=True, expected=first)
    assert raw.read(f"{s3_root}/m") == b"2"


def test_conditions_are_tried_once_for_all_stores(
    store: FsspecStore, s3_server: S3Server, raw: RawS3
) -> None:
    """The trial of a bucket serves every store of the process; nothing of it stays."""
    store.publish("a", b"1", durable=True, expected=None)
    again = FsspecStore(store.url, s3_server.storage_options | {"part_bytes": 5 * _MIB})
    again.publish("b", b"1", durable=True, expected=None)
    assert again.traffic()["requests"] == 1
    assert sorted(raw.list(store.url)) == ["a", "b"]


@pytest.mark.parametrize("limit", [16 * _MIB, pytest.param(_WHOLE_PUT_BYTES, marks=pytest.mark.exhaustive)])
def test_a_manifest_of_many_parts_is_published_under_its_condition(
    store: FsspecStore, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    """A large one is uploaded in parts, and still created, replaced and refused as a whole."""
    monkeypatch.setattr("dcp.storage.stores.objects.store._WHOLE_PUT_BYTES", limit)
    data = pattern_bytes(limit + _MIB)
    version = store.publish("m", data, durable=True, expected=None)
    assert store.version("m") == version
    with pytest.raises(CheckpointConflictError):
        store.publish("m", data, durable=True, expected=None)
    assert store.abort_uploads(lambda name: True) == 0
    assert store.read("m", limit_bytes=len(data)) == data
    store.publish("m", b"small", durable=True, expected=version)
    assert store.read("m", limit_bytes=5) == b"small"


def test_folders_and_their_files_by_one_listing(store: FsspecStore, raw: RawS3) -> None:
    """Only files exactly one folder deep count, whatever else lies there."""
    keys = ("a/m", "a/deep/m", "b/m", "b/n", "top", "d/", "f/.lock")
    raw.write_many([(f"{store.url}/{key}", b"12") for key in keys])
    before = store.traffic().get("requests", 0)
    found = sorted((folder, info.name, info.size_bytes) for folder, info in store.walk())
    assert found == [("a", "m", 2), ("b", "m", 2), ("b", "n", 2)]
    assert store.traffic()["requests"] == before + 1
    assert [info.name for info in store.list()] == ["top"]
    assert {"a", "b"} <= set(store.folders())
    assert "" not in store.folders()


def test_listings_of_many_pages(store: FsspecStore, raw: RawS3) -> None:
    """Beyond a thousand objects, a listing goes on where it was cut."""
    names = [f"f{n:04}" for n in range(1203)]
    raw.write_many([(f"{store.url}/{name}", b"") for name in names])
    assert [info.name for info in store.list()] == names
    assert store.traffic()["list"] == 2
    assert store.delete_all(names) == {}
    assert store.traffic()["delete"] == 2
    assert raw.list(store.url) == {}


def test_a_forked_child_makes_its_own_connections(store: FsspecStore) -> None:
    """A store that its parent has used works in the child, and in the parent after it."""
    store.publish("m", b"parent", durable=True)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            if store.read("m", limit_bytes=9) == b"parent":
                store.publish("m", b"child", durable=True, expected=store.version("m"))
                with store.create("data", durable=True) as handle:
                    handle.write(pattern_bytes(11 * _MIB))
                status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert store.read("m", limit_bytes=9) == b"child"
    assert store.read("data", limit_bytes=11 * _MIB) == pattern_bytes(11 * _MIB)


def test_what_is_shown_of_a_store_has_no_secrets(store: FsspecStore, s3_server: S3Server) -> None:
    """Neither its repr nor the errors of refused options and wrong keys show the secret."""
    secret = s3_server.storage_options["secret"]
    assert secret not in repr(store)
    assert pickle.loads(pickle.dumps(store)).url == store.url
    wrong = s3_server.storage_options | {"key": "nobody"}
    for options in (wrong, s3_server.storage_options | {"key": "a", "username": "b"}):
        with pytest.raises(StorageError) as caught:
            open_store(store.url, options).list()
        chain: BaseException | None = caught.value
        assert secret not in str(chain) and "nobody" not in str(chain)
        assert secret not in repr(caught.value.facts)


def test_the_bucket_of_an_error_is_named(s3_server: S3Server) -> None:
    """A missing bucket is said to be missing, at once, and not a missing checkpoint."""
    with pytest.raises(StorageError, match="no bucket 'absent'") as caught:
        FsspecStore("s3://absent/run", s3_server.storage_options).list()
    assert caught.value.attempts == 1
    assert caught.value.bucket == "absent"


@pytest.mark.parametrize(
    "options",
    [
        {"conditional_writes": "maybe"},
        {"concurrency": 0},
        {"part_bytes": 1 << 20},
        {"part_bytes": (5 << 20) + 1},
        {"retry_seconds": -1},
        {"request_timeout_seconds": 0},
    ],
)
def test_options_that_make_no_sense(options: dict[str, object]) -> None:
    """They are refused before any request."""
    with pytest.raises(StorageError):
        FsspecStore("s3://bucket/run", options)


def test_what_open_store_refuses(tmp_path: Path) -> None:
    """Unknown schemes, chains of file systems, and options where none apply."""
    for url, options, words in (
        ("nosuch://a/b", {}, "nosuch"),
        ("simplecache::s3://a/b", {}, "chained"),
        (str(tmp_path), {"key": "1"}, "takes no storage options"),
    ):
        with pytest.raises(CheckpointError, match=words):
            open_store(url, options)


def test_parts_stay_far_below_what_s3_allows() -> None:
    """Whatever size a file is expected to have, it has fewer than 10,000 parts, of 5 GiB at most."""
    for expected in (None, 0, 1, 80 << 30, 400 << 30, 4 << 40):
        part = part_bytes_for(expected, 8 << 20)
        assert 8 << 20 <= part <= 5 << 30
        assert (expected or 0) / part < 10_000


def test_an_interrupt_ends_a_read_before_its_memory_is_given_up(store: FsspecStore) -> None:
    """Threads that read when one of them fails have ended when the call returns: nothing is written later."""
    data = pattern_bytes(40 * _MIB)
    with store.create("data", durable=True) as handle:
        handle.write(data)
    memory = bytearray(len(data) + 1)
    with (
        store.open_read("data", expected_bytes=len(memory)) as handle_too_long,
        pytest.raises(CheckpointError),
    ):
        handle_too_long.preadv([memoryview(memory)], 0)
    seen = bytes(memory)
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("dcp-object")]
    for thread in threads:  # they serve the next request all right, and nothing else in between
        assert thread.is_alive()
    with store.open_read("data") as whole:
        assert whole.pread(len(data), 0) == data
    assert bytes(memory) == seen


class _FailingClient(S3Client):
    """As a service that takes no parts any more."""

    def put_part(self, upload: Upload, number: int, data: memoryview, crc: int) -> object:
        raise RequestError(Failure.PASSING, "503 SlowDown")


class _FailingStore(FsspecStore):
    def _make_client(self) -> ObjectClient:
        return _FailingClient(str(self._bucket), self._filesystem_options, self._options)


def test_an_abort_does_not_wait_for_patience(s3_server: S3Server, s3_root: str, raw: RawS3) -> None:
    """Parts that are tried again and again for an hour are given up when the file is; nothing stays."""
    options = {"retry_seconds": 3600, "concurrency": 2, "part_bytes": 5 * _MIB}
    store = _FailingStore(s3_root, s3_server.storage_options | options)
    handle = store.create("data", durable=True)
    handle.write(pattern_bytes(9 * _MIB))
    handle.abort()
    assert store.traffic()["put_part"] >= 1
    assert raw.uploads(s3_root) == {}


def _failing(*failures: RequestError) -> Callable[[], str]:
    """An attempt that fails so in turn, and succeeds then."""
    left = list(failures)

    def attempt() -> str:
        if left:
            raise left.pop(0)
        return "done"

    return attempt


def test_only_what_passes_is_repeated() -> None:
    """Passing failures are repeated and counted; answers and final failures are not."""
    requests = Requests("s3://b/p", "b", ObjectOptions(retry_seconds=60))
    passing = RequestError(Failure.PASSING, "503 SlowDown")
    assert requests.run("get", "p/k", _failing(passing, passing), received_bytes=7) == "done"
    assert requests.traffic()["requests"] == 3
    assert requests.traffic()["retries"] == 2
    assert requests.traffic()["bytes_received"] == 7
    for kind in (Failure.MISSING, Failure.CONDITION, Failure.RANGE):
        with pytest.raises(ServiceError) as answer:
            requests.run("get", "p/k", _failing(RequestError(kind, "no")))
        assert answer.value.kind is kind and not answer.value.is_ambiguous
    with pytest.raises(ServiceError) as answer:
        requests.run("put", "p/k", _failing(passing, RequestError(Failure.CONDITION, "412")))
    assert answer.value.is_ambiguous
    with pytest.raises(StorageError) as failed:
        requests.run("put", "p/k", _failing(RequestError(Failure.FINAL, "403 AccessDenied")))
    assert (failed.value.op, failed.value.bucket, failed.value.key, failed.value.attempts) == (
        "put",
        "b",
        "p/k",
        1,
    )
    with pytest.raises(StorageFullError):
        requests.run("put", "p/k", _failing(RequestError(Failure.FULL, "507")))


def test_patience_ends() -> None:
    """Without time to repeat, the first passing failure is the last, and says how often it was tried."""
    requests = Requests("s3://b/p", "b", ObjectOptions(retry_seconds=0))
    with pytest.raises(StorageError, match="SlowDown") as caught:
        requests.run(
            "get", "p/k", _failing(RequestError(Failure.PASSING, "503 SlowDown", retry_after_seconds=1))
        )
    assert caught.value.attempts == 1
    assert isinstance(caught.value.__cause__, RequestError)


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (503, "SlowDown", Failure.PASSING),
        (500, "InternalError", Failure.PASSING),
        (429, "", Failure.PASSING),
        (409, "ConditionalRequestConflict", Failure.PASSING),
        (400, "RequestTimeout", Failure.PASSING),
        (400, "BadDigest", Failure.PASSING),
        (404, "NoSuchKey", Failure.MISSING),
        (404, "404", Failure.MISSING),
        (404, "NoSuchBucket", Failure.FINAL),
        (412, "PreconditionFailed", Failure.CONDITION),
        (416, "InvalidRange", Failure.RANGE),
        (403, "AccessDenied", Failure.FINAL),
        (400, "InvalidArgument", Failure.FINAL),
        (507, "", Failure.FULL),
    ],
)
def test_what_answers_of_the_service_mean(status: int, code: str, kind: Failure) -> None:
    """By code where there is one, else by status; a wish to wait is heard."""
    from botocore.exceptions import ClientError

    metadata = {"HTTPStatusCode": status, "HTTPHeaders": {"retry-after": "3"}}
    error = ClientError({"Error": {"Code": code, "Message": "m"}, "ResponseMetadata": metadata}, "GetObject")
    found = request_error(error, "b")
    assert found.kind is kind
    assert found.retry_after_seconds == (3 if kind is Failure.PASSING else 0)


def test_a_certificate_that_is_not_trusted_stays_so() -> None:
    """Said at once, while a handshake that was cut short is tried again."""
    from botocore.exceptions import SSLError

    untrusted = "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: self-signed certificate"
    for text, kind in ((untrusted, Failure.FINAL), ("[SSL: UNEXPECTED_EOF_WHILE_READING]", Failure.PASSING)):
        assert request_error(SSLError(endpoint_url="https://e", error=text), "b").kind is kind


@pytest.mark.parametrize("url", ["s3://", "s3:///run", "s3a:///run"])
def test_urls_of_s3_have_a_bucket(url: str) -> None:
    """Without one there is nothing to ask; said before anything is asked."""
    with pytest.raises(StorageError, match="names no bucket"):
        open_store(url)


def test_options_that_the_session_refuses(s3_server: S3Server, s3_root: str) -> None:
    """Whatever comes first raises a typed error, also what has to know the service before it asks."""
    options = s3_server.storage_options
    store = FsspecStore(s3_root, {**options, "client_kwargs": {"no_such_option": "hidden"}})
    with pytest.raises(StorageError, match="no_such_option") as failed:
        store.publish("m", b"1", durable=True, expected=None)
    assert "hidden" not in str(failed.value)


class _ReadOnly(MemoryFileSystem):  # type: ignore[misc]  # it comes without types
    """As fsspec's file systems that cannot be written to."""

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: object) -> None:
        raise NotImplementedError


def test_what_a_file_system_cannot_do_is_not_repeated() -> None:
    """Its refusal to write comes at once, and not after minutes of patience."""
    requests = Requests("readonly://run", "readonly", ObjectOptions(retry_seconds=600))
    client = FsspecClient(_ReadOnly(skip_instance_cache=True), ObjectOptions())
    with pytest.raises(StorageError, match="NotImplementedError") as failed:
        requests.run("put", "/run/m", lambda: client.put("/run/m", b"1"))
    assert failed.value.attempts == 1


class _Obliging(MemoryFileSystem):  # type: ignore[misc]  # it comes without types
    """As a file system that takes mode="create" and ignores it."""

    async_impl = True

    async def _pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: object) -> None:
        MemoryFileSystem.pipe_file(self, path, value)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: object) -> None:
        MemoryFileSystem.pipe_file(self, path, value)


def test_a_file_system_is_not_believed_but_tried() -> None:
    """That it takes the argument for exclusive creation does not mean that it heeds it."""
    client = FsspecClient(_Obliging(skip_instance_cache=True), ObjectOptions())
    client._is_memory = False
    requests = Requests("obliging://run", "obliging", ObjectOptions())
    assert client.creates_conditionally is None
    with pytest.raises(StorageError, match="only if it is absent"):
        require_conditional_writes(client, requests, ABSENT, f"/{uuid.uuid4().hex}/", "obliging://run")
