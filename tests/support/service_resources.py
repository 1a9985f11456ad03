"""Resources of the HTTP API, each declared once, for the tests of their common contract."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["RESOURCES", "Resource"]


@dataclass(frozen=True)
class Resource:
    """A resource. ``body`` creates a resource called ``named``; each of ``wrong`` replaces members and is
    refused.

    ``scope`` is required for creation and changes, ``read_scope`` for reading. Keys of roots other than
    ``root`` cannot see the resource.
    """

    path: str
    body: dict[str, Any]
    scope: str
    read_scope: str
    change: dict[str, Any] | None = None
    named: str | None = "name"
    root: str | None = None
    is_paged: bool = True
    has_secret: bool = False
    wrong: tuple[dict[str, Any], ...] = field(default=())


_CONVERT: dict[str, Any] = {
    "kind": "convert",
    "to": "safetensors",
    "target_root": "other",
    "target_key": "{run}/{name}.safetensors",
    "dtype": "bfloat16",
    "only": ["model.*"],
}

RESOURCES: dict[str, Resource] = {
    "rule": Resource(
        path="/rules",
        body={
            "name": "export",
            "condition": {"root": "main", "run": "llama/*", "tag": "release", "every_steps": 1000},
            "actions": [{"kind": "verify"}, _CONVERT],
        },
        scope="admin",
        read_scope="admin",
        change={"is_enabled": False},
        wrong=(
            {"actions": []},
            {"actions": [{"kind": "purge"}]},
            {"actions": [{"kind": "verify", "checkpoint_id": 1}]},
            *(
                {"actions": [_CONVERT | one]}
                for one in ({"target_key": "{secret}.safetensors"}, {"to": "numpy"})
            ),
            *({"actions": [_CONVERT | one]} for one in ({"target_root": "nowhere"}, {"dtype": "int8"})),
            {"actions": [_CONVERT | {"target_key": "{name.__class__}.safetensors"}]},
            {"condition": {"root": "nowhere"}},
            {"condition": {"run": "*" * 300}},
            {"condition": {"every_steps": 0}},
            {"condition": {"every_steps": "5"}},
            {"event": "checkpoint.deleted"},
            {"name": ""},
        ),
    ),
    "policy": Resource(
        path="/retention/policies",
        body={
            "name": "tidy",
            "root": "main",
            "run_glob": "run*",
            "keep": {"last": 2, "best": [{"metric": "loss", "count": 1, "mode": "min"}]},
        },
        scope="delete",
        read_scope="read",
        change={"keep": {"last": 5}, "grace_seconds": 1.5},
        root="main",
        wrong=(
            {"keep": {}},
            {"keep": {"last": 0}},
            {"keep": {"last": "2"}},
            {"keep": {"best": [{"metric": "loss", "mode": "middle"}]}},
            {"keep": {"last": 1, "forever": True}},
            {"run_glob": ""},
            {"run_glob": "[b-a]"},
            {"interval_seconds": 1},
            {"grace_seconds": -1},
            {"root": "NOT A ROOT"},
        ),
    ),
    "webhook": Resource(
        path="/webhooks",
        body={"url": "https://93.184.215.14/hook", "events": ["checkpoint.committed"], "roots": ["main"]},
        scope="admin",
        read_scope="admin",
        change={"is_enabled": False},
        root="main",
        named=None,
        has_secret=True,
        wrong=(
            *({"url": url} for url in ("http://127.0.0.1/", "http://1.1.1.1/", "https://2130706433/", "")),
            *({"events": ["nothing"]}, {"events": []}, {"roots": ["nowhere"]}, {"secret": "short"}),
            {"description": "a\u0000b"},
        ),
    ),
    "key": Resource(
        path="/keys",
        body={"name": "ci", "scopes": ["read"], "roots": ["main"]},
        scope="admin",
        read_scope="admin",
        is_paged=False,
        has_secret=True,
        wrong=(
            {"name": "a b"},
            {"scopes": ["everything"]},
            {"scopes": ["read", "read"]},
            {"roots": ["nowhere"]},
            {"roots": ["main", "main"]},
            {"expires_in_seconds": -1},
            {"more": 1},
        ),
    ),
}
