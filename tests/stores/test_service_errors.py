"""Errors of services. Internal: a pure table of exceptions from libraries that are not all installed.

A permanent error is raised at once, with a remedy.
"""

from __future__ import annotations

import errno
import ftplib
from types import SimpleNamespace

import aiohttp
import fsspec
import huggingface_hub.errors
import pytest
import requests
from botocore.exceptions import ClientError, SSLError
from fsspec.implementations.memory import MemoryFileSystem

import dcp
from dcp.errors import StorageError
from dcp.storage.stores.objects.requests import Failure, filesystem_failure, s3_failure


class GoogleAuthError(Exception):
    """An error like google.auth's."""

    def __init__(self, text: str, retryable: bool = False) -> None:
        super().__init__(text)
        self.retryable = retryable


class HttpError(Exception):
    """An error like gcsfs' (with a code) or azure.core's (with a status)."""

    def __init__(self, code: int | str | None = None, text: str = "", **attributes: object) -> None:
        super().__init__(text)
        self.code = code
        vars(self).update(attributes)


DefaultCredentialsError = type("DefaultCredentialsError", (GoogleAuthError,), {})
RefreshError = type("RefreshError", (GoogleAuthError,), {})
TransportError = type("TransportError", (GoogleAuthError,), {})
HttpResponseError = type("HttpResponseError", (HttpError,), {})
ClientAuthenticationError = type("ClientAuthenticationError", (HttpResponseError,), {})
AuthenticationException = type("AuthenticationException", (Exception,), {})  # of paramiko


def _hub(status: int) -> Exception:
    response = SimpleNamespace(status_code=status, headers={}, request=None)
    return huggingface_hub.errors.HfHubHTTPError("no", response=response)  # type: ignore[arg-type]


def _caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


FINAL, PASSING = Failure.FINAL, Failure.PASSING


@pytest.mark.parametrize(
    ("error", "kind", "advice"),
    [
        (DefaultCredentialsError("none were found"), FINAL, "credentials"),
        (RefreshError("invalid_grant"), FINAL, "credentials"),
        (RefreshError("the metadata server is busy", retryable=True), PASSING, ""),
        (_caused(RefreshError("no metadata server"), TransportError("timed out")), PASSING, ""),
        (HttpError(401, "Anonymous caller does not have storage.objects.list access"), FINAL, "credentials"),
        (HttpError("403", "quota project"), FINAL, "credentials"),
        (HttpError(503, "busy"), PASSING, ""),
        (HttpError(400, "no such parameter"), FINAL, ""),
        (HttpError(None, "?"), PASSING, ""),
        (OSError("Forbidden: gs://bucket/key\nno access"), FINAL, "credentials"),
        (ClientAuthenticationError(status_code=None), FINAL, "credentials"),
        (HttpResponseError(status_code=403), FINAL, "credentials"),
        (HttpResponseError(status_code=404), Failure.MISSING, ""),
        (HttpResponseError(status_code=416), Failure.RANGE, ""),
        (_hub(403), FINAL, "credentials"),
        (_hub(429), PASSING, ""),
        (_hub(507), Failure.FULL, ""),
        (huggingface_hub.errors.LocalTokenNotFoundError("log in"), FINAL, "credentials"),
        (huggingface_hub.errors.OfflineModeIsEnabled("HF_HUB_OFFLINE"), FINAL, ""),
        (aiohttp.ClientResponseError(SimpleNamespace(real_url="u"), (), status=403), FINAL, "credentials"),  # type: ignore[arg-type]
        (requests.exceptions.JSONDecodeError("Expecting value", "<html>", 0), PASSING, ""),
        (AuthenticationException("Authentication failed."), FINAL, "credentials"),
        (ftplib.error_perm("530 Login incorrect."), FINAL, ""),
        (ftplib.error_temp("421 too many connections"), PASSING, ""),
        (PermissionError(errno.EACCES, "no"), FINAL, "credentials"),
        (OSError(errno.ENOSPC, "full"), Failure.FULL, ""),
        (OSError(errno.EROFS, "read-only"), FINAL, ""),
        (_caused(RuntimeError("no driver"), ImportError("pyarrow")), FINAL, "install"),
        (ValueError("Must provide either a connection_string or account_name"), FINAL, ""),
        (TypeError("unexpected keyword argument"), FINAL, ""),
        (ConnectionResetError("reset"), PASSING, ""),
        (TimeoutError(), PASSING, ""),
        (FileNotFoundError("gone"), Failure.MISSING, ""),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_the_kind_of_service_errors(error: Exception, kind: Failure, advice: str) -> None:
    """Type, status or name decide the kind; the message has advice only where it helps."""
    meant = filesystem_failure(error, "cloud://")
    assert meant.kind is kind
    assert type(error).__name__ in str(meant)
    for word in ("credentials are", "install the package"):
        assert (word in str(meant)) == (bool(advice) and advice in word)


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (503, "SlowDown", PASSING),
        (500, "InternalError", PASSING),
        (429, "", PASSING),
        (409, "ConditionalRequestConflict", PASSING),
        (400, "RequestTimeout", PASSING),
        (400, "BadDigest", PASSING),
        (404, "NoSuchKey", Failure.MISSING),
        (404, "404", Failure.MISSING),
        (404, "NoSuchBucket", FINAL),
        (412, "PreconditionFailed", Failure.CONDITION),
        (416, "InvalidRange", Failure.RANGE),
        (403, "AccessDenied", FINAL),
        (400, "InvalidArgument", FINAL),
        (507, "", Failure.FULL),
    ],
)
def test_the_kind_of_answers_of_s3(status: int, code: str, kind: Failure) -> None:
    """The code decides, or else the status; a retry-after header is respected."""
    metadata = {"HTTPStatusCode": status, "HTTPHeaders": {"retry-after": "3"}}
    error = ClientError({"Error": {"Code": code, "Message": "m"}, "ResponseMetadata": metadata}, "GetObject")
    found = s3_failure(error, "b")
    assert found.kind is kind
    assert found.retry_after_seconds == (3 if kind is PASSING else 0)


def test_an_untrusted_certificate_is_permanent() -> None:
    """An untrusted certificate is a permanent error, while an interrupted handshake is retried."""
    untrusted = "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: self-signed certificate"
    for text, kind in ((untrusted, FINAL), ("[SSL: UNEXPECTED_EOF_WHILE_READING]", PASSING)):
        assert s3_failure(SSLError(endpoint_url="https://e", error=text), "b").kind is kind


class _Locked(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A file system without credentials."""

    protocol = "lockedcloud"

    def ls(self, path: str, detail: bool = True, **_: object) -> list[object]:
        raise DefaultCredentialsError("Your default credentials were not found.")

    info = cat_file = pipe_file = ls


def test_missing_credentials_are_not_retried() -> None:
    """Missing credentials raise after one attempt of each request, whatever retry_seconds is."""
    fsspec.register_implementation("lockedcloud", _Locked, clobber=True)
    options = {"retry_seconds": 3600.0}
    for act in (dcp.save, dcp.load):
        with pytest.raises(StorageError, match="credentials are missing") as failed:
            act({"n": 1}, checkpoint_id="lockedcloud://bucket/run", storage_options=options, no_dist=True)
        assert failed.value.facts["attempts"] == 1
