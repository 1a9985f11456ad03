"""Pages of docs/ and files of deploy/ match the service. Internal: pages are compared with the settings."""

from __future__ import annotations

import base64
import configparser
import hashlib
import hmac
import json
import re
import shlex
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from prometheus_client.parser import text_string_to_metric_families

from dcp.server.core.settings import CONFIG_VARIABLE, RootSettings, Settings
from tests.service.operations.test_monitoring import fill
from tests.support.app import running_app
from tests.support.catalog import API, Catalog
from tests.support.command import run
from tests.support.hook_bench import MAX_ATTEMPTS, RETRY_SECONDS
from tests.support.openapi import breaks, document, promised
from tests.support.service import Service
from tools.reference.metrics import families
from tools.reference.rest import rest

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
OPERATIONS = (ROOT / "docs/how-to/run-the-service.md").read_text()
API_PAGE = (ROOT / "docs/reference/rest-conventions.md").read_text()
CONTAINERFILE = (DEPLOY / "Containerfile").read_text().replace("\\\n", " ")
BUILT = ("api", "worker")


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Catalog]:
    """Start a catalog with some of everything."""
    folder = tmp_path_factory.mktemp("documented")
    with running_app(f"sqlite:///{folder / 'catalog.sqlite'}", folder) as app:
        made = Catalog(app, folder)
        fill(made)
        yield made


@pytest.fixture(scope="module")
def metrics(catalog: Catalog) -> dict[str, set[str]]:
    """Return the labels of each metric, by the name of the family and by the names of its samples."""
    catalog.http.get("/metrics")
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(catalog.http.get("/metrics").text):
        found.setdefault(f"{family.name}{'_total' * (family.type == 'counter')}", set())
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return {name: labels for name, labels in found.items() if name.startswith(("dcp_", "up"))}


