"""The proxy that the other tests trust: it changes nothing unless asked, and then as asked."""

from __future__ import annotations

import http.client
import random

import pytest
from botocore.exceptions import BotoCoreError, ClientError, ConnectionClosedError, ReadTimeoutError

from tests.support.fault_plan import (
    HANG,
    INTERNAL_ERROR,
    LOST_ANSWER,
    PASSING,
    RESET,
    SLOW_DOWN,
    STALLED,
    TOO_MANY,
    TRUNCATED,
    Fault,
    RandomFaults,
)
from tests.support.fault_proxy import FaultProxy
from tests.support.s3 import raw_s3, split_url

_PART_BYTES = 5 << 20


def test_proxy_changes_nothing(s3_proxy: FaultProxy, s3_root: str) -> None:
    """Signed requests of all kinds pass, with bodies of all framings, and the log says what they were."""
    data = random.Random(1).randbytes(_PART_BYTES + 1000)
    bucket, key = split_url(f"{s3_root}/a b+ü")
    with raw_s3(s3_proxy) as raw:
        upload = raw.begin_upload(f"{s3_root}/a b+ü")
        assert raw.uploads(s3_root) == {upload: key}
        parts = [
            raw.client.upload_part(Bucket=bucket, Key=key, UploadId=upload, PartNumber=number, Body=body)
            for number, body in enumerate((data[:_PART_BYTES], data[_PART_BYTES:]), start=1)
        ]
        named = [{"PartNumber": n, "ETag": part["ETag"]} for n, part in enumerate(parts, start=1)]
        raw.client.complete_multipart_upload(
            Bucket=bucket, Key=key, UploadId=upload, MultipartUpload={"Parts": named}
        )
        assert raw.client.head_object(Bucket=bucket, Key=key)["ContentLength"] == len(data)
        assert raw.read(f"{s3_root}/a b+ü") == data
        part = raw.client.get_object(Bucket=bucket, Key=key, Range="bytes=10-19")["Body"].read()
        assert part == data[10:20]
        raw.write_many([(f"{s3_root}/many/{number:03}", b"") for number in range(50)])
        assert len(raw.list(f"{s3_root}/many")) == 50
        raw.client.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": key}]})
    assert s3_proxy.counts() == {
        "CreateMultipartUpload": 1,
        "ListMultipartUploads": 1,
        "UploadPart": 2,
        "CompleteMultipartUpload": 1,
        "HeadObject": 1,
        "GetObject": 2,
        "PutObject": 50,
        "ListObjectsV2": 1,
        "DeleteObjects": 1,
    }
    assert [r.request_bytes for r in s3_proxy.requests("UploadPart")] == [_PART_BYTES, 1000]
    whole, ranged = s3_proxy.requests("GetObject", "ü")
    assert (whole.bucket, whole.key, whole.status, whole.response_bytes) == (bucket, key, 200, len(data))
    assert (ranged.range, ranged.status, ranged.response_bytes) == ("bytes=10-19", 206, 10)


def test_proxy_follows_chunked_bodies(s3_proxy: FaultProxy, s3_root: str) -> None:
    """A request in chunks is forwarded whole, and the connection is in order after it."""
    bucket, key = split_url(f"{s3_root}/object")
    host, _, port = s3_proxy.endpoint_url.removeprefix("http://").partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    for _ in range(2):  # nobody signed them
        connection.request("PUT", f"/{bucket}/{key}", body=iter([b"abc", b"de"]), encode_chunked=True)
        answer = connection.getresponse()
        assert answer.status == 403
        assert b"AccessDenied" in answer.read()
    connection.close()
    assert [request.status for request in s3_proxy.requests("PutObject")] == [403, 403]
    assert s3_proxy.log[0].request_bytes == len(b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n")


@pytest.mark.parametrize(
    "fault", [RESET, LOST_ANSWER, TRUNCATED, INTERNAL_ERROR, SLOW_DOWN, TOO_MANY], ids=str
)
def test_faults_of_writes(s3_proxy: FaultProxy, s3_root: str, fault: Fault) -> None:
    """The second PUT fails as asked, the others do not; the server has it only where the answer was lost."""
    s3_proxy.spoil(fault, operation="PutObject", key="wanted$", nth=2)
    with raw_s3(s3_proxy) as raw:
        raw.write(f"{s3_root}/other", b"1")
        raw.write(f"{s3_root}/wanted", b"1")
        with pytest.raises((BotoCoreError, ClientError)) as caught:
            raw.write(f"{s3_root}/wanted", b"2")
        raw.write(f"{s3_root}/other", b"3")
        happened = raw.read(f"{s3_root}/wanted") == b"2"
    assert happened == (fault in (LOST_ANSWER, TRUNCATED))
    if fault.status:
        assert isinstance(caught.value, ClientError)
        assert caught.value.response["Error"]["Code"] == fault.code
        assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == fault.status
    else:
        assert isinstance(caught.value, ConnectionClosedError), caught.value
    spoiled = [request for request in s3_proxy.log if request.fault]
    assert [(request.operation, request.status) for request in spoiled] == [
        ("PutObject", fault.status or None)
    ]


@pytest.mark.parametrize("fault", [TRUNCATED, STALLED, HANG], ids=str)
def test_faults_of_reads(s3_proxy: FaultProxy, s3_root: str, fault: Fault) -> None:
    """Half of a body comes and then an end or nothing; or nothing comes at all."""
    bucket, key = split_url(f"{s3_root}/object")
    s3_proxy.spoil(fault, operation="GetObject")
    with raw_s3(s3_proxy) as raw:
        raw.write(f"{s3_root}/object", bytes(100_000))
    with raw_s3(s3_proxy, read_timeout_seconds=2) as raw:
        with pytest.raises((BotoCoreError, ClientError)) as caught:
            raw.client.get_object(Bucket=bucket, Key=key)["Body"].read()
        assert raw.read(f"{s3_root}/object") == bytes(100_000)
    assert isinstance(caught.value, ReadTimeoutError) == (fault is not TRUNCATED)
    spoiled, healthy = s3_proxy.requests("GetObject")
    assert (spoiled.response_bytes, healthy.response_bytes) == (0 if fault is HANG else 50_000, 100_000)


def test_chance_is_seeded_and_comes_in_bursts() -> None:
    """One seed gives one sequence, of about the share that was asked for; bursts repeat one fault."""
    faults = [RandomFaults(7, 0.1), RandomFaults(7, 0.1), RandomFaults(8, 0.1)]
    first, again, other = ([plan.next() for _ in range(2000)] for plan in faults)
    assert first == again
    assert first != other
    assert 120 < sum(fault is not None for fault in first) < 280
    assert set(first) == {None, *PASSING}
    assert None not in {RandomFaults(1, 1.0).next() for _ in range(100)}
    burst = RandomFaults(3, 0.05, [RESET, SLOW_DOWN], burst=4)
    drawn = [burst.next() for _ in range(400)]
    begin = next(at for at, fault in enumerate(drawn) if fault)
    assert len(set(drawn[begin : begin + 4])) == 1
