"""Reference of the metrics, from the collectors of a service with an empty catalog."""

from __future__ import annotations

import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any

from prometheus_client.core import Metric
from pydantic import SecretStr

from dcp.server.app import create_app
from dcp.server.core.http.metrics import _RootCollector
from dcp.server.core.settings import RootSettings, Settings
from dcp.server.database.migrations import upgrade
from tools.reference.markdown import code, paragraphs, table

__all__ = ["families", "metrics"]

HEAD = """\
# Metrics

`GET /metrics` answers these in the text format of Prometheus.
[Monitoring](../../how-to/run-the-service.md#monitoring) describes the scrape, the alerts and the dashboard.
"""


def metrics() -> str:
    """Return the page: name, type, labels and description of each metric."""
    rows = [
        (code(name), family.type, ", ".join(map(code, labels)), paragraphs(family.documentation))
        for name, (family, labels) in sorted(families().items())
    ]
    return "\n".join([HEAD, table(["metric", "type", "labels", "description"], rows)])


def families() -> dict[str, tuple[Metric, tuple[str, ...]]]:
    """Return the metrics of a service, with their labels, by the names that samples of Prometheus have."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "root").mkdir()
        url = SecretStr(f"sqlite:///{folder}/catalog.sqlite")
        app = create_app(Settings(database_url=url, roots={"root": RootSettings(url=f"{folder}/root")}))
        database = app.state.service.database
        try:
            upgrade(database)
            return _families(app)
        finally:
            database.close()


def _families(app: Any) -> dict[str, tuple[Metric, tuple[str, ...]]]:
    monitoring = app.state.monitoring
    found = {}
    for one in fields(monitoring.instruments):
        instrument = getattr(monitoring.instruments, one.name)
        if one.name != "registry":
            (family,) = instrument.collect()
            name = f"{family.name}{'_total' * (family.type == 'counter')}"
            found[name] = (family, tuple(instrument._labelnames))
    collectors = (monitoring._state, monitoring._processes, _RootCollector({"root": True}))
    for family in [family for collector in collectors for family in collector.collect()]:
        found[family.name] = (family, tuple(getattr(family, "_labelnames", ())))
    return found
