"""What was asked of a store's service during one piece of work."""

from __future__ import annotations

from collections.abc import Mapping

from dcp.storage.stores.base import Store

__all__ = ["traffic_since"]

_EXTREME = "slowest_"


def traffic_since(store: Store, before: Mapping[str, float]) -> dict[str, float]:
    """`Store.traffic` less what it was ``before``; of extremes the present value. ``{}`` without any."""
    now = store.traffic()
    if now == before:
        return {}
    return {
        name: value if name.startswith(_EXTREME) else value - before.get(name, 0)
        for name, value in now.items()
    }
