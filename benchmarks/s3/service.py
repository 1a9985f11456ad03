"""The S3 server that the object store workload runs on: how it is reached, and buckets for the saves."""

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
    """A running server: AWS_* variables as every client reads them, and its process."""

    environment: dict[str, str]
    pid: int

    @property
    def endpoint_url(self) -> str:
        """Where it listens."""
        return self.environment["AWS_ENDPOINT_URL"]

    @property
    def region(self) -> str:
        """What requests are signed for."""
        return self.environment["AWS_DEFAULT_REGION"]

    def enter(self) -> None:
        """Let every client in this process find the server, as on a user's machine."""
        os.environ.update(self.environment)

    def cpu_seconds(self) -> float:
        """Processor time that the server has taken: it is part of every figure, and nobody else's."""
        return cpu_seconds(self.pid)

    def settle(self) -> None:
        """Wait until the disk has what was written before, and the server is done with it, but not for ever.

        Services remove, compact and collect garbage after they have answered: what one contender leaves
        behind is no part of the next one's time.
        """
        os.sync()
        for _ in range(_SETTLE_LOOKS):
            before = self.cpu_seconds()
            time.sleep(_LOOK_SECONDS)
            if self.cpu_seconds() - before <= _IDLE_SHARE * _LOOK_SECONDS:
                return

    def client(self) -> Any:
        """botocore's synchronous client, with nothing hashed or checked that the protocol does not need."""
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
    """A bucket for each save, because the server gives space back at once for whole buckets only."""

    def __init__(self, service: S3Service, prefix: str) -> None:
        self._client = service.client()
        self._names = (f"{prefix}-{number}" for number in itertools.count(1))

    def make(self) -> str:
        """A new bucket that has taken its first object, so that what the server begins is not timed."""
        name = next(self._names)
        self._client.create_bucket(Bucket=name)
        self._client.put_object(Bucket=name, Key="first", Body=b"first")
        self._client.delete_object(Bucket=name, Key="first")
        return name

    def remove(self, name: str) -> None:
        """With everything in it."""
        self._client.delete_bucket(Bucket=name)

    @contextmanager
    def one(self) -> Iterator[str]:
        """A bucket for a moment."""
        name = self.make()
        try:
            yield name
        finally:
            self.remove(name)

    def close(self) -> None:
        """Close connections."""
        self._client.close()
