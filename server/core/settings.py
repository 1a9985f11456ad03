"""Settings of the operator from flags, environment and file, in this order of precedence.

A variable is ``DCP_SERVER_`` and the name in capitals, with ``__`` between levels
(``DCP_SERVER_ROOTS__PROD__URL=s3://bucket/runs``). The file is TOML with the same names, named by
``DCP_SERVER_CONFIG``, or `dcp-server.toml` in the current folder.
"""

from __future__ import annotations

import ipaddress
import os
import re
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from dcp.storage.errors import CheckpointError

CONFIG_VARIABLE: Final = "DCP_SERVER_CONFIG"
DEFAULT_CONFIG: Final = "dcp-server.toml"
_ROOT_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")

_HOST_NAME: Final = re.compile(
    r"(?:[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?\.)*[A-Za-z_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?\.?"
)

Seconds = Annotated[float, Field(gt=0)]
WebhookKey = Annotated[SecretStr, Field(min_length=32, max_length=1024)]


class RootSettings(BaseModel):
    """One root: the checkpoints below ``url``, a folder or a prefix of an object store.

    ``storage_options`` are options of `dcp.load`. ``readonly`` forbids deletion and conversion, and is
    always set for read-only stores. ``scan_seconds`` is the scan interval; 0 scans only on request.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str = Field(min_length=1, description="A folder, or a URL such as `s3://bucket/prefix`.")
    storage_options: dict[str, Any] = Field(
        default_factory=dict,
        repr=False,
        description="Options of the store, as of `dcp.load`: `endpoint_url`, `key`, `secret`, ...",
    )
    readonly: bool = Field(
        default=False,
        validate_default=True,
        description="Refuse to delete from this root and to convert into it. Always true for a store that "
        "can only be read.",
    )
    scan_seconds: float = Field(default=60.0, ge=0, description="Interval of scans. 0 scans only on request.")
    description: str = Field(default="", description="Text shown with the root.")

    @field_validator("readonly")
    @classmethod
    def _as_its_store(cls, readonly: bool, info: ValidationInfo) -> bool:
        # imported late: it imports numpy, which some tasks do not need
        from dcp.storage.stores import open_store

        try:
            store = open_store(info.data["url"], info.data["storage_options"])
        except (CheckpointError, KeyError):  # the error is raised when the root is used
            return readonly
        return readonly or not store.capabilities.is_writable


class Settings(BaseSettings):
    """All settings, with the defaults of a laptop: ``./checkpoints`` on SQLite on loopback, without keys."""

    model_config = SettingsConfigDict(
        env_prefix="DCP_SERVER_", env_nested_delimiter="__", extra="forbid", frozen=True
    )

    # -- storage and database --
    roots: dict[str, RootSettings] = Field(
        default_factory=lambda: {"checkpoints": RootSettings(url="./checkpoints")},
        description="Folders and object stores with checkpoints, by name; see [roots](#roots).",
    )
    database_url: SecretStr = Field(
        default=SecretStr("sqlite:///dcp-catalog.sqlite"),
        description="`sqlite:///PATH` (four slashes before an absolute path) or "
        "`postgresql://USER:PASSWORD@HOST/NAME`.",
    )
    database_pool_size: int = Field(
        default=8,
        ge=1,
        le=200,
        description="Connections that each process keeps open; it opens up to twice as many for a moment.",
    )
    migrate: bool = Field(
        default=True,
        description="Upgrade an empty or older SQLite database at the start. `dcp db upgrade` upgrades "
        "PostgreSQL.",
    )

    # -- HTTP --
    host: str = Field(
        default="127.0.0.1",
        description='Address to listen on. Addresses other than loopback need `auth = "keys"`.',
    )
    port: int = Field(default=8470, ge=0, le=65535, description="TCP port to listen on.")
    api_workers: int = Field(default=1, ge=1, le=64, description="Processes that answer requests.")
    allowed_hosts: tuple[str, ...] = Field(
        default=("127.0.0.1", "localhost", "[::1]", "::1"),
        description="Names by which clients may call the service (header `Host`), without port. "
        "`*.example.com` allows all names below.",
    )
    trusted_proxies: tuple[str, ...] = Field(
        default=(),
        description="Addresses of proxies whose `X-Forwarded-For` and `X-Forwarded-Proto` are trusted.",
    )
    max_body_bytes: int = Field(
        default=8 << 20,
        ge=1024,
        description="Size limit of a request body. A process reads two bodies above 256 KiB of one key at a "
        "time, and answers further ones with 429.",
    )
    request_seconds: Seconds = Field(
        default=60.0,
        description="Time limit for a request to arrive (10 seconds for its head), and again for its answer "
        "to begin.",
    )
    max_downloads: int = Field(
        default=8,
        ge=1,
        description="Downloads that a process plans or sends at a time. One account may use half of them, "
        "rounded up; further downloads are answered with 429 or 503 and `Retry-After`.",
    )
    min_download_bytes_per_second: int = Field(
        default=64 << 10,
        ge=0,
        description="Slowest download. A client that falls a minute behind this rate is disconnected, and "
        "can resume later. 0 disconnects only a client that reads nothing for a minute.",
    )
    shutdown_seconds: Seconds = Field(
        default=15.0, description="Time for requests in progress when the service stops."
    )

    # -- access --
    auth: Literal["keys", "off"] = Field(
        default="off",
        description="`keys` requires an API key or a session. `off` allows everything to everyone, on "
        "loopback only.",
    )
    metrics_need_key: bool = Field(default=True, description="Require a key for `/metrics`.")
    rate_limit: str = Field(
        default="600/minute",
        description="Requests of one account, or of one address without keys, in each API process.",
    )
    login_limit: str = Field(
        default="30/minute",
        description="Requests with an invalid key, by its prefix and address. Valid keys always pass.",
    )
    session_seconds: Seconds = Field(default=12 * 3600.0, description="Lifetime of a browser session.")

    # -- jobs --
    embedded_worker: bool = Field(default=True, description="Start one worker with `dcp serve`.")
    executor: str = Field(
        default="processes", description="`processes`, or `dask://HOST:PORT` for a Dask cluster."
    )
    concurrency: int = Field(
        default=2, ge=1, le=1024, description="Tasks that a worker runs at a time, beside one scan."
    )
    kind_concurrency: dict[str, Annotated[int, Field(ge=1)]] = Field(
        default_factory=dict,
        description="Tasks of one kind that all workers together run at a time, such as `{ convert = 8 }`.",
    )
    task_memory_bytes: int = Field(
        default=4 << 30,
        ge=256 << 20,
        description="Memory limit of a task. A task above it is killed, and its job fails with this reason.",
    )
    task_seconds: Seconds = Field(default=6 * 3600.0, description="Time limit of a task.")
    lease_seconds: float = Field(
        default=30.0,
        ge=1,
        description="Time after which another worker takes over the jobs of a silent worker.",
    )
    poll_seconds: Seconds = Field(
        default=0.5, description="Interval at which workers look for jobs and events."
    )
    work_folder: Path | None = Field(
        default=None, description="Folder for temporary files. Default: the system's temporary folder."
    )
    delete_grace_seconds: float = Field(
        default=7 * 86_400.0,
        ge=0,
        description="Time between deletion and purge, in which a checkpoint can be restored.",
    )
    max_queued_jobs: int = Field(
        default=1000,
        ge=1,
        description="Jobs of one account that may wait in the queue. Further ones are answered with 429.",
    )
    keep_jobs_seconds: Seconds = Field(
        default=30 * 86_400.0, description="Time for which ended jobs and deliveries are kept."
    )

    # -- webhooks --
    webhook_seconds: Seconds = Field(
        default=10.0,
        description="Time limit of one delivery, from name resolution to the status of the answer.",
    )
    webhook_allow_private: tuple[str, ...] = Field(
        default=(),
        description="Networks (`10.0.0.0/8`) and hosts that webhooks may reach although they are private, "
        "also without TLS.",
    )
    webhook_key: WebhookKey | None = Field(
        default=None,
        description="Key of 32 characters or more that encrypts the secrets of webhooks in the database. API"
        " and workers need the same key.",
    )
    webhook_key_before: WebhookKey | None = Field(
        default=None, description="Previous `webhook_key`, during a rotation."
    )

    # -- features --
    features: dict[str, dict[str, Any]] = Field(
        default_factory=dict, repr=False, description="Settings of features by name; see the sections below."
    )

    # -- logs --
    log_format: Literal["console", "json"] = Field(
        default="console", description="`json` writes one JSON object for each event."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Lowest level of events that are logged."
    )

    @field_validator("roots")
    @classmethod
    def _named(cls, roots: dict[str, RootSettings]) -> dict[str, RootSettings]:
        for name in roots:
            if not _ROOT_NAME.fullmatch(name):
                raise ValueError(f"root {name!r}: lower-case letters, digits, '.', '_' and '-', 63 at most")
        return roots

    @field_validator("webhook_allow_private")
    @classmethod
    def _allowed(cls, entries: tuple[str, ...]) -> tuple[str, ...]:
        for entry in entries:
            try:
                ipaddress.ip_network(entry)
            except ValueError:
                if not _HOST_NAME.fullmatch(entry):
                    raise ValueError(
                        f"{entry!r} is neither a network such as 10.0.0.0/8 nor a host"
                    ) from None
        return entries

    @model_validator(mode="after")
    def _guarded(self) -> Self:
        if self.auth == "off" and not _is_loopback(self.host):
            raise ValueError(
                f"host {self.host} can be reached from elsewhere: set auth=keys (and make one with "
                "`dcp keys create`), or listen on 127.0.0.1"
            )
        if self.webhook_key_before is not None and self.webhook_key is None:
            raise ValueError("webhook_key_before requires webhook_key")
        return self

    @property
    def writable_roots(self) -> frozenset[str]:
        """The names of roots that are not read-only."""
        return frozenset(name for name, root in self.roots.items() if not root.readonly)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the sources: flags, then the environment, then the file."""
        path = Path(os.environ.get(CONFIG_VARIABLE, DEFAULT_CONFIG))
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, toml_file=path)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
