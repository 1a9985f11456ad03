"""People: sign-in by OpenID Connect, service accounts, and roles by root.

`settings` declares settings, `provider` calls the provider, `sign_in` has the two routes of the authorization
code flow, `accounts` the resources, `web` their API, and `pages` their pages.
"""

from __future__ import annotations

from typing import Final

from dcp.server.core.feature import Feature
from dcp.server.features.people import flows
from dcp.server.features.people.settings import PeopleSettings, role_settings

__all__ = ["feature"]

feature: Final = Feature(
    "people",
    __name__,
    web=["web", "pages", "sign_in"],
    settings=PeopleSettings,
    roles=role_settings,
)
feature.schedule("sign-ins", 600.0)(flows.forget_old)
