"""Metrics of the database: catalog, roots, jobs, verifications and webhooks, and access to the metrics."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.app import running_app
from tests.support.catalog import API, Catalog

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]
HOOK = {"url": "https://93.184.215.14/hook", "events": ["checkpoint.committed"]}


def read(catalog: Catalog) -> Samples:
    """Return the current samples by name and labels; the parser of Prometheus refuses malformed text."""
    families = text_string_to_metric_families(catalog.http.get("/metrics").text)
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def value(found: Samples, name: str, **labels: str) -> float:
    """Return the value of a sample."""
    return found[name, tuple(sorted(labels.items()))]


def fill(catalog: Catalog) -> None:
    """Fill a catalog with some of everything that metrics count."""
    for key in ("a/step-1", "a/step-2", "a/step-3", "b/step-1"):
        catalog.add(key)
    broken = catalog.save("a/step-9")
    broken.write_bytes(b"damaged")
    shutil.rmtree(catalog.place("a/step-2"))
    catalog.scan()
    catalog.do("verify", checkpoint_id=1)  # without data: damaged
    catalog.http.post(f"{API}/rules", json={"name": "r", "actions": [{"kind": "verify"}]})
    hooks = [catalog.http.post(f"{API}/webhooks", json=HOOK).json()["id"] for _ in "ab"]
    catalog.http.post(f"{API}/webhooks/{hooks[0]}/test")
    catalog.http.patch(f"{API}/webhooks/{hooks[1]}", json={"is_enabled": False})
    catalog.regular_work()
    shutil.rmtree(catalog.place("", "other"))
    catalog.do("scan", root="other")
    catalog.do("scan", root="main", below="nothing")
    for below in ("x", "y"):
        catalog.http.post(f"{API}/jobs", json={"kind": "scan", "params": {"root": "main", "below": below}})


@pytest.mark.each_database
def test_metrics_show_the_state_of_the_database(catalog: Catalog) -> None:
    """Metrics show the state of the database, and are cached for a few seconds."""
    fill(catalog)
    found = read(catalog)
    expected = {
        ("dcp_database_up",): 1,
        ("dcp_catalog_checkpoints", "state", "committed"): 3,
        ("dcp_catalog_checkpoints", "state", "vanished"): 1,
        ("dcp_catalog_checkpoints", "state", "unreadable"): 1,
        ("dcp_catalog_checkpoints", "state", "deleted"): 0,
        ("dcp_catalog_runs",): 2,
        ("dcp_root_checkpoints", "root", "main"): 3,
        ("dcp_root_bytes", "root", "main"): 3 * 192,
        ("dcp_root_newest_timestamp_seconds", "root", "main"): 1_700_000_000,
        ("dcp_root_scan_failed", "root", "main"): 0,
        ("dcp_root_scan_failed", "root", "other"): 1,
        ("dcp_jobs", "kind", "scan", "state", "queued"): 2,
        ("dcp_jobs_recent", "kind", "verify", "state", "succeeded"): 1,
        ("dcp_verifications_recent", "outcome", "damaged"): 1,
        ("dcp_verifications_recent", "outcome", "good"): 0,
        ("dcp_webhooks", "state", "enabled"): 1,
        ("dcp_webhooks", "state", "disabled"): 1,
        ("dcp_webhook_deliveries", "state", "waiting"): 1,
        ("dcp_webhook_deliveries", "state", "failed"): 0,
        ("dcp_tasks", "state", "queued"): 0,
    }
    for (name, *labels), number in expected.items():
        assert value(found, name, **dict(zip(labels[::2], labels[1::2], strict=True))) == number, (
            name,
            labels,
        )
    assert value(found, "dcp_root_scanned_timestamp_seconds", root="main") > 1_700_000_000
    for name, least in (("dcp_database_bytes", 100_000), ("dcp_api_resident_bytes", 10 << 20)):
        assert least <= value(found, name) < 1 << 40, name
    for name in ("dcp_jobs_oldest_queued_seconds", "dcp_webhook_oldest_waiting_seconds"):
        assert 0 <= value(found, name) < 1000, name
    assert any(name == "dcp_events_behind" for name, _ in found)
    catalog.add("c/step-1")
    again = read(catalog)
    is_kept = value(again, "dcp_database_state_seconds") == value(found, "dcp_database_state_seconds")
    assert value(again, "dcp_catalog_runs") == (2 if is_kept else 3)  # read again after five seconds


def test_metrics_need_a_key_for_all_roots_by_default(tmp_path: Path) -> None:
    """Metrics name roots and routes: without a key 401, with a key for some roots 403, unless opened."""
    url = f"sqlite:///{tmp_path / 'catalog.sqlite'}"
    with running_app(url, tmp_path) as app:
        assert app.client().get("/metrics").status_code == 401
        assert app.client("read", roots=["main"]).get("/metrics").status_code == 403
        answer = app.client("read").get("/metrics")
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert answer.headers["cache-control"] == "no-store"
    with running_app(url, tmp_path, metrics_need_key=False) as app:
        assert app.client().get("/metrics").status_code == 200
