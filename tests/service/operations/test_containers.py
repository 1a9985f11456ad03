"""What `deploy/` has for containers fits. Internal: compared with the settings that are declared.

Moves to HTTP when the service is rebuilt.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from typer.testing import CliRunner

from dcp.cli.app import app as command_line
from dcp.server.settings import Settings
from dcp.version import __version__
from tests.support.service import Service

ROOT = Path(__file__).parents[3]
CONTAINERFILE = (ROOT / "deploy/Containerfile").read_text().replace("\\\n", " ")
OURS = ("api", "worker")
OPERATOR = {
    "DATABASE_PASSWORD": "0123456789abcdef",
    "WEBHOOK_KEY": "k" * 44,
    "CHECKPOINTS": "/data/runs",
    "RUN_AS": "1000:1000",
    "HOST_NAME": "checkpoints.example.com",
}
"""What the first lines of the compose file tell to set."""


def services() -> dict[str, Any]:
    """Of the compose file, with the values of the operator."""
    text = (ROOT / "deploy/compose.yaml").read_text()
    for name in re.findall(r"\$\{(\w+)", text):
        assert f"#   {name}=" in text, name
    filled = re.sub(r"\$\{(\w+)[^}]*\}", lambda match: OPERATOR[match[1]], text)
    found = yaml.safe_load(filled)["services"]
    assert isinstance(found, dict)
    return found


def instructions(name: str) -> list[str]:
    """What follows that word, by its place in the file."""
    return re.findall(rf"^ *{name} +(.*)$", CONTAINERFILE, flags=re.MULTILINE)


def environment(service: str) -> dict[str, str]:
    """Of the image, and of the service on top."""
    image = dict(word.split("=", 1) for line in instructions("ENV") for word in shlex.split(line))
    own: dict[str, str] = services()[service]["environment"]
    return image | own


def assert_command(words: list[str]) -> None:
    """The command line has it, with these options."""
    parts = [word for word in words[:2] if re.fullmatch("[a-z]+", word)]
    shown = CliRunner().invoke(command_line, [*parts, "--help"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0, words
    assert all(word in shown.output for word in words if word.startswith("--"))


@pytest.mark.parametrize("service", OURS)
def test_settings_of_the_containers_are_taken(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names and values are those of `Settings`; nobody is let in without a key, no secret is shown."""
    for name, value in environment(service).items():
        monkeypatch.setenv(name, value)
    settings = Settings()
    given = {name for name in environment(service) if name.startswith("DCP_SERVER_")}
    roots = {name for name in given if name.startswith("DCP_SERVER_ROOTS__")}
    assert {f"DCP_SERVER_{field.upper()}" for field in settings.model_fields_set - {"roots"}} == given - roots
    assert (settings.host, settings.auth, settings.embedded_worker) == ("0.0.0.0", "keys", False)
    assert settings.allowed_hosts == ("checkpoints.example.com", "localhost", "127.0.0.1")
    assert OPERATOR["DATABASE_PASSWORD"] not in repr(settings)
    folders = {volume["target"] for volume in services()[service]["volumes"] if isinstance(volume, dict)}
    assert {root.url for root in settings.roots.values()} == folders
    assert f"work:{settings.work_folder}" in services()[service]["volumes"]


def test_containers_run_commands_that_there_are() -> None:
    """Those of the compose file and of docs/operations.md; there is time for the end."""
    assert [json.loads(line) for line in instructions("ENTRYPOINT")] == [["dcp"]]
    for service in OURS:
        assert_command(services()[service]["command"])
        assert float(services()[service]["stop_grace_period"].rstrip("s")) > 2 * Settings().shutdown_seconds
    assert_command(json.loads(instructions("CMD")[-1]))
    text = (ROOT / "docs/operations.md").read_text()
    told = re.findall(r"^docker compose run --rm worker (.*)$", text, flags=re.MULTILINE)
    assert len(told) == 2
    for line in told:
        assert_command(line.split())


def test_the_service_is_asked_for_its_health(tmp_path: Path) -> None:
    """By the command of the image, with the settings of the compose file: it is green, and red without it."""
    _, question = instructions("HEALTHCHECK")[0].split("CMD ", 1)
    python, *arguments = json.loads(question)
    assert python == "python"
    assert str(Settings().port) in arguments[-1]
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


def test_the_services_are_locked_in() -> None:
    """Read-only, without capabilities, not as root; the database on a network of its own."""
    found = services()
    assert instructions("USER") == ["10001:10001"]
    for service in OURS:
        assert found[service]["read_only"] is True
        assert (found[service]["cap_drop"], found[service]["user"]) == (["ALL"], OPERATOR["RUN_AS"])
    assert found["database"]["networks"] == ["database"]
    assert "ports" not in found["database"]
    assert all(port.startswith("127.0.0.1:") for port in found["api"]["ports"])
    # Compose copies secrets that are not files, and refuses to where the container is read-only
    assert not any("secrets" in service for service in found.values() if service.get("read_only"))
    database = found["database"]["environment"]
    user, password = database["POSTGRES_USER"], database["POSTGRES_PASSWORD"]
    url = environment("api")["DCP_SERVER_DATABASE_URL"]
    assert url == f"postgresql://{user}:{password}@database/{user}"


def test_the_image_is_built_of_what_is_there() -> None:
    """All that a build needs is copied, and let through by .dockerignore; the version is this one's."""
    copied = {word for line in instructions("COPY") if "--from" not in line for word in line.split()[:-1]}
    # the folders of the package, and what pyproject.toml and the build name
    assert copied >= {"dcp", "planners", "server", "src", "storage", "LICENSE", "README.md", "pyproject.toml"}
    assert all((ROOT / name).exists() for name in copied)
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert copied == {line[1:] for line in lines if line.startswith("!")}
    for service in OURS:
        assert services()[service]["image"] == f"dcphub-server:{__version__}"
    assert set(re.findall(r"dcphub-server:([\w.]+)", CONTAINERFILE)) == {__version__}
    assert all(re.search(r":\S*\d+\.\d+", line) or "PYTHON" in line for line in instructions("FROM"))
