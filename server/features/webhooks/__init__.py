"""Webhooks: events posted to a URL, signed, and repeated until they are delivered."""

from __future__ import annotations

from typing import Final

from dcp.server.core.feature import Feature

__all__ = ["feature"]

feature: Final = Feature("webhooks", __name__, web=["webhook_routes"], work=["deliveries", "sending"])
