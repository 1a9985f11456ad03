"""Notes on runs and checkpoints: in the API, on pages without scripts, and as HTML in Chromium."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support.app import App, running_app
from tests.support.catalog import API, Catalog, pages
from tests.support.catalog_rows import add_checkpoint
from tests.support.chromium import running_chromium
from tests.support.pages import HOSTILE, Browser, PageText
from tests.support.receivers import Receiver


@pytest.mark.each_database
def test_notes_are_listed_edited_and_deleted(catalog: Catalog) -> None:
    """A note is listed, found by text, edited with its versions kept, and deleted. Each change is audited,
    and a repeated POST creates no second note."""
    number, http = catalog.add("llama/step-10"), catalog.http
    run_id = catalog.get(f"/checkpoints/{number}")["run_id"]
    path = f"{API}/checkpoints/{number}/notes"
    alice = catalog.app.client("read", "write", name="alice")
    text = "# Ünsettled\r\n\r\nLoss **diverged**  \r\n"
    answers = [alice.post(path, json={"text": text}, headers={"Idempotency-Key": "k"}) for _ in range(2)]
    note = answers[0].json()
    assert [one.status_code for one in answers] == [201, 201] and note == answers[1].json()
    place = f"{API}/notes/{note['id']}"
    assert answers[0].headers["Location"] == place and answers[0].headers["ETag"] == note["etag"]
    assert note["text"] == "# Ünsettled\n\nLoss **diverged**" and note["author"] == "key:alice"
    assert (note["run"], note["checkpoint_id"], note["edited_at"]) == ("llama", number, None)
    on_run = http.post(f"{API}/runs/{run_id}/notes", json={"text": "of the run, DIVERGED too"}).json()
    assert [one["id"] for one in pages(http, f"/runs/{run_id}/notes", limit=1)] == [on_run["id"]]
    both = pages(http, f"/runs/{run_id}/notes", with_checkpoints=True, limit=1)
    assert [one["id"] for one in both] == [on_run["id"], note["id"]] and both[1] == note
    assert pages(http, f"/checkpoints/{number}/notes") == [note]
    assert pages(http, "/notes", contains="diverged", author="key:alice", root="main") == [note]
    assert [one["id"] for one in pages(http, "/notes", contains="diverged")] == [on_run["id"], note["id"]]
    hits = catalog.get("/search", q="VERGED*", kind="note")["items"]
    assert [(one["href"], one["checkpoint_id"]) for one in hits] == [(f"/notes/{note['id']}", number)]
    assert {one["kind"] for one in catalog.get("/search", q="llama")["items"]} == {"run"}

    seen = {"If-Match": note["etag"]}
    edited = alice.patch(place, json={"text": "Converged."}, headers=seen)
    assert (edited.json()["text"], edited.json()["edited_by"]) == ("Converged.", "key:alice")
    assert alice.patch(place, json={"text": "late"}, headers=seen).status_code == 412
    assert alice.patch(place, json={"text": "Converged."}).json()["version"] == 2
    assert http.patch(place, json={"text": "By an admin."}).json()["edited_by"] == "key:boss"
    versions = catalog.get(f"/notes/{note['id']}/versions")["items"]
    shown = [(one["version"], one["text"], one["author"]) for one in versions]
    assert shown == [
        (3, "By an admin.", "key:boss"),
        (2, "Converged.", "key:alice"),
        (1, note["text"], "key:alice"),
    ]
    assert alice.delete(place, headers=seen).status_code == 412
    assert alice.delete(place).status_code == 204
    for gone in (place, f"{place}/versions"):
        assert alice.get(gone).status_code == 404
    actions = [one["action"] for one in pages(http, "/audit", target=f"note:{note['id']}")]
    assert actions == ["note.delete", "note.change", "note.change", "note.create"]


def test_readers_and_editors_of_a_note(catalog: Catalog) -> None:
    """The author and admins change a note, another key of the same name does not; hidden roots get 404."""
    number = catalog.add("a/step-1", root="main")
    create = catalog.app.client("read", "write", name="alice").post
    (key,) = (one for one in catalog.get("/keys")["items"] if one["name"] == "alice")
    note = create(f"{API}/checkpoints/{number}/notes", json={"text": "mine"}).json()
    assert catalog.status("DELETE", f"/keys/{key['id']}") == 200
    for reader, expected in (
        (catalog.app.client("read", "write", name="alice"), [200, 403, 403, 201]),
        (catalog.app.client("read", name="bob"), [200, 403, 403, 403]),
        (catalog.app.client("read", "write", roots=["other"]), [404] * 4),
    ):
        calls = [
            ("GET", f"/notes/{note['id']}"),
            ("PATCH", f"/notes/{note['id']}"),
            ("DELETE", f"/notes/{note['id']}"),
            ("POST", f"/checkpoints/{number}/notes"),
        ]
        body = {"json": {"text": "x"}}
        options: Any = {"PATCH": body, "POST": body}
        found = [catalog.status(method, path, reader, **options.get(method, {})) for method, path in calls]
        assert found == expected
        is_seen = expected[0] == 200
        assert bool(pages(reader, "/notes")) == is_seen
        assert bool(reader.get(f"{API}/search", params={"q": "mine"}).json()["items"]) == is_seen
        assert reader.get(f"{API}/runs/1/notes").status_code == expected[0]
    for bad in (
        "",
        " \n",
        "x" * 16_001,
        "a\0b",
        "\x1b[31m",
        "\ud800",
        "|" * 101 + "\n" + "|-" * 100 + "\n|" * 200,
    ):
        given = {"content": json.dumps({"text": bad}), "headers": {"Content-Type": "application/json"}}
        refused = catalog.http.post(f"{API}/checkpoints/{number}/notes", **given)  # type: ignore[arg-type]
        assert refused.status_code in (400, 422), bad[:20]
    assert catalog.status("POST", "/runs/999/notes", json={"text": "x"}) == 404


@pytest.mark.each_database
def test_concurrent_edits_lose_nothing(catalog: Catalog) -> None:
    """Of concurrent edits with the same ETag one succeeds; edits without If-Match all become versions."""
    number = catalog.add("a/step-1")
    note = catalog.http.post(f"{API}/checkpoints/{number}/notes", json={"text": "0"}).json()
    place = f"{API}/notes/{note['id']}"

    def edit(text: int, **headers: str) -> int:
        return catalog.http.patch(place, json={"text": str(text)}, headers=headers).status_code

    with ThreadPoolExecutor(6) as pool:
        found = [pool.submit(edit, one, **{"If-Match": note["etag"]}) for one in range(1, 7)]
        assert sorted(one.result() for one in found) == [200, 412, 412, 412, 412, 412]
        assert set(pool.map(edit, range(10, 16))) == {200}
    versions = catalog.get(f"/notes/{note['id']}/versions")["items"]
    assert [one["version"] for one in versions] == [8, 7, 6, 5, 4, 3, 2, 1]
    assert {one["text"] for one in versions} > {str(number) for number in range(10, 16)}


def test_a_webhook_is_sent_new_notes(tmp_path: Path) -> None:
    """The event has the note and its checkpoint, and no text."""
    url, allowed = f"sqlite:///{tmp_path / 'catalog.sqlite'}", ("127.0.0.1",)
    with running_app(url, tmp_path, webhook_allow_private=allowed) as app, Receiver() as receiver:
        number = add_checkpoint(app.service.database, "a/step-1")
        http = app.client("admin")
        hook = {"url": receiver.url, "events": ["note.created"]}
        assert http.post(f"{API}/webhooks", json=hook).status_code == 201
        assert http.post(f"{API}/webhooks", json=hook | {"events": ["note.read"]}).status_code == 422
        made = http.post(f"{API}/checkpoints/{number}/notes", json={"text": "secret"}).json()
        app.work(time.time(), "events:webhooks")
        app.work(time.time(), "webhooks")
        (sent,) = receiver.requests
    document = json.loads(sent.body)
    assert (document["type"], document["data"]["checkpoint"]["id"]) == ("note.created", number)
    assert document["data"]["detail"]["note_id"] == made["id"] and b"secret" not in sent.body


def test_notes_are_written_without_script(keyed: App) -> None:
    """Notes are previewed, saved, edited and deleted with forms; a refused or late text is not lost."""
    number = add_checkpoint(keyed.service.database, "a/step-1")
    alice, bob = Browser(keyed.client()), Browser(keyed.client())
    alice.sign_in(keyed.key("read", "write", name="alice"))
    bob.sign_in(keyed.key("admin", name="bob"))
    form = alice.page(f"/checkpoints/{number}").form(f"/checkpoints/{number}/notes")
    preview = PageText(alice.submit(form, text="*so* it <b>is</b>", preview="true").text)
    assert ("em", {}) in preview.elements and "<b>is</b>" in preview.text
    assert pages(keyed.client("read"), "/notes") == []
    for wrong in ("", "x" * 16_001):
        refused = alice.submit(form, text=wrong)
        assert refused.status_code == 422 and wrong in refused.text and 'role="alert"' in refused.text
    shown = alice.submit(preview.form(f"/checkpoints/{number}/notes"), text="*so* it <b>is</b>")
    assert shown.url.path == f"/checkpoints/{number}" and "<em>so</em> it &lt;b&gt;is" in shown.text
    edit = bob.page("/notes/1/edit").form("/notes/1")
    alice.submit(alice.page("/notes/1/edit").form("/notes/1"), text="second")
    late = bob.submit(edit, text="third")
    assert late.status_code == 412 and "third" in late.text and "<p>second</p>" in late.text
    assert bob.submit(PageText(late.text).form("/notes/1"), text="third").url.path == "/notes/1"
    page = alice.page("/notes/1")
    assert page.text.count("Version") == 2 and "edited by key:bob" in page.text
    assert alice.client.post("/notes/1/delete").status_code == 403, "without the token of a form"
    assert "Notes" in alice.page("/runs/1/notes?with_checkpoints=true").text
    assert alice.submit(page.form("/notes/1/delete")).url.path == f"/checkpoints/{number}"
    assert alice.get("/notes/1").status_code == 404
    eve = Browser(keyed.client())
    eve.sign_in(keyed.key("read", roots=["other"], name="eve"))
    assert {eve.get(f"/{path}/notes").status_code for path in ("runs/1", f"checkpoints/{number}")} == {404}


_ATTACKS: Final = (
    *HOSTILE,
    "<img src=x onerror=alert(1)>\n\n<svg/onload=alert(1)>\n\n<style>*{display:none}</style>",
    "[a](javascript:alert(1)) [b](JaVaScRiPt&colon;alert(1)) [c](&#106;avascript:alert(1)) [d](data:,x)",
    "[e](vbscript:x) [f](data:text/html;base64,PHNjcmlwdD5hbGVydCgxKTwvc2NyaXB0Pg==) [g](file:///etc/passwd)",
    '[h](https://a.b "x\\" onmouseover=alert(1) y=\\"")',
    '[i](<https://a.b/" onclick="alert(1)>) [j](/x "<table>")',
    '![k](x" onerror="alert(1)) ![l](javascript:alert(1)) ![<img src=x onerror=alert(1)>](/y)',
    '<https://a.b/"onclick=alert(1)//> <javascript:alert(1)> https://a.b/"onclick=alert(1)',
    '```"><script>alert(1)</script>\nx\n```\n\n`<script>alert(1)</script>`',
    "|<script>alert(1)</script>|b|\n|:-|-:|\n|<img src=x onerror=alert(1)>|`|`|\n\n</div></article></main>",
    "&lt;script&gt;alert(1)&lt;/script&gt; &#x202e;reversed",
    "[m]: javascript:alert(1)\n[m] <!-- --> <?x ?> <![CDATA[",
    "<math><mtext><table><mglyph><style><img src=x onerror=alert(1)>",
    '<noscript><p title="</noscript><img src=x onerror=alert(1)>">',
    "> " * 300 + "deep\n\n" + "[" * 3000 + "a](" * 3000,
)
_ALLOWED: Final = {
    "A": {"href", "title", "rel"},
    "OL": {"start"},
    "PRE": {"tabindex"},
    "DIV": {"class", "role", "aria-label", "tabindex"},
    "TD": {"align"},
    "TH": {"align"},
}
_ELEMENTS: Final = """nodes => nodes.map(node => [
  node.tagName, Object.fromEntries([...node.attributes].map(a => [a.name, a.value])), node.protocol])"""
_TEXT: Final = (
    *("P", "H3", "EM", "STRONG", "S", "CODE", "BLOCKQUOTE", "UL", "LI", "BR", "HR"),
    *("TABLE", "THEAD", "TBODY", "TR"),
)


def test_hostile_markdown_in_a_browser(app: App, browser: Browser) -> None:
    """Chromium, without the content security policy, runs no script of hostile Markdown. Only elements and
    attributes of text remain, links lead to the web or the service, and the rest of the page is intact."""
    number = add_checkpoint(app.service.database, "a/step-1")
    for text in _ATTACKS:
        answer = app.base.post(f"{API}/checkpoints/{number}/notes", json={"text": text})
        assert answer.status_code == 201, (text, answer.text)
    html = browser.get(f"/checkpoints/{number}/notes").text
    assert html.count('class="note"') == len(_ATTACKS) and "\u202e" not in html
    with running_chromium() as chromium:
        page = chromium.new_page()
        ran: list[str] = []
        page.on("dialog", lambda dialog: ran.append(dialog.message))
        page.route("**/*", lambda route: route.abort())
        page.set_content(f"<base href='http://localhost/'>{html}", wait_until="commit")
        page.mouse.move(50, 50)
        for link in page.locator(".prose a").all():
            link.dispatch_event("mouseover")
        found = page.eval_on_selector_all(".prose *", _ELEMENTS)
        assert page.locator("main + footer").count() == 1 and page.locator(".note").count() == len(_ATTACKS)
        assert page.locator(".prose table").first.is_visible() and ran == []
    for tag, attributes, protocol in found:
        assert attributes.keys() <= _ALLOWED.get(tag, set()), (tag, attributes)
        assert tag in _ALLOWED or tag in _TEXT, tag
        assert tag != "A" or protocol in (":", "http:", "https:") or "href" not in attributes, attributes
        assert attributes.get("class", "scroll") == "scroll"
