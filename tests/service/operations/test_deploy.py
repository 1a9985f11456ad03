"""What `deploy/` offers fits. Internal: compared with the settings and metrics that are declared.

Moves to HTTP when the service is rebuilt.
"""

from __future__ import annotations

import configparser
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml  # type: ignore[import-untyped]
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from dcp.cli.app import app as command_line
from dcp.server.database.engine import Database
from dcp.server.database.migrations import upgrade
from dcp.server.settings import CONFIG_VARIABLE, Settings
from tests.service.operations.test_monitoring import fill
from tests.support.service import Service

DEPLOY = Path(__file__).parents[3] / "deploy"

# A metric with what is asked of its labels; functions and words of PromQL are no metrics of ours.
SELECTOR = re.compile(r"\b(dcp_[a-z0-9_]+)\s*(?:\{([^}]*(?:\{[^}]*\}[^}]*)*)\})?")
LABEL = re.compile(r"([a-z_]+)\s*(?:=~|!~|!=|=)\s*\"")
ADDED_BY_PROMETHEUS = {"instance", "job"}


@pytest.fixture(scope="module")
def metrics(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Names and labels, from the /metrics of a real server that has seen some of everything."""
    folder = tmp_path_factory.mktemp("deploy")
    url = f"sqlite:///{folder / 'catalog.sqlite'}"
    database = Database(url)
    upgrade(database)
    fill(database, time.time())
    database.close()
    settings = {"database_url": url, "embedded_worker": False}
    with (
        Service(folder / "service", settings) as service,
        httpx.Client(base_url=service.url, timeout=60) as client,
    ):
        client.get("/api/v1/roots").raise_for_status()
        text = client.get("/metrics").raise_for_status().text
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def check(expression: str, metrics: dict[str, set[str]]) -> int:
    """Every metric is there, and has the labels that it is selected by; how many there were."""
    selectors = SELECTOR.findall(expression)
    for name, matchers in selectors:
        assert name in metrics, f"{name} is not in /metrics"
        assert set(LABEL.findall(matchers)) <= metrics[name] | ADDED_BY_PROMETHEUS, expression
    labels = {label for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(", ")}
    known = set().union(ADDED_BY_PROMETHEUS, *(metrics[name] for name, _ in selectors))
    assert labels <= known, expression
    return len(selectors)


def expressions(node: Any) -> Iterator[str]:
    """Of a dashboard, wherever they stand."""
    if isinstance(node, dict):
        if isinstance(node.get("expr"), str):
            yield node["expr"]
        if isinstance(node.get("query"), dict):
            yield node["query"]["query"]
        for item in node.values():
            yield from expressions(item)
    elif isinstance(node, list):
        for item in node:
            yield from expressions(item)


def test_every_metric_of_the_dashboard_is_there(metrics: dict[str, set[str]]) -> None:
    """By name and label; panels have numbers of their own and do not overlap."""
    dashboard = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    found = list(expressions(dashboard))
    assert len(found) >= 30
    assert sum(check(expression, metrics) for expression in found) >= len(found)
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert all(0 <= x < 24 for x, _ in cells)


def test_every_metric_of_the_alerts_is_there(metrics: dict[str, set[str]]) -> None:
    """By name and label; each alert has a severity and says what is the matter."""
    (group,) = yaml.safe_load((DEPLOY / "prometheus-rules.yml").read_text())["groups"]
    names = [rule["alert"] for rule in group["rules"]]
    assert len(names) == len(set(names)) >= 12
    for rule in group["rules"]:
        assert check(rule["expr"], metrics) or rule["expr"].startswith("up{")
        assert rule["expr"].count("(") == rule["expr"].count(")")
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["annotations"]["summary"]


def test_every_metric_of_ours_is_watched(metrics: dict[str, set[str]]) -> None:
    """What nobody looks at would not need to be there."""
    text = (DEPLOY / "grafana-dashboard.json").read_text()
    ours = {re.sub(r"_(bucket|count|sum)$", "", name) for name in metrics if name.startswith("dcp_")}
    assert {name for name in ours if name not in text} == set()


def test_the_example_configuration_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the database's URL from the environment, where it says that secrets are."""
    monkeypatch.setenv(CONFIG_VARIABLE, str(DEPLOY / "dcp-server.toml"))
    monkeypatch.setenv("DCP_SERVER_DATABASE_URL", "postgresql://dcphub:secret@db.example.com/dcphub")
    settings = Settings()
    assert (settings.auth, settings.api_workers, settings.embedded_worker) == ("keys", 2, False)
    assert sorted(settings.roots) == ["archive", "lab", "prod"]
    assert settings.roots["archive"].readonly
    assert "secret" not in repr(settings)


@pytest.mark.parametrize("name", ["dcp-server.service", "dcp-worker.service"])
def test_the_units_start_commands_that_exist(name: str) -> None:
    """The command and its option are the command line's; there is time for requests that are under way."""
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOY / name)
    _, command, option, path = unit["Service"]["ExecStart"].split()
    shown = CliRunner().invoke(command_line, [command, "--help"])
    assert shown.exit_code == 0
    assert option in shown.output
    assert path.endswith("/dcp-server.toml")
    assert float(unit["Service"]["TimeoutStopSec"]) > 2 * Settings().shutdown_seconds
