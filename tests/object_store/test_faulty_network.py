"""Saves and loads with faults of network or service: temporary, permanent, and lost answers."""

from __future__ import annotations

import json
import time
import uuid
from collections import Counter
from typing import Any

import pytest

import dcp
from dcp.errors import CheckpointConflictError, CheckpointNotFoundError, StorageError
from dcp.storage.stores import open_store
from tests.support.fault_plan import (
    HANG,
    INTERNAL_ERROR,
    LOST_ANSWER,
    RESET,
    SLOW_DOWN,
    STALLED,
    TOO_MANY,
    TRUNCATED,
    Fault,
    Kind,
)
from tests.support.fault_proxy import FaultProxy
from tests.support.faulty_saves import assert_loads, impatient, patient, small_state, state_of
from tests.support.programs import run_program
from tests.support.s3 import S3Server, raw_s3

_DENIED = Fault(Kind.ANSWER, 403, "AccessDenied")


@pytest.fixture(scope="module")
def saved(s3_server: S3Server) -> str:
    """Save ``small_state("saved")``, and return the URL."""
    url = f"s3://{s3_server.bucket}/{uuid.uuid4().hex}"
    _save(small_state("saved"), url, patient(s3_server.storage_options))
    return url


def _save(state: dict[str, Any], url: str, options: dict[str, Any]) -> None:
    dcp.save(state, checkpoint_id=url, storage_options=options, no_dist=True)


def _assert_nothing_left(server: S3Server, url: str) -> None:
    with raw_s3(server) as raw:
        assert raw.list(url) == {}
        assert raw.uploads(url) == {}


# together these seeds have all kinds of faults early; each kind has a test of its own in this file
@pytest.mark.parametrize("seed", [4, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in (5, 7))])
def test_ten_percent_faults_change_nothing(s3_proxy: FaultProxy, s3_root: str, seed: int) -> None:
    """With a fault in each tenth request a save, an asynchronous overwrite and a load succeed."""
    options = patient(s3_proxy.storage_options)
    s3_proxy.spoil_at_random(seed, 0.1)
    _save(state_of("first"), s3_root, options)
    assert_loads(s3_root, state_of("first"), options)
    second = dcp.async_save(state_of("second"), checkpoint_id=s3_root, storage_options=options, no_dist=True)
    second.result()
    assert_loads(s3_root, state_of("second"), options)
    spoiled = [request for request in s3_proxy.log if request.fault is not None]
    assert len(spoiled) >= 3, "the seed spoils next to nothing: take another one"
    _assert_whole(s3_proxy.server, s3_root)


def _assert_whole(server: S3Server, url: str) -> None:
    with raw_s3(server) as raw:
        names = list(raw.list(url))
        assert raw.uploads(url) == {}
    assert len(names) == 3, names
    assert {"manifest.msgpack", ".metadata"} < set(names)


@pytest.mark.parametrize("fault", [RESET, TRUNCATED, STALLED, HANG, INTERNAL_ERROR, TOO_MANY], ids=str)
def test_permanent_faults_are_a_typed_error(
    s3_proxy: FaultProxy, s3_root: str, saved: str, fault: Fault
) -> None:
    """If all requests fail, save and load stop after their time limit; the error names operation and key."""
    options = impatient(s3_proxy.storage_options, request_timeout_seconds=0.5)
    s3_proxy.spoil_at_random(1, 1.0, [fault])
    with pytest.raises(StorageError) as failed_save:
        _save(small_state("lost"), s3_root, options)
    with pytest.raises(StorageError) as failed_load:
        assert_loads(saved, small_state("saved"), options)
    for error, url in ((failed_save.value, s3_root), (failed_load.value, saved)):
        key = url.removeprefix(f"s3://{s3_proxy.bucket}/")
        assert error.bucket == s3_proxy.bucket
        assert error.key.startswith(key)
        assert error.op in ("list", "get")
        assert all(text in str(error) for text in (s3_proxy.bucket, error.key, error.op))
    assert all(request.fault is fault for request in s3_proxy.log)
    _assert_nothing_left(s3_proxy.server, s3_root)


