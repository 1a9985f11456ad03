"""Settings of people: the OpenID Connect provider, and roles of groups."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Final, Self, cast
from urllib.parse import urlsplit

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, model_validator

from dcp.server.core.feature import FeatureError
from dcp.server.core.security.accounts import ALL_ROOTS, GroupRole, RoleSettings
from dcp.server.records.people import Role

if TYPE_CHECKING:
    from dcp.server.core.settings import Settings

CALLBACK_PATH: Final = "/sign-in/callback"
_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})


def _parsed(value: Any) -> Any:
    """Parse the JSON of an environment variable."""
    return json.loads(value) if isinstance(value, str) and value[:1] in ("[", "{") else value


_Names = Annotated[tuple[str, ...], BeforeValidator(_parsed)]


class PeopleSettings(BaseModel):
    """Sign-in of people by an OpenID Connect provider, and roles by group and root."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    issuer: str | None = Field(
        default=None, description="URL of the OpenID Connect provider; default: no sign-in of people."
    )
    client_id: str = Field(default="", description="Client ID of the service at the provider.")
    client_secret: SecretStr | None = Field(default=None, description="Client secret at the provider.")
    provider_name: str = Field(
        default="single sign-on",
        min_length=1,
        max_length=64,
        description="Name of the provider on the sign-in page.",
    )
    redirect_url: str | None = Field(
        default=None, description="Callback registered at the provider; default: from the request."
    )
    scopes: _Names = Field(
        default=("openid", "profile", "email"), description="Scopes requested from the provider."
    )
    groups_claim: str = Field(
        default="groups", min_length=1, description="Claim with the groups, with dots between levels."
    )
    name_claim: str = Field(
        default="email",
        min_length=1,
        description="Claim with the name for the audit log. `email` must be verified by the provider.",
    )
    trust_email: bool = Field(
        default=False, description="Accept an `email` that the provider has not verified."
    )
    allowed_groups: _Names | None = Field(
        default=None, description="Groups whose members may sign in; default: all groups."
    )
    default_role: Role | None = Field(default=None, description="Role of every person in all roots.")
    roles: Annotated[dict[str, dict[str, Role]], BeforeValidator(_parsed)] = Field(
        default_factory=dict, description="Roles by group, then by root; `*` means all roots."
    )
    absence_seconds: float | None = Field(
        default=90 * 86_400.0,
        gt=0,
        description="Time without a sign-in after which the keys of a person stop working.",
    )
    provider_seconds: float = Field(
        default=10.0, gt=0, le=60, description="Time limit of a request to the provider."
    )

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.issuer is not None and not self.client_id:
            raise ValueError("issuer requires client_id, the id of this service at the provider")
        if self.issuer is not None and "openid" not in self.scopes:
            raise ValueError("scopes must include openid")
        for name in ("issuer", "redirect_url"):
            url = getattr(self, name)
            if url is not None and not is_safe_url(url):
                raise ValueError(
                    f"{name} must begin with https:// (http:// only on loopback), without a query"
                )
        if self.redirect_url is not None and urlsplit(self.redirect_url).path != CALLBACK_PATH:
            raise ValueError(f"redirect_url must end with {CALLBACK_PATH}")
        return self


def is_safe_url(url: str, *, with_query: bool = False) -> bool:
    """Return True if data sent to ``url`` is protected from eavesdropping: https, or loopback."""
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError:
        return False
    if not host or parts.username is not None or parts.fragment or (parts.query and not with_query):
        return False
    return parts.scheme == "https" or (parts.scheme == "http" and host in _LOOPBACK)


def provider_settings(settings: Settings) -> PeopleSettings | None:
    """Return the settings if a provider is configured."""
    from dcp.server.features.people import feature

    found = cast(PeopleSettings, feature.options(settings))
    return None if found.issuer is None else found


def role_settings(settings: Settings) -> RoleSettings:
    """Return the roles of the settings. Raises FeatureError for an unknown root."""
    from dcp.server.features.people import feature

    options = cast(PeopleSettings, feature.options(settings))
    if options.issuer is not None and settings.auth == "off":
        raise FeatureError(
            'settings features.people: issuer requires auth = "keys", otherwise every caller has all rights'
        )
    roles = [] if options.default_role is None else [GroupRole(None, options.default_role)]
    for group, by_root in options.roles.items():
        for root, role in by_root.items():
            if root != ALL_ROOTS and root not in settings.roots:
                raise FeatureError(
                    f"settings features.people.roles: group {group!r} has a role in the root {root!r}, "
                    "which is not configured"
                )
            roles.append(GroupRole(group, role, None if root == ALL_ROOTS else root))
    allowed = None if options.allowed_groups is None else frozenset(options.allowed_groups)
    return RoleSettings(tuple(roles), allowed, options.absence_seconds)
