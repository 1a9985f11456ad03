"""The server and the proxy that the other tests trust: it checks what S3 checks, and is spoiled as asked."""

from __future__ import annotations

import dataclasses
import random

import pytest
from botocore.exceptions import BotoCoreError, ClientError, ConnectionClosedError, ReadTimeoutError

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
)
from tests.support.fault_proxy import FaultProxy
from tests.support.s3 import S3Server, raw_s3, split_url


def test_server_checks_signatures_and_conditions(s3_server: S3Server, s3_root: str) -> None:
    """A wrong secret is refused, and so is a conditional write whose condition does not hold."""
    bucket, key = split_url(f"{s3_root}/object")
    with raw_s3(s3_server) as raw:
        tag = raw.write(f"{s3_root}/object", b"first")
        for condition in ({"IfNoneMatch": "*"}, {"IfMatch": '"0123456789abcdef0123456789abcdef"'}):
            with pytest.raises(ClientError, match="PreconditionFailed"):
                raw.client.put_object(Bucket=bucket, Key=key, Body=b"second", **condition)
        raw.client.put_object(Bucket=bucket, Key=key, Body=b"third", IfMatch=tag)
        assert raw.read(f"{s3_root}/object") == b"third"
    wrong = dataclasses.replace(s3_server, secret_key="wrong")
    with raw_s3(wrong) as raw, pytest.raises(ClientError, match="SignatureDoesNotMatch"):
        raw.read(f"{s3_root}/object")


def test_proxy_changes_nothing(s3_proxy: FaultProxy, s3_root: str) -> None:
    """Signed requests of all kinds pass, and the log says what they were."""
    data = random.Random(1).randbytes(100_000)
    bucket, key = split_url(f"{s3_root}/a b+ü")
    with raw_s3(s3_proxy) as raw:
        upload = raw.begin_upload(f"{s3_root}/a b+ü")
        assert raw.uploads(s3_root) == {upload: key}
        where = {"Bucket": bucket, "Key": key, "UploadId": upload}
        part = raw.client.upload_part(**where, PartNumber=1, Body=data)
        named = [{"PartNumber": 1, "ETag": part["ETag"]}]
        raw.client.complete_multipart_upload(**where, MultipartUpload={"Parts": named})
        assert raw.read(f"{s3_root}/a b+ü") == data
        ranged = raw.client.get_object(Bucket=bucket, Key=key, Range="bytes=10-19")["Body"].read()
        assert ranged == data[10:20]
    assert [str(request).split()[0] for request in s3_proxy.log] == [
        *("CreateMultipartUpload", "ListMultipartUploads", "UploadPart", "CompleteMultipartUpload"),
        *("GetObject", "GetObject"),
    ]
    first, second = s3_proxy.requests("GetObject", "ü")
    assert (first.bucket, first.key, first.status, first.response_bytes) == (bucket, key, 200, len(data))
    assert (second.range, second.status, second.response_bytes) == ("bytes=10-19", 206, 10)


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
