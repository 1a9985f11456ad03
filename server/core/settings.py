"""Settings of the operator: in a file, in the environment, by flags; the later wins.

Environment: ``DCP_SERVER_`` and the name in capitals, ``__`` between the levels
(``DCP_SERVER_ROOTS__PROD__URL=s3://bucket/runs``). File: TOML with the same names, named by
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
    """One root: checkpoints are found below ``url``, a folder or an object store's prefix.

    ``storage_options`` are those of `dcp.load`. ``readonly``: nothing is deleted, and nothing converted to
    it; always so where its store can only be read. ``scan_seconds``: how often it is looked through; 0 is
    only on demand.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str = Field(min_length=1)
    storage_options: dict[str, Any] = Field(default_factory=dict, repr=False)
    readonly: bool = Field(default=False, validate_default=True)
    scan_seconds: float = Field(default=60.0, ge=0)
    description: str = ""

    @field_validator("readonly")
    @classmethod
    def _as_its_store(cls, readonly: bool, info: ValidationInfo) -> bool:
        from dcp.storage.stores import open_store  # imports numpy, which counting and webhooks do without

        try:
            store = open_store(info.data["url"], info.data["storage_options"])
        except (CheckpointError, KeyError):  # an error of whatever uses the root
            return readonly
        return readonly or not store.capabilities.is_writable


class Settings(BaseSettings):
    """All settings, with the defaults of a laptop: ``./checkpoints`` on SQLite on loopback, without keys."""

    model_config = SettingsConfigDict(
        env_prefix="DCP_SERVER_", env_nested_delimiter="__", extra="forbid", frozen=True
    )

    # -- storage and database --
    roots: dict[str, RootSettings] = Field(
        default_factory=lambda: {"checkpoints": RootSettings(url="./checkpoints")}
    )
    database_url: SecretStr = SecretStr("sqlite:///dcp-catalog.sqlite")
    database_pool_size: int = Field(default=8, ge=1, le=200)
    migrate: bool = True  # bring an empty or older SQLite database up to date at the start

    # -- HTTP --
    host: str = "127.0.0.1"
    port: int = Field(default=8470, ge=0, le=65535)
    api_workers: int = Field(default=1, ge=1, le=64)
    allowed_hosts: tuple[str, ...] = ("127.0.0.1", "localhost", "[::1]", "::1")
    trusted_proxies: tuple[str, ...] = ()
    max_body_bytes: int = Field(default=8 << 20, ge=1024)
    request_seconds: Seconds = 60.0
    max_downloads: int = Field(default=8, ge=1)  # half of them for one key
    min_download_bytes_per_second: int = Field(default=64 << 10, ge=0)
    shutdown_seconds: Seconds = 15.0

    # -- who may --
    auth: Literal["keys", "off"] = "off"
    metrics_need_key: bool = True
    rate_limit: str = "600/minute"  # by key, or by address without one
    login_limit: str = "30/minute"  # of refused keys, by prefix and address
    session_seconds: Seconds = 12 * 3600.0  # of a browser that is signed in with a key

    # -- jobs --
    embedded_worker: bool = True  # `dcp serve` starts one `dcp worker`
    executor: str = "processes"  # or dask://HOST:PORT
    concurrency: int = Field(default=2, ge=1, le=1024)
    kind_concurrency: dict[str, Annotated[int, Field(ge=1)]] = Field(default_factory=dict)  # over all workers
    task_memory_bytes: int = Field(default=4 << 30, ge=256 << 20)
    task_seconds: Seconds = 6 * 3600.0
    lease_seconds: float = Field(default=30.0, ge=1)
    poll_seconds: Seconds = 0.5
    work_folder: Path | None = None  # for what cannot stream; the system's temporary folder
    delete_grace_seconds: float = Field(default=7 * 86_400.0, ge=0)
    max_queued_jobs: int = Field(default=1000, ge=1)  # of one key
    keep_jobs_seconds: Seconds = 30 * 86_400.0

    # -- webhooks --
    webhook_seconds: Seconds = 10.0
    webhook_allow_private: tuple[str, ...] = ()  # networks such as 10.0.0.0/8, and hosts by name
    webhook_key: WebhookKey | None = None  # seals their secrets in the database
    webhook_key_before: WebhookKey | None = None  # opens those that are not sealed anew yet

    # -- features --
    features: dict[str, dict[str, Any]] = Field(default_factory=dict, repr=False)  # by name, as each declares

    # -- logs --
    log_format: Literal["console", "json"] = "console"
    log_level: Literal["debug", "info", "warning", "error"] = "info"

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
            raise ValueError("webhook_key_before is for secrets that are to be sealed anew: set webhook_key")
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
        """Flags, then the environment, then the file."""
        path = Path(os.environ.get(CONFIG_VARIABLE, DEFAULT_CONFIG))
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, toml_file=path)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
