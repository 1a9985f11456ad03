"""What the catalog's web pages say, read from them as a browser gets them: the last claims of the demo."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Final

import httpx

from dcp.demo.jobs import DemoError
from dcp.demo.narration import Narrator
from dcp.server.records.checkpoints import Checkpoint

__all__ = ["PagesAct", "ServedPage"]

_BEGIN_FACTS: Final = frozenset({"dt", "h2"})
_END_FACTS: Final = frozenset({"dl", "section", "aside", "main"})


class ServedPage(HTMLParser):
    """The facts of a page by what they are called, the names of its tables' rows, and all of its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.facts: dict[str, str] = {}
        self.rows: list[str] = []
        self._name: list[str] = []
        self._value: list[str] = []
        self._into: list[str] | None = None
        self._texts: list[str] = []
        self.feed(html)
        self.close()

    @property
    def text(self) -> str:
        """What is read."""
        return _joined(self._texts)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """A fact is a heading of the health strip or a term of a list, with what follows it."""
        if tag in _BEGIN_FACTS or (tag == "th" and ("scope", "row") in attrs):
            self._keep()
            self._into = self._name
        elif tag == "p" and self._into is self._value and self._value:
            self._value.append(",")  # a sentence beside what is marked

    def handle_endtag(self, tag: str) -> None:
        """The value of a fact goes on to the next one, or to the end of the list."""
        if tag in _BEGIN_FACTS and self._into is self._name:
            self._into = self._value
        elif tag == "th" and self._into is self._name:
            self.rows.append(_joined(self._name))
            self._name, self._into = [], None
        elif tag in _END_FACTS:
            self._keep()

    def handle_data(self, data: str) -> None:
        """Text of a name, of a value, or of neither."""
        self._texts.append(data)
        if self._into is not None:
            self._into.append(data)

    def _keep(self) -> None:
        if self._name:
            self.facts.setdefault(_joined(self._name), _joined(self._value))
        self._name, self._value, self._into = [], [], None


def _joined(texts: list[str]) -> str:
    return " ".join(" ".join(texts).split()).replace(" ,", ",")


class PagesAct:
    """Looks at the pages of a running catalog, and checks that they say what the demo knows."""

    def __init__(self, url: str, narrator: Narrator) -> None:
        self._url = url
        self._narrator = narrator
        self._seen: list[tuple[str, str]] = []

    def tell(self, runs: set[str], whole: Checkpoint, damaged: Checkpoint, export: Checkpoint) -> None:
        """``whole`` was verified, ``damaged`` is its copy with the flipped bit, ``export`` was made of one of
        the same values."""
        self._narrator.say("The same service has pages for people. What they say, fetched as a browser does:")
        # with a transport of its own no proxy is asked for what is on this machine
        headers = {"accept": "text/html"}
        with httpx.Client(base_url=self._url, headers=headers, transport=httpx.HTTPTransport()) as http:
            listed = {row.split(" ")[0] for row in self._page(http, "/").rows}
            strip = self._page(http, f"/checkpoints/{whole.id}/files").facts
            broken = self._page(http, f"/checkpoints/{damaged.id}").facts
            origin = self._page(http, f"/checkpoints/{export.id}/lineage").rows
        self._note("/", f"{len(listed)} runs: {', '.join(sorted(listed))}")
        for name in ("Committed", "Verified", "Loads in stock torch", "Resumes on"):
            self._note(f"/checkpoints/{whole.id}/files", f"{name}: {strip.get(name, 'nothing is said')}")
        self._note(f"/checkpoints/{damaged.id}", f"Resumes on: {broken.get('Resumes on', 'nothing is said')}")
        self._note(f"/checkpoints/{export.id}/lineage", " and ".join(origin))
        self._narrator.table(["page", "what it says"], self._seen)
        self._check("the first page lists every run", listed == runs, f"{sorted(listed ^ runs)}")
        is_good = "verified" in strip.get("Verified", "") and "any number" in strip.get("Resumes on", "")
        self._check(
            f"step {whole.step} is shown as verified, for stock torch and for any number of ranks",
            is_good and strip.get("Loads in stock torch", "").startswith("yes"),
            f"{strip}",
        )
        is_bad = "damaged" in broken.get("Verified", "") and "nothing" in broken.get("Resumes on", "")
        self._check("its copy with the flipped bit is shown as damaged", is_bad, f"{broken}")
        made_of = {row.partition("/")[0] for row in origin}  # and what that training was resumed from
        is_told = {"released", "exports"} <= made_of
        self._check("the export is shown with what it was made of", is_told, f"{origin}")

    def _page(self, http: httpx.Client, path: str) -> ServedPage:
        answer = http.get(path)
        if answer.status_code != 200 or not answer.headers["content-type"].startswith("text/html"):
            raise DemoError(f"the page {path} was answered with {answer.status_code}")
        return ServedPage(answer.text)

    def _note(self, path: str, said: str) -> None:
        self._seen.append((path, said))

    def _check(self, claim: str, held: bool, reason: str) -> None:
        self._narrator.check(f"pages: {claim}", held, reason)
