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
    """Provider at ``issuer``, and roles by group and root.

    ``redirect_url``: callback registered at the provider; default: from the request. ``groups_claim``: claim
    with the groups, dots between levels. ``name_claim``: claim with the name for the audit log; ``email``
    counts only if verified by the provider, or with ``trust_email``. ``allowed_groups``: groups that may sign
    in. ``default_role``: role of every person in all roots. ``roles``: by group, then by root, ``*`` for all.
    ``absence_seconds``: keys of people without a sign-in for this time stop working.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    issuer: str | None = None
    client_id: str = ""
    client_secret: SecretStr | None = None
    provider_name: str = Field(default="single sign-on", min_length=1, max_length=64)
    redirect_url: str | None = None
    scopes: _Names = ("openid", "profile", "email")
    groups_claim: str = Field(default="groups", min_length=1)
    name_claim: str = Field(default="email", min_length=1)
    trust_email: bool = False
    allowed_groups: _Names | None = None
    default_role: Role | None = None
    roles: Annotated[dict[str, dict[str, Role]], BeforeValidator(_parsed)] = Field(default_factory=dict)
    absence_seconds: float | None = Field(default=90 * 86_400.0, gt=0)
    provider_seconds: float = Field(default=10.0, gt=0, le=60)

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.issuer is not None and not self.client_id:
            raise ValueError("issuer needs client_id, as the provider has registered this service")
        if self.issuer is not None and "openid" not in self.scopes:
            raise ValueError("scopes must have openid")
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
            'settings features.people: issuer needs auth = "keys", otherwise every caller has all rights'
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
