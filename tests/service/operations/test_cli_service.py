"""Tests of `dcp keys` and `dcp db`. Internal: what commands wrote is read from the database.

Moves to HTTP when the service is rebuilt.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dcp.cli.app import app
from dcp.cli.subcommands.service.serve import _roots
from dcp.server.database.engine import Database
from dcp.server.process.serving import flags_environment
from dcp.server.security.keys import find_key
from dcp.server.settings import Settings

runner = CliRunner()


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands run where nothing is configured."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DCP_SERVER_CONFIG", raising=False)
    # --config sets it for the processes that are started; monkeypatch puts it back
    monkeypatch.setenv("DCP_SERVER_CONFIG", str(tmp_path / "dcp-server.toml"))


def run(*arguments: str, status: int = 0) -> str:
    """What the command prints; its exit status has to be this one."""
    done = runner.invoke(app, list(arguments))
    assert done.exit_code == status, done.output
    return done.output


def test_a_key_from_its_making_to_its_end(tmp_path: Path) -> None:
    """Printed once and alone; listed without itself; good until it is revoked."""
    # the first thing that anybody does: there is no database yet
    secret = run("keys", "create", "ci", "--scope", "read", "--scope", "write", "--expires", "30d").strip()
    assert "up to date" in run("db", "upgrade")
    database = Database(f"sqlite:///{tmp_path / 'dcp-catalog.sqlite'}")
    with database.read() as connection:
        found = find_key(connection, secret, 0.0)
    assert found is not None
    assert found.scopes == {"read", "write"}
    assert found.expires_seconds == pytest.approx(found.created_seconds + 30 * 86_400)
    listed = run("keys", "list")
    assert "ci" in listed
    assert secret not in listed
    entry = json.loads(run("keys", "list", "--json"))[0]
    assert (entry["name"], entry["prefix"], entry["is_valid"]) == ("ci", found.prefix, True)
    run("keys", "create", "ci", status=3)  # there is a valid one of this name
    assert "revoked: ci" in run("keys", "revoke", found.prefix)
    with database.read() as connection:
        assert find_key(connection, secret, 0.0) is None
    assert "revoked" in run("keys", "list")
    run("keys", "revoke", "99", status=3)
    database.close()


@pytest.mark.parametrize(
    "arguments",
    [
        ("a b",),
        ("ci", "--scope", "everything"),
        ("ci", "--root", "nowhere"),
        ("ci", "--expires", "soon"),
        ("ci", "--expires", "0d"),
    ],
)
def test_keys_that_are_none(arguments: tuple[str, ...]) -> None:
    """A usage error, and no key."""
    run("db", "upgrade")
    run("keys", "create", *arguments, status=2)
    assert json.loads(run("keys", "list", "--json")) == []


def test_the_state_of_the_database(tmp_path: Path) -> None:
    """1 until it is up to date; the database may be named."""
    other = f"sqlite:///{tmp_path / 'other.sqlite'}"
    assert json.loads(run("db", "status", "--json", "--database", other, status=1))["current"] is None
    run("db", "upgrade", "--database", other)
    assert json.loads(run("db", "status", "--json", "--database", other))["is_current"] is True
    assert "up to date" in run("db", "upgrade", "--database", other)
    for wrong in ("mysql://host/db", f"sqlite:///{tmp_path / 'no' / 'folder.sqlite'}", "nonsense"):
        shown = run("db", "status", "--database", wrong, status=3)
        assert "dcp: " in shown and "internal error" not in shown


@pytest.mark.parametrize("command", ["keys list", "keys revoke 1", "roots list", "roots accept main"])
def test_a_database_that_is_not_there_is_missed_and_not_made(command: str, tmp_path: Path) -> None:
    """Whoever lists or takes back has mistaken its name, or the folder."""
    absent = tmp_path / "absent.sqlite"
    shown = run(*command.split(), "--database", f"sqlite:///{absent}", status=3)
    assert f"there is no database {absent}" in " ".join(shown.split())
    assert not absent.exists()


def test_keys_without_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is migrated by itself, a line says what to do first."""
    monkeypatch.setenv("DCP_SERVER_MIGRATE", "false")
    assert "dcp db upgrade" in run("keys", "create", "ci", status=3)
    assert "empty -> " in run("db", "upgrade")
    assert run("keys", "create", "ci").startswith("dcp_")


def test_settings_that_are_none(tmp_path: Path) -> None:
    """Each mistake is a line which names the setting and not its value, and nothing is started."""
    assert "auth=keys" in run("serve", "--host", "0.0.0.0", status=3)
    config = tmp_path / "wrong.toml"
    config.write_text('port = "many"\nnonsense = 1\n[roots."A B"]\nurl = "s3://bucket"\n')
    shown = run("serve", "--config", str(config), status=3)
    assert "port: " in shown
    assert "nonsense: " in shown
    assert "roots: " in shown
    assert "many" not in shown
    for unread in (b"roots = [\n", b"\xff\xfe"):
        config.write_bytes(unread)
        assert f"{config} is no TOML" in " ".join(run("serve", "--config", str(config), status=3).split())
    assert "is not a file" in run("serve", "--config", str(tmp_path / "none.toml"), status=3)
    run("serve", "--root", "noname=", status=2)
    run("serve", "--root", "/", status=2)
    run("serve", "--root", "a/runs", "--root", "b/runs", status=2)


@pytest.mark.parametrize(
    ("given", "name", "url"),
    [
        ("runs=/data/runs", "runs", "/data/runs"),
        ("/data/My Runs/", "my-runs", "/data/My Runs/"),
        ("checkpoints", "checkpoints", "checkpoints"),
        ("s3://bucket/team/runs/", "runs", "s3://bucket/team/runs/"),
        ("s3://bucket", "bucket", "s3://bucket"),
        ("./lr=0.1", "lr-0.1", "./lr=0.1"),
    ],
)
def test_a_root_without_a_name_has_that_of_its_folder(given: str, name: str, url: str) -> None:
    """In the letters that names of roots have."""
    assert _roots([given]) == {name: {"url": url}}
    assert Settings.model_validate({"roots": _roots([given])}).roots[name].url == url


def test_the_current_folder_as_a_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--root .` has its name, too."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert _roots(["."]) == {"here": {"url": "."}}


def test_flags_go_on_to_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is started has them by its environment, and nothing else of the settings."""
    flags = {"port": 1234, "host": None, "database_url": "sqlite:///x.sqlite", "embedded_worker": False}
    roots = {"roots": {"a": {"url": "/a"}, "b": {"url": "s3://b"}}}
    environment = flags_environment({**flags, **roots})
    assert set(environment) == {
        "DCP_SERVER_PORT",
        "DCP_SERVER_DATABASE_URL",
        "DCP_SERVER_EMBEDDED_WORKER",
        "DCP_SERVER_ROOTS",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    settings = Settings()
    assert (settings.port, settings.embedded_worker) == (1234, False)
    assert settings.database_url.get_secret_value() == "sqlite:///x.sqlite"
    assert {name: root.url for name, root in settings.roots.items()} == {"a": "/a", "b": "s3://b"}
