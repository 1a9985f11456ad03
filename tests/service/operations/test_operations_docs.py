"""docs/operations.md says what there is. Internal: the page is compared with what the code declares.

Moves to HTTP when the service is rebuilt.
"""

from __future__ import annotations

import re
import shlex
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel, SecretStr
from pydantic_core import PydanticUndefined
from typer.testing import CliRunner

from dcp.cli.app import app as command_line
from dcp.server.database.engine import Database
from dcp.server.database.migrations import upgrade
from dcp.server.monitoring import install
from dcp.server.settings import CONFIG_VARIABLE, RootSettings, Settings
from tests.service.operations.test_monitoring import fill

DOCS = Path(__file__).parents[3] / "docs"
TEXT = (DOCS / "operations.md").read_text()
ROW = re.compile(r"^\| (?P<first>[^|]*) \| (?P<second>[^|]*) \|", re.MULTILINE)
FENCE = re.compile(r"^ *```(?P<kind>[a-z]*)\n(?P<body>.*?)^ *```", re.MULTILINE | re.DOTALL)

IN_WORDS = {
    "roots": "`checkpoints` is `./checkpoints`",
    "allowed_hosts": "loopback",
    "work_folder": "the system's temporary folder",
    "description": "empty",
}
"""Defaults that are said, not shown."""


def rows_after(heading: str) -> dict[str, str]:
    """Of the first table after ``heading``: the first two columns."""
    table = TEXT.split(heading, 1)[1].split("\n\n", 2)
    body = next(part for part in table if part.lstrip().startswith("|"))
    return {match["first"].strip(): match["second"].strip() for match in ROW.finditer(body)}


def shown(name: str, value: Any) -> str:
    """A default as the table has it."""
    if name in IN_WORDS:
        return IN_WORDS[name]
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, SecretStr):
        return f"`{value.get_secret_value()}`"
    if isinstance(value, float | int):
        return f"{value:g}" if value < 1e5 else str(int(value))
    return f"`{value}`" if value else "none"


def defaults(model: type[BaseModel]) -> dict[str, str]:
    """All fields with their defaults, as tables have them."""
    return {
        f"`{name}`": shown(name, field.get_default(call_default_factory=True, validated_data={}))
        for name, field in model.model_fields.items()
    }


def test_every_setting_is_there_with_its_default() -> None:
    """No more, no fewer, in the order of the settings; those of a root as well."""
    documented = rows_after("refused.\n")
    documented.pop("setting", None)
    documented.pop("---", None)
    assert documented == defaults(Settings)
    of_roots = rows_after("they are there again.\n")
    of_roots = {name: value for name, value in of_roots.items() if name.startswith("`")}
    assert of_roots == defaults(RootSettings)


def test_every_metric_is_there(tmp_path: Path) -> None:
    """Those that a service shows are documented, and those that are documented are shown."""
    database = Database(f"sqlite:///{tmp_path / 'catalog.sqlite'}")
    upgrade(database)
    fill(database, time.time())
    families = text_string_to_metric_families(install(FastAPI(), database).text({"prod": True}).decode())
    found = {
        f"{family.name}_total" if family.type == "counter" else family.name
        for family in families
        if family.name.startswith("dcp_")
    }
    database.close()
    assert set(re.findall(r"\bdcp_[a-z_]+\b", TEXT)) == found


def test_the_examples_of_settings_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block of TOML is a whole configuration; so are the variables in the text."""
    blocks = [match["body"] for match in FENCE.finditer(TEXT) if match["kind"] == "toml"]
    assert blocks
    for block in blocks:
        path = tmp_path / "dcp-server.toml"
        path.write_text(re.sub(r"^ +", "", block, flags=re.MULTILINE))
        monkeypatch.setenv(CONFIG_VARIABLE, str(path))
        settings = Settings()
        assert set(tomllib.loads(path.read_text())) == settings.model_fields_set
    monkeypatch.delenv(CONFIG_VARIABLE)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dcp-server.toml").unlink()
    variables = re.findall(r"`(DCP_SERVER_[A-Z_]+)=([^`]*)`", TEXT)
    assert len(variables) >= 3
    for name, value in variables:
        monkeypatch.setenv(name, shlex.split(value)[0])
    settings = Settings()
    assert settings.roots["runs"].url == "/data/runs"
    assert settings.allowed_hosts == ("checkpoints.example.com",)
    assert settings.database_url.get_secret_value().startswith("postgresql://")


def test_every_command_and_option_is_there() -> None:
    """Lines that begin with dcp in blocks: the command line has these commands and options."""
    lines = [
        line.strip()
        for match in FENCE.finditer(TEXT)
        for line in match["body"].splitlines()
        if line.strip().startswith("dcp ")
    ]
    lines += re.findall(r"`(dcp [a-z][^`]*)`", TEXT)
    assert len(lines) >= 8
    for line in lines:
        words = shlex.split(line)[1:]
        commands = [word for word in words[:2] if re.fullmatch("[a-z]+", word)]
        if commands[0] in ("serve", "worker"):
            commands = commands[:1]
        shown_help = CliRunner().invoke(command_line, [*commands, "--help"], env={"COLUMNS": "200"})
        assert shown_help.exit_code == 0, line
        for option in (word for word in words if word.startswith("--")):
            assert option in shown_help.output, line


def test_every_file_that_is_linked_is_there() -> None:
    """Links between the pages and to deploy/."""
    for page in ("operations.md", "api.md"):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (DOCS / page).read_text()):
            assert (DOCS / target).exists(), (page, target)
