"""A browser without scripts, over the application in the test process: links, forms, cookies."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any, Final
from urllib.parse import urljoin, urlsplit

from fastapi.testclient import TestClient
from httpx2 import Response

__all__ = ["HOSTILE", "Browser", "PageForm", "PageText", "faults_of"]

HOSTILE: Final = (
    *("<script>alert(1)</script>", "\"><img src=x onerror='alert(1)'>", "{{ 7*7 }}{% raw %}", "x" * 900),
    *("\u202egnp.exe \u2067\u05d0\u05d1", "\U0001f4a5\U0001f469\u200d\U0001f680 caf\u00e9"),
)
"""Names shown as text by pages, of any kind of object."""
_SHOWN_BY: Final = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8", "sec-fetch-site": "same-origin"}
_OF_ADDRESSES: Final = frozenset({"href", "src", "action", "formaction", "hx-get", "hx-post", "sse-connect"})


@dataclass(slots=True)
class PageForm:
    """A form with its initial values."""

    action: str
    method: str
    fields: dict[str, str] = field(default_factory=dict)


class PageText(HTMLParser):
    """The elements, text, and forms of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.forms: list[PageForm] = []
        self.texts: list[str] = []
        self._select: str | None = None
        self.feed(html)
        self.close()

    @property
    def text(self) -> str:
        """The visible text."""
        return " ".join(" ".join(self.texts).split())

    @property
    def links(self) -> list[str]:
        """Addresses of links."""
        return [given["href"] for name, given in self.elements if name == "a" and "href" in given]

    def form(self, action: str) -> PageForm:
        """Return the only form sent to this path."""
        (found,) = [form for form in self.forms if urlsplit(form.action).path == action]
        return found

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record an element."""
        given = {name: value or "" for name, value in attrs}
        self.elements.append((tag, given))
        if tag == "form":
            self.forms.append(PageForm(given.get("action", ""), given.get("method", "get").lower()))
        elif tag == "select":
            self._select = given.get("name")
        elif tag == "option" and self._select and self.forms and "selected" in given:
            self.forms[-1].fields[self._select] = given.get("value", "")
        elif tag == "input" and self.forms and "name" in given and _is_sent(given):
            self.forms[-1].fields[given["name"]] = given.get("value", "")

    def handle_data(self, data: str) -> None:
        """Record text."""
        self.texts.append(data)


def _is_sent(given: dict[str, str]) -> bool:
    return given.get("type") not in ("checkbox", "radio") or "checked" in given


def faults_of(page: PageText) -> list[str]:
    """Return violations of the content security policy, and addresses on other hosts."""
    found = []
    for name, given in page.elements:
        found += [f"<{name} {key}>" for key in given if key.startswith("on") or key == "style"]
        found += [
            f"<{name} {key}={given[key]}>"
            for key in _OF_ADDRESSES & given.keys()
            if urlsplit(given[key]).netloc or urlsplit(given[key]).scheme
        ]
        if name == "style" or (name == "script" and "src" not in given):
            found.append(f"inline <{name}>")
    return found


class Browser:
    """A client that keeps cookies, follows redirects, and sends forms with their values."""

    def __init__(self, client: TestClient) -> None:
        self.client = client
        client.headers.update(_SHOWN_BY)

    def get(self, path: str, **options: Any) -> Response:
        """GET a path."""
        return self.client.get(path, **options)

    def page(self, path: str) -> PageText:
        """Return a page, which must exist and follow the content security policy."""
        answer = self.get(path)
        assert answer.status_code == 200, (path, answer.status_code, answer.text[:2000])
        page = PageText(answer.text)
        assert faults_of(page) == [], path
        return page

    def submit(self, form: PageForm, **fields: str) -> Response:
        """Send a form with changed values."""
        values = {**form.fields, **fields}
        path = urljoin("/", form.action)
        if form.method == "get":
            return self.client.get(path, params=values)
        return self.client.post(path, data=values)

    def sign_in(self, key: str, next: str = "/") -> Response:
        """Sign in with a key, by the form."""
        page = PageText(self.get("/sign-in", params={"next": next}).text)
        return self.submit(page.form("/sign-in"), key=key)
