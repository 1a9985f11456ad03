"""Administration by both clients against the real application: keys, rules, retention."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from dcp.server.client import Client, PreconditionFailedError, ProblemError, TransportError
from tests.service.client.conftest import MakeClient
from tests.support.app import App, running_app
from tests.support.catalog_rows import add_checkpoint


@pytest.fixture
def app(tmp_path: Path) -> Iterator[App]:
    """Start the application with the roots "main" and "other"."""
    with running_app(f"sqlite:///{tmp_path / 'catalog.sqlite'}", tmp_path) as running:
        yield running


def test_keys(connect: MakeClient) -> None:
    """A key is created, works within its scopes, is listed without its secret, and ends when revoked."""
    admin = connect("admin")
    made = admin.create_key("trainers", scopes=["read", "write"], roots=["main"], expires_in_seconds=3600)
    assert (made.scopes, made.roots) == (("read", "write"), ("main",))
    assert made.prefix in made.key and made.key not in repr(made)
    assert made.expires_at is not None and made.expires_at.tzinfo is not None
    user = connect(key=made.key)
    assert [root.name for root in user.roots()] == ["main"]
    listed = admin.keys()
    assert made.id in [key.id for key in listed]
    assert admin.key(made.id).revoked_at is None
    assert admin.revoke_key(made.id).revoked_at == admin.revoke_key(made.id).revoked_at is not None
    with pytest.raises(ProblemError):
        user.roots()


def test_rules(connect: MakeClient) -> None:
    """A rule is created, returned as given, changed, listed and deleted."""
    admin = connect("admin")
    convert = {"kind": "convert", "to": "safetensors", "target_root": "other", "target_key": "{run}/{name}"}
    made = admin.create_rule(
        "export", [{"kind": "verify"}, convert], condition={"root": "main", "formats": ("dcp",)}
    )
    assert (made.event, made.is_enabled) == ("checkpoint.committed", True)
    assert made.condition == {"root": "main", "formats": ["dcp"]}
    assert made.actions == ({"kind": "verify"}, convert)
    changed = admin.change_rule(made.id, etag=made.etag, event="checkpoint.tagged", actions=[convert])
    assert (changed.event, changed.actions, changed.name) == ("checkpoint.tagged", (convert,), "export")
    with pytest.raises(PreconditionFailedError):
        admin.change_rule(made.id, etag=made.etag, is_enabled=False)
    assert admin.rules().all() == [admin.rule(made.id)] == [changed]
    admin.delete_rule(made.id, etag=changed.etag)
    assert admin.rules().first() is None


def test_retention(connect: MakeClient, app: App) -> None:
    """A retention policy is previewed before and after creation, changed, run and deleted."""
    for run in ("one", "two"):
        for step in (1, 2, 3):
            add_checkpoint(app.service.database, f"{run}/step-{step}")
    client = connect("delete", "read")
    keep = {"last": 2}
    preview = client.preview_retention("main", keep, run_glob="*", page_size=1).all()
    assert [(run.run, run.kept, run.deleted) for run in preview] == [("one", 2, 1), ("two", 2, 1)]
    assert [(each.step, bool(each.reasons)) for each in preview[0].checkpoints][:1] == [(1, False)]
    made = client.create_retention_policy("tidy", "main", keep, run_glob="one", grace_seconds=60)
    assert (made.keep, made.run_glob, made.grace_seconds) == (keep, "one", 60.0)
    assert client.preview_retention_policy(made.id).all() == preview[:1]
    changed = client.change_retention_policy(made.id, etag=made.etag, keep={"last": 3}, is_enabled=False)
    assert (changed.keep, changed.is_enabled, changed.grace_seconds) == ({"last": 3}, False, 60.0)
    with pytest.raises(PreconditionFailedError):
        client.delete_retention_policy(made.id, etag=made.etag)
    assert client.retention_policies(page_size=1).all() == [client.retention_policy(made.id)] == [changed]
    dry, real = (client.run_retention_policy(made.id, dry_run=is_dry) for is_dry in (True, False))
    assert [job.params for job in (dry, real)] == [
        {"policy_id": made.id, "dry_run": True},
        {"policy_id": made.id, "dry_run": False},
    ]
    client.delete_retention_policy(made.id, etag=changed.etag)
    assert client.retention_policies().first() is None
    assert len(client.checkpoints().all()) == 6


@pytest.mark.parametrize("lost", [502, None], ids=["a proxy's 502", "no answer"])
def test_posts_that_return_a_secret_are_not_repeated(lost: int | None) -> None:
    """A POST whose response has a secret is not repeated, because a repetition makes a second secret."""
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        if lost is None:
            raise httpx.ReadTimeout("lost", request=request)
        return httpx.Response(lost)

    with Client("http://localhost", transport=httpx.MockTransport(answer)) as client:
        with pytest.raises(TransportError if lost is None else ProblemError):
            client.create_key("one")
        with pytest.raises(TransportError if lost is None else ProblemError):
            client.rotate_webhook_secret(1)
    assert [request.method for request in seen] == ["POST", "POST"]
