"""Pages of keys and the audit log: secrets shown once, revoking, and access."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

import pytest
from httpx2 import Response

from tests.support.app import App
from tests.support.page_rows import note
from tests.support.pages import Browser, PageText, faults_of

SECRET = re.compile(r"dcp_[a-z0-9]{8}_[A-Za-z0-9_-]{43}")


@pytest.fixture
def admin(keyed: App) -> Browser:
    """Return a browser signed in with a key of an admin."""
    browser = Browser(keyed.client())
    browser.sign_in(keyed.key("admin", name="ada"))
    return browser


def make_key(
    browser: Browser, name: str, *scopes: str, roots: tuple[str, ...] = (), days: str = ""
) -> Response:
    """Create a key with the form, whose checkboxes share a name."""
    token = browser.page("/keys").form("/keys").fields["token"]
    data = {"token": token, "name": name, "scope": list(scopes), "root": list(roots), "days": days}
    return browser.client.post("/keys", data=data)


def test_a_key_is_shown_once_and_works(keyed: App, admin: Browser) -> None:
    """A new key is shown once, in a response that is not cached and in no URL; the key works as requested."""
    answer = make_key(admin, "ci", "read", "write", roots=("main",), days="30")
    assert answer.status_code == 201
    assert faults_of(PageText(answer.text)) == []
    assert answer.headers["cache-control"] == "no-store"
    assert str(answer.url) == "http://localhost/keys"
    (secret,) = set(SECRET.findall(answer.text))
    ends = [given["data-copy"] for _, given in PageText(answer.text).elements if given.get("data-copy")]
    assert ends == ["secret"], "the button copies it"
    for path in ("/keys", "/audit", "/api/v1/keys", "/api/v1/audit", "/keys/2/revoke"):
        assert not SECRET.search(admin.get(path).text), path
    program = keyed.client()
    program.headers["authorization"] = f"Bearer {secret}"
    caller = program.get("/api/v1/whoami").json()
    assert (caller["name"], caller["scopes"], caller["roots"]) == ("key:ci", ["read", "write"], ["main"])
    assert caller["expires_at"] is not None


def test_revoking_asks_and_ends_the_key_at_once(keyed: App, admin: Browser) -> None:
    """Revoking asks first and ends the key with its sessions; the log names the actor."""
    other = Browser(keyed.client())
    other.sign_in(keyed.key("read", name="old"))
    page = admin.page("/keys/2/revoke")
    assert "Revoke old ?" in page.text and "Its scope is read, and it was never used." in page.text
    assert other.get("/roots").url.path == "/roots"
    answer = admin.submit(page.form("/keys/2/revoke"))
    assert (answer.url.path, answer.url.query) == ("/keys", b"done=revoked")
    assert "1 revoked or expired" in PageText(answer.text).text
    assert other.get("/roots").url.path == "/sign-in"
    assert "The key has already ended" in admin.page("/keys/2/revoke").text
    found = keyed.client("admin", name="x").get("/api/v1/audit?action=key.revoke").json()["items"]
    assert [(one["actor"], one["target"]) for one in found] == [("key:ada", "key:2")]
    assert admin.get("/keys/77/revoke").status_code == 404


def test_revoking_your_own_key(keyed: App, admin: Browser) -> None:
    """The page warns before revoking one's own or the last administrative key; revoking then signs out."""
    page = admin.page("/keys/1/revoke")
    assert "You are signed in with this key" in page.text
    assert "the last key that may create keys" in page.text
    keyed.key("admin", name="second")
    keyed.key("admin", name="of-one-root", roots=["main"])
    assert "No other key" not in admin.page("/keys/1/revoke").text
    assert admin.submit(page.form("/keys/1/revoke")).url.path == "/sign-in"


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"name": "no blanks"}, 422, "A name has"),
        ({"scope": []}, 422, "Choose at least one scope"),
        ({"scope": ["read", "root"]}, 422, "Choose at least one scope"),
        ({"root": ["elsewhere"]}, 422, "elsewhere"),
        ({"days": "-1"}, 422, "Choose one of the offered times"),
        ({"days": "1e400"}, 422, "Choose one of the offered times"),
        ({"name": "ada"}, 409, "choose another name"),
    ],
)
def test_invalid_keys_are_refused_with_the_reason(
    keyed: App, admin: Browser, fields: dict[str, str | list[str]], status: int, message: str
) -> None:
    """An invalid key is refused with the reason and the typed values, and not created."""
    token = admin.page("/keys").form("/keys").fields["token"]
    data = {"token": token, "name": "new", "scope": ["convert"], "days": "7", **fields}
    answer = admin.client.post("/keys", data=data)
    assert answer.status_code == status
    page = PageText(answer.text)
    assert message in page.text
    assert page.form("/keys").fields["name"] == data["name"]
    assert len(keyed.client("admin", name="x").get("/api/v1/keys").json()["items"]) == 2


def test_keys_that_only_read_get_403(keyed: App) -> None:
    """A key that only reads gets 403 with its identity and the remedy, and no link to these pages."""
    browser = Browser(keyed.client())
    browser.sign_in(keyed.key("read", name="k0"))
    assert not {"/keys", "/people", "/audit"} & set(browser.page("/roots").links)
    for path in ("/keys", "/people", "/audit", "/keys/1/revoke"):
        answer = browser.get(path)
        assert answer.status_code == 403, path
        text = PageText(answer.text).text
        assert "You are signed in as key:k0" in text and "dcp keys create" in text
    token = browser.page("/roots").form("/theme").fields["token"]
    assert browser.client.post("/keys", data={"token": token, "name": "x"}).status_code == 403
    assert browser.client.post("/keys/1/revoke", data={"token": token}).status_code == 403


def _rows(page: PageText) -> int:
    return sum(name == "tr" for name, _ in page.elements) - 1


@pytest.mark.parametrize(
    "text", ["<script>alert(1)</script>", "\u202e\U0001f4a5", "'onclick='x", "y" * 10_000]
)
def test_hostile_text_in_the_log_is_text(keyed: App, admin: Browser, text: str) -> None:
    """Hostile text in an audit entry is shown as text and adds no link."""
    note(keyed, text, text, f"root:{text}", {text: {"deep": [text]}}, address=text)
    page = admin.page("/audit")
    assert text[:60].replace("\u202e", "\\u202e") in page.text
    own_paths = {
        "",
        "/",
        "/audit",
        "/keys",
        "/people",
        "/quotas",
        "/usage",
        "/stage-requests",
        "/api/v1/audit",
        "/docs",
    } | {
        "/checkpoints",
        "/jobs",
        "/roots",
    }
    assert {urlsplit(link).path for link in page.links} <= own_paths
