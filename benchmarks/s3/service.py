"""The S3 server of the object store workload: its address, and buckets for saves."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.machine.process_tree import cpu_seconds

__all__ = ["Buckets", "S3Service"]

_POOL_CONNECTIONS = 64
_LOOK_SECONDS = 0.25
_SETTLE_LOOKS = 60
_IDLE_SHARE = 0.1


@dataclass(frozen=True)
class S3Service:
    """A running server: its AWS_* variables and its process."""

    environment: dict[str, str]
    pid: int

    @property
    def endpoint_url(self) -> str:
        """URL of the server."""
        return self.environment["AWS_ENDPOINT_URL"]

    @property
    def region(self) -> str:
        """Region for which requests are signed."""
        return self.environment["AWS_DEFAULT_REGION"]

    def enter(self) -> None:
        """Set the variables by which every client in this process finds the server."""
        os.environ.update(self.environment)

    def cpu_seconds(self) -> float:
        """Processor time of the server, a part of every figure."""
        return cpu_seconds(self.pid)

    def settle(self) -> None:
        """Wait with a limit until the disk has all writes and the server is idle.

        Servers remove, compact and collect garbage after their response. That work of one contender must not
        slow the next.
        """
        os.sync()
        for _ in range(_SETTLE_LOOKS):
            before = self.cpu_seconds()
            time.sleep(_LOOK_SECONDS)
            if self.cpu_seconds() - before <= _IDLE_SHARE * _LOOK_SECONDS:
                return

    def client(self) -> Any:
        """Return botocore's synchronous client, without optional checksums."""
        import botocore.session
        from botocore.config import Config

        config = Config(
            max_pool_connections=_POOL_CONNECTIONS,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={"addressing_style": "path", "payload_signing_enabled": False},
        )
        return botocore.session.get_session().create_client(
            "s3",
            config=config,
            endpoint_url=self.endpoint_url,
            aws_access_key_id=self.environment["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=self.environment["AWS_SECRET_ACCESS_KEY"],
            region_name=self.region,
        )


class Buckets:
    """One bucket for each save, because the server frees space at once only for whole buckets."""

    def __init__(self, service: S3Service, prefix: str) -> None:
        self._client = service.client()
        self._names = (f"{prefix}-{number}" for number in itertools.count(1))

    def make(self) -> str:
        """Make a bucket and put a first object, so that setup in the server is not timed."""
        name = next(self._names)
        self._client.create_bucket(Bucket=name)
        self._client.put_object(Bucket=name, Key="first", Body=b"first")
        self._client.delete_object(Bucket=name, Key="first")
        return name

    def remove(self, name: str) -> None:
        """Remove a bucket with its objects."""
        self._client.delete_bucket(Bucket=name)

    @contextmanager
    def one(self) -> Iterator[str]:
        """Provide a temporary bucket."""
        name = self.make()
        try:
            yield name
        finally:
            self.remove(name)

    def close(self) -> None:
        """Close connections."""
        self._client.close()