@pytest.mark.parametrize(
    ("operation", "key", "op"),
    [
        ("CreateMultipartUpload", "distcp$", "begin_upload"),
        ("UploadPart", "distcp$", "put_part"),
        ("CompleteMultipartUpload", "distcp$", "complete_upload"),
        ("PutObject", "manifest.msgpack$", "put"),
    ],
)
def test_failed_saves_leave_no_objects(
    s3_proxy: FaultProxy, s3_root: str, operation: str, key: str, op: str
) -> None:
    """If one kind of request fails, a save leaves no object, also without permission to list uploads."""
    options = impatient(s3_proxy.storage_options)
    s3_proxy.spoil(_DENIED, operation="ListMultipartUploads", times=None)
    s3_proxy.spoil(INTERNAL_ERROR, operation=operation, key=key, times=None)
    with pytest.raises(StorageError, match="InternalError") as failed:
        _save(state_of("failed"), s3_root, options)
    assert (failed.value.op, failed.value.bucket) == (op, s3_proxy.bucket)
    assert s3_proxy.requests(operation, key)[0].key == failed.value.key
    _assert_nothing_left(s3_proxy.server, s3_root)


def test_failed_overwrites_keep_the_old(s3_proxy: FaultProxy, s3_root: str) -> None:
    """If the manifest cannot be replaced, the old checkpoint loads and has no other files; the future of an
    asynchronous save has the error."""
    options = impatient(s3_proxy.storage_options)
    _save(state_of("old"), s3_root, patient(s3_proxy.storage_options))
    s3_proxy.spoil(SLOW_DOWN, operation="PutObject", key="manifest", times=None)
    for save in (dcp.save, lambda *given, **more: dcp.async_save(*given, **more).result()):
        with pytest.raises(StorageError, match="SlowDown"):
            save(state_of("new"), checkpoint_id=s3_root, storage_options=options, no_dist=True)
    s3_proxy.heal()
    assert_loads(s3_root, state_of("old"), patient(s3_proxy.storage_options))
    _assert_whole(s3_proxy.server, s3_root)


def test_retry_after_is_respected(s3_proxy: FaultProxy, s3_root: str) -> None:
    """A request is not repeated before the time in ``Retry-After``."""
    store = open_store(s3_root, patient(s3_proxy.storage_options))
    busy = Fault(Kind.ANSWER, 503, "SlowDown", headers=(("Retry-After", "2"),))
    s3_proxy.spoil(busy, operation="PutObject", key="m$")
    begun = time.monotonic()
    store.publish("m", b"1", durable=True)
    assert time.monotonic() - begun >= 2.0
    assert [request.status for request in s3_proxy.requests("PutObject", "m$")] == [503, 200]


def test_lost_answers_of_commits_are_not_conflicts(s3_proxy: FaultProxy, s3_root: str) -> None:
    """A published manifest with a lost answer is not a conflict, although the repeated request is refused."""
    options = patient(s3_proxy.storage_options)
    for name in ("created", "replaced"):
        s3_proxy.log.clear()
        for file in ("manifest.msgpack$", "[.]metadata$"):
            s3_proxy.spoil(LOST_ANSWER, operation="PutObject", key=file)
        _save(state_of(name), s3_root, options)
        for file in ("manifest.msgpack$", "[.]metadata$"):
            assert [request.status for request in s3_proxy.requests("PutObject", file)] == [None, 412]
        s3_proxy.heal()
        assert_loads(s3_root, state_of(name), options)
        _assert_whole(s3_proxy.server, s3_root)


def test_lost_refusals_of_commits_are_conflicts(s3_proxy: FaultProxy, s3_root: str) -> None:
    """A manifest of another writer is a conflict, although the first refusal was lost."""
    store = open_store(s3_root, patient(s3_proxy.storage_options))
    with raw_s3(s3_proxy.server) as raw:
        raw.write(f"{s3_root}/manifest.msgpack", b"theirs")
        s3_proxy.spoil(LOST_ANSWER, operation="PutObject", key="manifest")
        with pytest.raises(CheckpointConflictError, match="another writer"):
            store.publish("manifest.msgpack", b"ours!!", durable=True, expected=None)
        old = store.version("manifest.msgpack")
        raw.write(f"{s3_root}/manifest.msgpack", b"theirs again")
        s3_proxy.spoil(LOST_ANSWER, operation="PutObject", key="manifest")
        with pytest.raises(CheckpointConflictError, match="another writer"):
            store.publish("manifest.msgpack", b"ours", durable=True, expected=old)
        assert raw.read(f"{s3_root}/manifest.msgpack") == b"theirs again"
    statuses = [request.status for request in s3_proxy.requests("PutObject", "manifest")]
    assert statuses == [None, 412, None, 412]