def names(text: str) -> list[str]:
    """Return all names in the first column of tables."""
    cells = re.findall(r"^\| (`[^|]*) \|", text, re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def check_command(line: str) -> None:
    """Check that the command and its options exist."""
    words = shlex.split(line)
    commands = [word for word in words[:2] if re.fullmatch("[a-z]+", word)]
    commands = commands[:1] if commands[0] in ("serve", "worker") else commands
    shown = run(*commands, "--help")
    assert shown.status == 0, line
    assert all(word in shown.out for word in words if word.startswith("--")), line


# -- The REST conventions ---------------------------------------------------------------------------------


def section(heading: str) -> str:
    """Return the text below a heading."""
    return re.split(r"^## ", API_PAGE.split(f"\n## {heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


def test_every_route_outside_of_the_api_is_documented(catalog: Catalog) -> None:
    """Each path of the page exists; paths below /api/v1 are generated."""
    for place in names(section("Outside of `/api/v1`")):
        assert catalog.app.client().get(place.removeprefix("GET ")).status_code in (200, 401), place


def test_openapi_keeps_all_promised_parts() -> None:
    """OpenAPI keeps all promised parts, and requests have no new requirement."""
    assert breaks(promised(), document()) == []


def test_openapi_shows_public_routes() -> None:
    """A public route has no security in OpenAPI, also if a page with a key has the same path."""
    paths = document()["paths"]
    assert all("security" not in paths[path]["get"] for path in ("/", "/healthz"))
    assert "security" in paths["/api/v1/whoami"]["get"]


_TARGET = {"to": "dcp", "target_key": "x"}
_ONE = {"checkpoint_id": 1}
PARAMS: dict[str, dict[str, Any]] = {
    "convert": {**_ONE, **_TARGET},
    "merge": {"sources": [1, 2], **_TARGET},
    **dict.fromkeys(("verify", "digest", "stats", "purge"), _ONE),
    "diff": {"a": 1, "b": 2},
    "shapes": {**_ONE, "config": {}},
    "drift": {"run_id": 1},
    "delete": {"checkpoint_ids": [1]},
    "prune": {**_ONE, "parts": ["optimizer"]},
    "handover": {**_ONE, "target": "mlflow"},
    "scan": {"root": "main"},
    "retention": {"policy_id": 1},
}
"""Required parameters of each kind of job."""


def test_kinds_of_jobs_are_generated_with_their_scopes(catalog: Catalog) -> None:
    """Each kind of job is in the table, with the scope that the API requires."""
    jobs = dict(re.findall(r"^\| `([a-z]+)` \| `([a-z]+)` \| \[", rest(), re.MULTILINE))
    assert jobs.keys() == PARAMS.keys()
    reader = catalog.app.client("read", name="documented")
    for kind, scope in jobs.items():
        refused = reader.post(f"{API}/jobs", json={"kind": kind, "params": PARAMS[kind]})
        assert (refused.json()["scope"] if refused.status_code == 403 else "read") == scope, kind


def test_scopes_and_events_are_documented() -> None:
    """The tables of the page list all scopes and events."""
    schemas = document()["components"]["schemas"]
    scopes = schemas["NewKey"]["properties"]["scopes"]["items"]["enum"]
    assert {name for name in names(section("Authentication")) if name.isalpha()} == {*scopes}
    groups = ("checkpoint", "note", "stage")
    events = [name for name in names(section("Webhooks")) if name.partition(".")[0] in groups]
    assert sorted(events) == sorted(schemas["WebhookRequest"]["properties"]["events"]["items"]["enum"])


def test_the_example_verifies_signatures() -> None:
    """The example accepts signatures of Standard Webhooks and refuses wrong, changed and old signatures. The
    documented pauses are those of the service."""
    block = re.findall(r"^```python\n(.*?)^```", section("Webhooks"), re.MULTILINE | re.DOTALL)[0]
    scope: dict[str, Any] = {}
    exec(compile(block, "api.md", "exec"), scope)
    body, secret = b'{"type": "checkpoint.committed"}', f"whsec_{base64.b64encode(b'k' * 24).decode()}"

    def headers(seconds: float) -> dict[str, str]:
        signed = f"evt_5.{int(seconds)}.".encode() + body
        mark = base64.b64encode(hmac.digest(b"k" * 24, signed, hashlib.sha256)).decode()
        return {
            "webhook-id": "evt_5",
            "webhook-timestamp": str(int(seconds)),
            "webhook-signature": f"v1,{'A' * 43}= v1,{mark}",
        }

    now = headers(time.time())
    assert scope["verify"](secret, now, body) == "evt_5"
    for wrong, given, content in (
        (f"whsec_{base64.b64encode(b'x' * 24).decode()}", now, body),
        (secret, now, body + b" "),
        (secret, now | {"webhook-id": "evt_6"}, body),
        (secret, headers(time.time() - 301), body),
    ):
        with pytest.raises(ValueError):
            scope["verify"](wrong, given, content)
    assert RETRY_SECONDS == (10, 60, 300, 1800, 3600, 7200, 14_400, 28_800, 43_200) and MAX_ATTEMPTS == 10
    assert "after 10 s, 1 and 5 min, half an hour, 1, 2, 4, 8 and 12 hours" in API_PAGE.lower()
    assert "After ten attempts" in API_PAGE


# -- Settings and operation -------------------------------------------------------------------------------


def test_generated_metrics_are_those_of_a_filled_catalog(metrics: dict[str, set[str]]) -> None:
    """The table of metrics has the metrics of a filled catalog and no other, with all labels."""
    found = {name: {*labels} for name, (_, labels) in families().items()}
    suffixes = re.compile(r"_(bucket|count|sum|created)$")
    assert found.keys() == {suffixes.sub("", name) for name in metrics} - {"up"}
    for name, labels in metrics.items():
        assert labels - {"le"} <= found.get(suffixes.sub("", name), set()), name
    assert {*re.findall(r"\bdcp_[a-z_]+\b", OPERATIONS)} <= found.keys()


def test_every_setting_has_a_description() -> None:
    """Each setting has a description, also each setting of a root."""
    fields = {**Settings.model_fields, **RootSettings.model_fields}
    assert not [name for name, field in fields.items() if not field.description]


def test_the_examples_of_settings_are_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The TOML blocks and variables of the page and the file in deploy/ are valid configurations."""
    blocks = re.findall(r"^ *```toml\n(.*?)^ *```", OPERATIONS, re.MULTILINE | re.DOTALL)
    assert blocks
    for block in (*blocks, (DEPLOY / "dcp-server.toml").read_text()):
        path = tmp_path / "dcp-server.toml"
        path.write_text(re.sub(r"^ +", "", block, flags=re.MULTILINE))
        monkeypatch.setenv(CONFIG_VARIABLE, str(path))
        assert {*tomllib.loads(path.read_text())} == Settings().model_fields_set
    monkeypatch.setenv("DCP_SERVER_DATABASE_URL", "postgresql://dcphub:secret@db.example.com/dcphub")
    settings = Settings()
    assert (settings.auth, settings.api_workers, settings.embedded_worker) == ("keys", 2, False)
    assert settings.roots["archive"].readonly and "secret" not in repr(settings)
    monkeypatch.setenv(CONFIG_VARIABLE, str(tmp_path / "none.toml"))
    variables = re.findall(r"`(DCP_SERVER_[A-Z_]+)=([^`]*)`", OPERATIONS)
    assert len(variables) >= 3
    for name, value in variables:
        monkeypatch.setenv(name, shlex.split(value)[0])
    settings = Settings()
    assert settings.roots["runs"].url == "/data/runs"
    assert settings.allowed_hosts == ("checkpoints.example.com",)


def test_every_command_and_linked_file_exists() -> None:
    """Each `dcp` command on the page exists, and each link leads to a file."""
    lines = re.findall(r"^ *dcp (.*)$|`dcp ([a-z][^`]*)`", OPERATIONS, re.MULTILINE)
    assert len(lines) >= 8
    for block, inline in lines:
        check_command(block or inline)
    for folder, text in (("how-to", OPERATIONS), ("reference", API_PAGE)):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
            assert (ROOT / "docs" / folder / target).exists(), target


# -- deploy/ -------------------------------------------------------------------------------------------------

SELECTOR = re.compile(r"\b(dcp_[a-z0-9_]+)\s*(?:\{([^}]*(?:\{[^}]*\}[^}]*)*)\})?")
"""A metric with its label matchers; functions and words of PromQL do not begin with dcp."""
LABEL = re.compile(r"([a-z_]+)\s*(?:=~|!~|!=|=)\s*\"")
ADDED_BY_PROMETHEUS = {"instance", "job"}


def check(expression: str, metrics: dict[str, set[str]]) -> int:
    """Check that each metric of an expression exists and has its labels; return the number of metrics."""
    selectors = SELECTOR.findall(expression)
    for name, matchers in selectors:
        assert name in metrics, f"{name} is not in /metrics"
        assert {*LABEL.findall(matchers)} <= metrics[name] | ADDED_BY_PROMETHEUS, expression
    labels = {label for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(", ")}
    assert labels <= set().union(ADDED_BY_PROMETHEUS, *(metrics[name] for name, _ in selectors)), expression
    return len(selectors)


def test_dashboard_and_alerts_use_existing_metrics(metrics: dict[str, set[str]]) -> None:
    """Dashboard and alerts use existing metrics and labels; the dashboard shows each metric."""
    text = (DEPLOY / "grafana-dashboard.json").read_text()
    panels = json.loads(text)["panels"]
    found = [json.loads(f'"{quoted}"') for quoted in re.findall(r'"expr": "((?:[^"\\]|\\.)*)"', text)]
    assert len(found) >= 30 and all(check(expression, metrics) for expression in found)
    exported = {re.sub(r"_(bucket|count|sum)$", "", name) for name in metrics} - {"up"}
    assert not {name for name in exported if name not in text}
    places = [panel["gridPos"] for panel in panels]
    cells = [(p["x"] + x, p["y"] + y) for p in places for x in range(p["w"]) for y in range(p["h"])]
    assert len(cells) == len({*cells}) and all(0 <= x < 24 for x, _ in cells)
    (group,) = yaml.safe_load((DEPLOY / "prometheus-rules.yml").read_text())["groups"]
    assert len({rule["alert"] for rule in group["rules"]}) == len(group["rules"]) >= 12
    for rule in group["rules"]:
        assert check(rule["expr"], metrics) or rule["expr"].startswith("up{")
        assert (
            rule["labels"]["severity"] in ("critical", "warning", "info") and rule["annotations"]["summary"]
        )


@pytest.mark.parametrize("name", ["dcp-server.service", "dcp-worker.service"])
def test_the_units_start_commands_that_exist(name: str) -> None:
    """The commands of the units exist, and the stop timeout leaves time for running requests."""
    unit = configparser.RawConfigParser(interpolation=None)
    unit.read(DEPLOY / name)
    _, command, option, path = unit["Service"]["execstart"].split()
    check_command(f"{command} {option}")
    assert path.endswith("/dcp-server.toml")
    assert float(unit["Service"]["timeoutstopsec"]) > 2 * Settings().shutdown_seconds


OPERATOR = {
    "DATABASE_PASSWORD": "0123456789abcdef",
    "WEBHOOK_KEY": "k" * 44,
    "CHECKPOINTS": "/data/runs",
    "RUN_AS": "1000:1000",
    "HOST_NAME": "checkpoints.example.com",
}
"""Values for the variables that the first lines of the compose file describe."""


def services() -> dict[str, Any]:
    """Return the services of the compose file, with these values."""
    text = (DEPLOY / "compose.yaml").read_text()
    for name in re.findall(r"\$\{(\w+)", text):
        assert f"#   {name}=" in text, name
    filled = re.sub(r"\$\{(\w+)[^}]*\}", lambda match: OPERATOR[match[1]], text)
    return dict(yaml.safe_load(filled)["services"])


def instructions(name: str) -> list[str]:
    """Return the arguments of an instruction of the Containerfile, in order."""
    return re.findall(rf"^ *{name} +(.*)$", CONTAINERFILE, flags=re.MULTILINE)


def environment(service: str) -> dict[str, str]:
    """Return the environment of the image, overlaid with the environment of the service."""
    image = dict(word.split("=", 1) for line in instructions("ENV") for word in shlex.split(line))
    own: dict[str, str] = services()[service]["environment"]
    return image | own


def test_services_are_isolated_and_copied_files_exist() -> None:
    """The database has a network of its own; each file that the build copies exists and is not ignored."""
    found = services()
    assert (instructions("USER"), instructions("ENTRYPOINT")) == (["10001:10001"], ['["dcp"]'])
    for line in re.findall(r"^docker compose run --rm worker (.*)$", OPERATIONS, flags=re.MULTILINE):
        check_command(line)
    check_command(shlex.join(json.loads(instructions("CMD")[-1])))
    assert found["database"]["networks"] == ["database"] and "ports" not in found["database"]
    assert all(port.startswith("127.0.0.1:") for port in found["api"]["ports"])
    # Compose copies secrets from variables, and refuses to do so in a read-only container
    assert not any("secrets" in service for service in found.values() if service.get("read_only"))
    database = found["database"]["environment"]
    user, password = database["POSTGRES_USER"], database["POSTGRES_PASSWORD"]
    url = environment("api")["DCP_SERVER_DATABASE_URL"]
    assert url == f"postgresql://{user}:{password}@database/{user}"
    copied = {word for line in instructions("COPY") if "--from" not in line for word in line.split()[:-1]}
    assert copied >= {"dcp", "planners", "server", "src", "storage", "LICENSE", "README.md", "pyproject.toml"}
    assert all((ROOT / name).exists() for name in copied)
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert copied == {line[1:] for line in lines if line.startswith("!")}
    assert {found[service]["image"] for service in BUILT} == {f"dcphub-server:{version('dcphub')}"}
    assert {*re.findall(r"dcphub-server:([\w.]+)", CONTAINERFILE)} == {version("dcphub")}
    assert all(re.search(r":\S*\d+\.\d+", line) or "PYTHON" in line for line in instructions("FROM"))


def test_the_health_check_of_the_image(tmp_path: Path) -> None:
    """The health check of the image succeeds with the settings of compose, and fails without a service."""
    python, *arguments = json.loads(instructions("HEALTHCHECK")[0].split("CMD ", 1)[1])
    assert python == "python" and str(Settings().port) in arguments[-1]
    (tmp_path / "runs").mkdir()
    own = {
        "DCP_SERVER_HOST": "127.0.0.1",
        "DCP_SERVER_DATABASE_URL": f"sqlite:///{tmp_path / 'catalog.sqlite'}",
        "DCP_SERVER_ROOTS__RUNS__URL": str(tmp_path / "runs"),
        "DCP_SERVER_WORK_FOLDER": str(tmp_path),
    }
    taken = {name: value for name, value in environment("api").items() if name.startswith("DCP_SERVER_")}
    with Service(tmp_path / "service", environment=taken | own) as service:
        port = service.url.rpartition(":")[2]
        command = [sys.executable, *arguments[:-1], arguments[-1].replace(str(Settings().port), port)]
        assert subprocess.run(command, capture_output=True).returncode == 0
    assert subprocess.run(command, capture_output=True).returncode == 1
