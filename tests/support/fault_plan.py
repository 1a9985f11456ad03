"""Faults of requests, by rules or by a seeded random plan; and the description of an S3 request."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from urllib.parse import parse_qsl, unquote, urlsplit

__all__ = [
    "DELAY",
    "HANG",
    "INTERNAL_ERROR",
    "LOST_ANSWER",
    "PASSING",
    "RESET",
    "SLOW_DOWN",
    "STALLED",
    "TOO_MANY",
    "TRUNCATED",
    "Fault",
    "FaultPlan",
    "Kind",
    "RandomFaults",
    "Request",
    "Rule",
]


class Kind(Enum):
    """The kind of a fault."""

    DELAY = "delay"
    """The request is carried out after a delay."""
    RESET = "reset"
    """The connection is reset before the server receives the request."""
    LOST_ANSWER = "lost answer"
    """The server carries the request out; the connection is reset instead of an answer."""
    TRUNCATED = "truncated"
    """The connection is closed in the middle of the answer's body (without a body, of its first line)."""
    STALLED = "stalled"
    """Like truncated, but the connection stays open."""
    ANSWER = "answer"
    """The proxy answers; the server does not receive the request."""
    HANG = "hang"
    """No answer, and the server does not receive the request."""


@dataclass(frozen=True)
class Fault:
    """A fault of a request; ``status`` and ``code`` are those of an injected answer."""

    kind: Kind
    status: int = 0
    code: str = ""
    seconds: float = 0.0
    headers: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return f"{self.status} {self.code}" if self.kind is Kind.ANSWER else self.kind.value


DELAY = Fault(Kind.DELAY, seconds=0.05)
RESET = Fault(Kind.RESET)
LOST_ANSWER = Fault(Kind.LOST_ANSWER)
TRUNCATED = Fault(Kind.TRUNCATED)
STALLED = Fault(Kind.STALLED)
HANG = Fault(Kind.HANG)
INTERNAL_ERROR = Fault(Kind.ANSWER, 500, "InternalError")
SLOW_DOWN = Fault(Kind.ANSWER, 503, "SlowDown")
TOO_MANY = Fault(Kind.ANSWER, 429, "TooManyRequests", headers=(("Retry-After", "0.1"),))

PASSING = (DELAY, RESET, LOST_ANSWER, TRUNCATED, INTERNAL_ERROR, SLOW_DOWN, TOO_MANY)
"""Transient faults of networks and services: a retry succeeds a little later."""


@dataclass
class Request:
    """A request, as seen by the proxy; byte counts grow while the request is in progress."""

    method: str
    bucket: str
    key: str
    query: dict[str, str]
    headers: dict[str, str]
    """Headers by lower-case name."""
    status: int | None = None
    """Status of the answer sent to the client; None without an answer."""
    request_bytes: int = 0
    """Bytes of the body; `response_bytes` likewise."""
    response_bytes: int = 0
    fault: Fault | None = None

    @classmethod
    def parse(cls, method: str, target: str, headers: dict[str, str]) -> Request:
        """Parse a request line with the bucket in the path."""
        parts = urlsplit(target)
        bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
        return cls(method, bucket, key, dict(parse_qsl(parts.query, keep_blank_values=True)), headers)

    @property
    def operation(self) -> str:
        """S3's name of the operation: GetObject, UploadPart, ..."""
        if not self.key:
            return self._bucket_operation()
        if "uploads" in self.query:
            return "CreateMultipartUpload"
        if "uploadId" in self.query:
            names = {"PUT": "UploadPart", "POST": "CompleteMultipartUpload", "GET": "ListParts"}
            return names.get(self.method, "AbortMultipartUpload")
        if self.method == "PUT" and "x-amz-copy-source" in self.headers:
            return "CopyObject"
        return f"{self.method.capitalize()}Object"

    def _bucket_operation(self) -> str:
        if not self.bucket:
            return "ListBuckets"
        for name, operation in (("delete", "DeleteObjects"), ("uploads", "ListMultipartUploads")):
            if name in self.query:
                return operation
        if self.method == "GET":
            return "ListObjectsV2" if self.query.get("list-type") == "2" else "ListObjects"
        return {"PUT": "CreateBucket", "HEAD": "HeadBucket"}.get(self.method, "DeleteBucket")

    @property
    def range(self) -> str | None:
        """The Range header."""
        return self.headers.get("range")

    def matches(self, operation: str | None, key: str | None) -> bool:
        """Return True for this operation (any if None) on a key that matches the regular expression."""
        right_key = key is None or re.search(key, self.key) is not None
        return right_key and operation in (None, self.operation)

    def __str__(self) -> str:
        suffix = f" ({self.fault})" if self.fault else ""
        return f"{self.operation} {self.bucket}/{self.key} {self.range or ''}-> {self.status}{suffix}"


@dataclass
class Rule:
    """A fault for matching requests: from the ``nth`` match (from 1) on, ``times`` times.

    ``times=None``: all later matches.
    """

    fault: Fault
    operation: str | None = None
    key: str | None = None
    nth: int = 1
    times: int | None = 1
    seen: int = field(default=0, init=False)

    def apply(self, request: Request) -> Fault | None:
        """Count a matching request, and return the fault if it applies."""
        if not request.matches(self.operation, self.key):
            return None
        self.seen += 1
        last = None if self.times is None else self.nth + self.times - 1
        return self.fault if self.seen >= self.nth and (last is None or self.seen <= last) else None


class RandomFaults:
    """Each request fails with ``probability``, by one of ``faults``; equal seeds draw equal faults."""

    def __init__(self, seed: int, probability: float, faults: Sequence[Fault] = PASSING) -> None:
        self._random, self._probability, self._faults = random.Random(seed), probability, tuple(faults)

    def next(self) -> Fault | None:
        """Return the fault of the next request."""
        return self._random.choice(self._faults) if self._random.random() < self._probability else None


class FaultPlan:
    """Rules first, then random faults."""

    def __init__(self) -> None:
        self.rules: list[Rule] = []
        self.random: RandomFaults | None = None

    def next(self, request: Request) -> Fault | None:
        """Return the fault of a new request. All rules count the request; the first rule that applies
        wins."""
        hits = [fault for rule in self.rules if (fault := rule.apply(request)) is not None]
        drawn = self.random.next() if self.random is not None else None
        return hits[0] if hits else drawn