_STEPS = ["CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload"]


@pytest.mark.parametrize("operation", [*_STEPS, "PutObject"])
def test_lost_answers_of_uploads_fail_no_save(s3_proxy: FaultProxy, s3_root: str, operation: str) -> None:
    """With a lost answer to a step of an upload, or to a small file, a save succeeds and leaves no upload."""
    options = patient(s3_proxy.storage_options)
    state = small_state("small") if operation == "PutObject" else state_of(operation)
    s3_proxy.spoil(LOST_ANSWER, operation=operation, key="distcp$")
    _save(state, s3_root, options)
    assert s3_proxy.requests(operation, "distcp$")[0].status is None
    assert_loads(s3_root, state, options)
    _assert_whole(s3_proxy.server, s3_root)


_PUBLISHING = """
import json, sys
from dcp.errors import CheckpointConflictError
from dcp.storage.stores import open_store

store, data = open_store(sys.argv[1], json.loads(sys.argv[2])), b"o" * (65 << 20)
there = store.version("manifest.msgpack")
try:
    version = store.publish("manifest.msgpack", data, durable=True, expected=there if sys.argv[3:] else None)
    assert version == store.version("manifest.msgpack")
    assert store.read("manifest.msgpack", limit_bytes=len(data)) == data
except CheckpointConflictError as error:
    assert store.version("manifest.msgpack") == there
    print(error)
"""


@pytest.mark.parametrize(
    "fault", [LOST_ANSWER, pytest.param(INTERNAL_ERROR, marks=pytest.mark.exhaustive)], ids=str
)
def test_large_manifests_are_compared_by_content(s3_proxy: FaultProxy, s3_root: str, fault: Fault) -> None:
    """A manifest in parts that is refused when repeated is compared by content: another's has equal size."""
    with raw_s3(s3_proxy.server) as raw:
        raw.write(f"{s3_root}/manifest.msgpack", b"t" * (65 << 20))
        for one, replaces, words in ((fault, (), "another writer"), (LOST_ANSWER, ("replaces",), "")):
            spoilt = s3_proxy.spoil(one, operation="CompleteMultipartUpload")
            options = json.dumps(patient(s3_proxy.storage_options))
            # a separate process, to release the memory
            run = run_program("-c", _PUBLISHING, s3_root, options, *replaces)
            assert (run.returncode, spoilt.seen > 0) == (0, True), run.stderr
            assert words in run.stdout and bool(words) == bool(run.stdout), run.stdout
        assert raw.uploads(s3_root) == {}


def test_refusals_are_not_repeated(s3_proxy: FaultProxy, s3_root: str, saved: str) -> None:
    """Status 403 and 404 are final: each request is made once, and the error has the reason."""
    options = patient(s3_proxy.storage_options) | {"retry_seconds": 5.0}
    with pytest.raises(StorageError, match="InvalidAccessKeyId") as failed:
        _save(small_state("denied"), s3_root, {**options, "key": "nobody"})
    assert failed.value.attempts == 1
    with pytest.raises(StorageError, match="SignatureDoesNotMatch"):
        assert_loads(saved, small_state("saved"), {**options, "secret": "wrong"})
    with pytest.raises(CheckpointNotFoundError):
        assert_loads(s3_root, small_state("absent"), options)
    with pytest.raises(StorageError, match="bucket 'no-such-bucket' does not exist"):
        assert_loads("s3://no-such-bucket/run", small_state("absent"), options)
    assert {request.status for request in s3_proxy.log} <= {200, 403, 404}
    keyed = Counter((r.operation, r.key, r.headers["authorization"][:60]) for r in s3_proxy.log if r.key)
    assert set(keyed.values()) == {1}, keyed
    _assert_nothing_left(s3_proxy.server, s3_root)
