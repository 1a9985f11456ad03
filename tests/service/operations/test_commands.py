"""Commands `dcp keys`, `dcp db` and `dcp roots`, and settings with which `dcp serve` refuses to start."""

from __future__ import annotations

import json
import shutil
from datetime import datetime
from pathlib import Path

import pytest

from tests.support.app import running_app
from tests.support.catalog import API, Catalog
from tests.support.catalog_roots import write_manifest
from tests.support.command import run as command


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run commands in a folder without configuration."""
    monkeypatch.chdir(tmp_path)
    # --config sets the variable for child processes; monkeypatch restores the old value
    monkeypatch.setenv("DCP_SERVER_CONFIG", str(tmp_path / "dcp-server.toml"))


def run(line: str, status: int = 0) -> str:
    """Run a command, check its exit status, and return its output as one line."""
    done = command(*line.split())
    assert done.status == status, done.err
    return " ".join(f"{done.out} {done.err}".split())


def test_keys_are_created_listed_and_revoked(tmp_path: Path) -> None:
    """A key is printed once, listed without its secret, and valid until revoked."""
    # a typical first command: the database does not exist yet
    secret = run("keys create ci --scope read --scope write --expires 30d")
    assert "up to date" in run("db upgrade")
    with running_app(f"sqlite:///{tmp_path / 'dcp-catalog.sqlite'}", tmp_path) as app:
        headers = {"Authorization": f"Bearer {secret}"}
        known = app.base.get(f"{API}/whoami", headers=headers).json()
        assert (known["name"], known["scopes"]) == ("key:ci", ["read", "write"])
        assert "ci" in (listed := run("keys list")) and secret not in listed
        (entry,) = json.loads(run("keys list --json"))
        assert (entry["name"], entry["is_valid"]) == ("ci", True) and secret[4:12] == entry["prefix"]
        left = datetime.fromisoformat(known["expires_at"]).timestamp() - Path(tmp_path).stat().st_mtime
        assert left == pytest.approx(30 * 86_400, abs=300)
        run("keys create ci", status=3)  # a valid key has this name
        made = [run(f"keys create {name} --account nightly") for name in ("ci", "cd")]  # of an account
        assert all("nightly has no role yet, so the key is refused until" in output for output in made)
        mine = [output.split()[0] for output in made]
        answers = [app.base.get(f"{API}/account", headers={"Authorization": f"Bearer {one}"}) for one in mine]
        assert {one.json()["actor"] for one in answers} == {"service-account:nightly"}
        run("keys create x --account a/b", status=2)
        assert "revoked: ci" in run(f"keys revoke {entry['prefix']}")
        assert app.base.get(f"{API}/whoami", headers=headers).status_code == 401
    assert "revoked" in run("keys list")
    run("keys revoke 99", status=3)


def test_the_state_of_the_database(tmp_path: Path) -> None:
    """`dcp db status` exits with 1 until the database is up to date, and reports an invalid URL in a line."""
    other = f"--database sqlite:///{tmp_path / 'other.sqlite'}"
    assert json.loads(run(f"db status --json {other}", status=1))["current"] is None
    run(f"db upgrade {other}")
    assert json.loads(run(f"db status --json {other}"))["is_current"] is True
    for wrong in (
        "mysql://host/db",
        "sqlite://",
        "sqlite:///:memory:",
        f"sqlite:///{tmp_path}/no/folder.sqlite",
        "nonsense",
    ):
        shown = run(f"db status --database {wrong}", status=3)
        assert "dcp: " in shown and "internal error" not in shown


@pytest.mark.parametrize("line", ["keys list", "keys revoke 1", "roots list", "roots accept main"])
def test_commands_do_not_create_a_missing_database(line: str, tmp_path: Path) -> None:
    """Commands that list or revoke do not create a database: its name or the folder is probably wrong."""
    absent = tmp_path / "absent.sqlite"
    shown = run(f"{line} --database sqlite:///{absent}", status=3)
    assert f"database file {absent} not found" in shown and not absent.exists()


def test_invalid_settings_stop_the_start(tmp_path: Path) -> None:
    """Each invalid setting is reported in a line with its name and without its value, and nothing starts."""
    assert "auth=keys" in run("serve --host 0.0.0.0", status=3)
    config = tmp_path / "wrong.toml"
    config.write_text(
        'port = "many"\nnonsense = 1\nrate_limit = "5/fortnight"\n[roots."A B"]\nurl = "s3://b"'
    )
    shown = run(f"serve --config {config}", status=3)
    assert all(f"{name}: " in shown for name in ("port", "nonsense", "roots")) and "many" not in shown
    for unread in (b"roots = [\n", b"\xff\xfe"):
        config.write_bytes(unread)
        assert f"{config} is not valid TOML" in run(f"serve --config {config}", status=3)
    assert "is not a file" in run(f"serve --config {tmp_path}/none.toml", status=3)
    for roots in ("--root noname=", "--root /", "--root a/runs --root b/runs"):
        run(f"serve {roots}", status=2)
    for rate in ("many/minute", "0/minute", "5/0minutes", "5", "1/second;9/minute", "5/fortnight"):
        config.write_text(f'login_limit = "{rate}"')
        assert rate in run(f"serve --config {config}", status=3)


def test_roots_accept_needs_yes(tmp_path: Path) -> None:
    """`dcp roots accept` needs --yes, and does nothing if more checkpoints are missing by now."""
    root = tmp_path / "main"
    for run_name in ("run", "other"):
        for step in range(12):
            write_manifest(root / run_name / f"step-{step}")
    with running_app(f"sqlite:///{tmp_path / 'dcp-catalog.sqlite'}", tmp_path) as app:
        catalog = Catalog(app, tmp_path)
        catalog.scan()
        assert "nothing to accept" in run("roots accept main")
        shutil.rmtree(root / "run")
        catalog.scan()
        assert "12 of 24 checkpoints were not found" in run("roots list")
        assert "pass --yes" in run("roots accept main")
        shutil.rmtree(root / "other")
        assert "no checkpoint was marked" in run("roots accept main --yes", status=3)
        assert {*catalog.states().values()} == {"committed"}
        assert "24 checkpoints marked as vanished; 0 found" in run("roots accept main --yes")
        assert {*catalog.states().values()} == {"vanished"}
    assert "root 'elsewhere' not found: configured are main" in run("roots accept elsewhere", status=3)
