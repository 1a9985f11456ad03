"""A catalog on both databases."""

from __future__ import annotations

from tests.support.catalog import catalog

__all__ = ["catalog"]
