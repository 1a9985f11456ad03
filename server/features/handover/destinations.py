"""Destinations of handovers: settings, transferred facts, and the reference to a checkpoint."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, get_args
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from dcp.server.catalog.inputs import clean_text
from dcp.server.core.jobs.kind import PermanentJobError
from dcp.server.core.logs import redact
from dcp.server.core.settings import Settings
from dcp.server.features.webhooks.addresses import Allowed, RefusedUrlError, WebhookUrl, parse_url

Target = Literal["mlflow", "wandb"]
TARGETS: Final[tuple[Target, ...]] = get_args(Target)

_UNSAFE: Final = re.compile(r"[^A-Za-z0-9_.-]+")
_FIELD: Final = re.compile(r"\{([^{}]*)\}")
_NAME_FIELDS: Final = ("root", "run")
_MAX_NAME: Final = 128
_REFUSED_HINT: Final = ("`webhook_allow_private`", "`features.handover.allow_private`")


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Trigger(_Model):
    """Event after which a checkpoint is handed over. All given conditions must match."""

    event: str = Field(default="checkpoint.aliased", description="Kind of the event.")
    alias: str | None = Field(default=None, description="Alias that the event sets.")
    tag: str | None = Field(default=None, description="Tag that the event adds.")
    stage: str | None = Field(default=None, description="Stage that the event names.")
    root: str | None = Field(default=None, description="Name of the root.")
    run: str | None = Field(default=None, description="Glob for the key of the run.")
    targets: tuple[Target, ...] = Field(default=TARGETS, description="Targets; default: all configured.")

    @field_validator("event")
    @classmethod
    def _is_emitted(cls, event: str) -> str:
        from dcp.server.features import event_kinds

        if event not in event_kinds():
            raise ValueError(f"no event has the kind {event!r}; kinds are {', '.join(sorted(event_kinds()))}")
        return event


class _Destination(_Model):
    name: str = Field(
        default="{root}.{run}",
        min_length=1,
        max_length=200,
        description="Name of the registered model or artifact; `{root}` and `{run}` are replaced.",
    )

    @field_validator("name")
    @classmethod
    def _has_known_fields(cls, name: str) -> str:
        unknown = [one for one in _FIELD.findall(name) if one not in _NAME_FIELDS]
        if unknown or re.search(r"[{}]", _FIELD.sub("", name)):
            raise ValueError(f"name: only the fields {{root}} and {{run}} are allowed, not {name!r}")
        return name


def _check_header(secret: SecretStr) -> SecretStr:
    if not re.fullmatch("[!-~]+", secret.get_secret_value()):
        raise ValueError("must have visible ASCII characters only, without spaces and line breaks")
    return secret


Token = Annotated[SecretStr, AfterValidator(_check_header)]
"""Sent in a header."""


class MlflowSettings(_Destination):
    """MLflow tracking server. Give a token, or a user and a password, if the server needs them."""

    url: str = Field(description="URL of the tracking server.")
    token: Token | None = Field(default=None, description="Bearer token.")
    user: str | None = Field(default=None, description="User of basic authentication.")
    password: SecretStr | None = Field(default=None, description="Password of the user.")
    seconds: float = Field(default=30.0, gt=0, le=600, description="Time limit of a request.")

    @model_validator(mode="after")
    def _has_one_credential(self) -> Self:
        if (self.user is None) != (self.password is None) or (self.user and self.token):
            raise ValueError("mlflow: set token, or user and password")
        return self


class WandbSettings(_Destination):
    """W&B project. Needs ``api_key``, or ``folder``."""

    project: str = Field(min_length=1, max_length=128, description="Name of the project.")
    entity: str | None = Field(default=None, description="Team or user that owns the project.")
    base_url: str = Field(default="https://api.wandb.ai", description="URL of the W&B API.")
    api_key: Token | None = Field(default=None, description="API key of W&B.")
    folder: Path | None = Field(
        default=None,
        description="Write runs to this folder for a later `wandb sync`, and send nothing.",
    )
    seconds: float = Field(default=120.0, gt=0, le=3600, description="Time limit of a handover.")

    @model_validator(mode="after")
    def _has_key(self) -> Self:
        if self.folder is None and self.api_key is None:
            raise ValueError("wandb: set api_key, or folder for a later synchronization")
        return self


class HandoverSettings(_Model):
    """Handover of checkpoints to experiment trackers."""

    public_url: str | None = Field(
        default=None, pattern=r"^https?://[!-~]+$", description="URL of the service, for links back."
    )
    urls: dict[str, str] = Field(
        default_factory=dict,
        description="URLs of roots as training sees them, by root; default: the `url` of the root.",
    )
    allow_private: tuple[str, ...] = Field(
        default=(), description="Private networks and hosts that are allowed, also without TLS."
    )
    mlflow: MlflowSettings | None = Field(default=None, description="MLflow tracking server.")
    wandb: WandbSettings | None = Field(default=None, description="W&B project.")
    when: tuple[Trigger, ...] = Field(default=(), description="Events with automatic handovers.")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.mlflow is not None:
            checked_url(self, "mlflow", self.mlflow.url)
        if self.wandb is not None and self.wandb.folder is None:
            checked_url(self, "wandb", self.wandb.base_url)
        for number, one in enumerate(self.when):
            missing = [target for target in one.targets if target not in self.targets]
            if "targets" in one.model_fields_set and missing:
                raise ValueError(f"when[{number}]: features.handover.{missing[0]} is not configured")
        return self

    @property
    def targets(self) -> tuple[Target, ...]:
        """Configured targets."""
        return tuple(one for one in TARGETS if getattr(self, one) is not None)

    @property
    def secrets(self) -> list[str]:
        """All credentials, which no message may show."""
        given = [
            *([self.mlflow.token, self.mlflow.password] if self.mlflow else []),
            *([self.wandb.api_key] if self.wandb else []),
        ]
        return [one.get_secret_value() for one in given if one is not None and one.get_secret_value()]

    def clean(self, text: str) -> str:
        """Return ``text`` without credentials in one line."""
        for secret in self.secrets:
            text = text.replace(secret, "***")
        return " ".join(clean_text(str(redact(text))).split())[:500]


def checked_url(options: HandoverSettings, target: Target, url: str) -> WebhookUrl:
    """Parse the URL of a destination. Raises ValueError for a refused URL."""
    try:
        return parse_url(url, Allowed.parse(options.allow_private))
    except RefusedUrlError as error:
        raise ValueError(f"{target}: {refusal(error)}") from error


def refusal(error: RefusedUrlError) -> str:
    """Explain a refused URL or address, with the setting that can allow access."""
    return f"its URL is refused: {str(error).replace(*_REFUSED_HINT)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFacts:
    """Facts of a checkpoint for a destination."""

    id: int
    root: str
    run_id: int
    run: str
    key: str
    name: str
    step: int | None
    format: str
    bytes: int
    state: str
    committed_at: str
    save_id: str | None
    fingerprint: str | None
    content_digest: str | None
    metrics: Mapping[str, float]
    aliases: tuple[str, ...]
    tags: tuple[str, ...]

    @property
    def identity(self) -> str:
        """Digest of the location and content; a replaced checkpoint has another digest."""
        text = "\n".join((self.root, self.key, self.save_id or self.fingerprint or ""))
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    @property
    def content(self) -> dict[str, Any]:
        """Facts that depend on the content only."""
        changing = ("metrics", "aliases", "tags", "state")
        return {name: value for name, value in asdict(self).items() if name not in changing}

    def pages(self, options: HandoverSettings) -> dict[str, str]:
        """Return the page addresses of the checkpoint and run, if the service has a public URL."""
        if options.public_url is None:
            return {}
        url = options.public_url.rstrip("/")
        return {"checkpoint": f"{url}/checkpoints/{self.id}", "run": f"{url}/runs/{self.run_id}"}


@dataclass(frozen=True, slots=True)
class HandedOver:
    """Result of a handover: ``version`` of the model or artifact ``name``; None before a synchronization."""

    name: str
    version: str | None
    link: str | None
    is_marked_deleted: bool = False


def model_name(template: str, facts: CheckpointFacts) -> str:
    """Make the name of the registered model or artifact; other characters than letters, digits, ``_``, ``.``
    and ``-`` become dots."""
    filled = template.replace("{root}", facts.root).replace("{run}", facts.run)
    cleaned = _UNSAFE.sub(".", filled).strip(".-_")
    if len(cleaned) > _MAX_NAME:
        cleaned = f"{cleaned[: _MAX_NAME - 9]}-{hashlib.sha256(filled.encode()).hexdigest()[:8]}"
    return cleaned or "checkpoints"


def reference_of(options: HandoverSettings, settings: Settings, root: str, key: str) -> str:
    """Return the URL of a checkpoint as seen by training. Raises PermanentJobError for a path of this
    machine."""
    if root not in settings.roots and root not in options.urls:
        raise PermanentJobError(f"root {root} is no longer configured")
    url = options.urls.get(root) or str(redact(settings.roots[root].url))
    if urlsplit(url).scheme in ("", "file"):
        path = Path(url.removeprefix("file://"))
        url = path.resolve().as_uri()
    return f"{url.rstrip('/')}/{key}"
