"""Pages of the catalog without scripts: names, filters, actions, roots and large runs."""

from __future__ import annotations

import math
import re
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import pytest
import torch

import dcp
from tests.support.app import App
from tests.support.catalog import Catalog
from tests.support.catalog_rows import add_checkpoint
from tests.support.page_rows import add_steps, structure_of
from tests.support.pages import HOSTILE, Browser, PageText, faults_of


def reached(browser: Browser, *starts: str, most: int = 120) -> dict[str, PageText]:
    """Follow links from ``starts`` to one page of each kind, except pages that read stored files."""
    found: dict[str, PageText] = {}
    waiting, seen = [*starts], set()
    while waiting and len(found) < most:
        path = waiting.pop(0)
        parts = urlsplit(path)
        kind = (re.sub(r"\d+", "1", parts.path), re.sub(r"=[^&]*", "", parts.query))
        if (
            kind in seen
            or parts.path in ("/docs", "")
            or parts.path.endswith(("/download", "/files", "/diff", "/tensors", "/shards", "/anatomy"))
        ):
            continue
        seen.add(kind)
        if parts.path.startswith("/api/"):
            assert browser.get(path).status_code == 200, path
            continue
        answer = browser.get(path)
        page = PageText(answer.text)
        assert answer.status_code in (200, 410) and faults_of(page) == [], path
        if answer.status_code == 410:  # no stored files
            assert "/".join(parts.path.split("/")[:3]) in page.links, path
            continue
        found[path] = page
        waiting += page.links
    return found


def test_each_linked_page_exists(app: App, browser: Browser) -> None:
    """Each linked page exists, with its JSON; a hostile run name adds no element that the policy forbids."""
    run = f"run {HOSTILE[0].replace('/', '|')} {HOSTILE[1]}"
    first = add_checkpoint(app.service.database, f"{run}/step-1", metrics={"loss": 2.0, "acc": 0.1})
    add_checkpoint(app.service.database, f"{run}/step-2", metrics={"loss": 1.0, "acc": 0.3})
    add_checkpoint(app.service.database, "lonely", root="other", step=None)
    form = browser.page(f"/checkpoints/{first}").form(f"/checkpoints/{first}/jobs/verify")
    assert browser.submit(form).url.path == "/jobs/1"
    pages = reached(browser, "/", "/search?q=run")
    kinds = {re.sub(r"\d+", "1", urlsplit(path).path) for path in pages}
    assert {
        "/",
        "/checkpoints",
        "/checkpoints/1",
        "/jobs",
        "/jobs/1",
        "/roots",
        "/runs/1",
        "/search",
    } <= kinds
    for path, page in pages.items():
        twins = [given["href"] for name, given in page.elements if given.get("class") == "twin"]
        assert twins and not [1 for name, _ in page.elements if name == "img"], path


@pytest.mark.parametrize("name", HOSTILE)
def test_names_and_metadata_are_escaped(app: App, browser: Browser, name: str) -> None:
    """Names of runs, checkpoints and tensors, and metadata, are escaped, isolated and complete in the title.
    Characters that change the text direction are written as escapes, except in form fields."""
    key = f"{name.replace('/', '|')[:400]}/{name.replace('/', '|')[:400]}"
    found = add_checkpoint(
        app.service.database,
        key,
        step=1,
        structure=structure_of([f"model.{name * 11}"]),
        user_metadata={name: name},
        provenance={"torch_version": name},
    )
    run = re.sub("[\u202e\u2067]", lambda found: f"\\u{ord(found.group()):04x}", key.split("/")[0])
    form = browser.page(f"/checkpoints/{found}").form(f"/checkpoints/{found}/convert")
    assert form.fields["target_key"].startswith(key[:300])
    for path in ("/", "/checkpoints", "/runs/1", f"/checkpoints/{found}", f"/checkpoints/{found}?view=list"):
        page = browser.page(path)
        assert run in page.text.replace("\n", " ") or run.split()[0] in page.text, path
        assert not re.search("[\u202a-\u202e\u2066-\u2069]", page.text), path
        isolated = {n for n, given in page.elements} >= {"bdi"}
        assert isolated, path
        assert len([1 for n, _ in page.elements if n == "img"]) == 0, path
    listed = browser.get(f"/checkpoints/{found}?view=list").text
    assert len(listed) < 200_000 + 3 * len(name) * 11
    assert faults_of(PageText(browser.get("/search", params={"q": name[:200]}).text)) == []


def test_filters_counts_and_pages(app: App, browser: Browser) -> None:
    """Choices are kept in the URL; counts show the effect of other filters; pages follow each other."""
    add_checkpoint(app.service.database, "run/step-0")
    add_steps(app, "run/step", range(1, 121), mixed=True)
    first = browser.page("/runs/1?format=torch_dcp")
    assert "60 checkpoints" in first.text
    assert "torch_dcp 60" in first.text and "dcp 61" in first.text
    assert len(_steps(first)) == 50
    (next_page,) = [given["href"] for _, given in first.elements if given.get("rel") == "next"]
    assert "format=torch_dcp" in next_page
    second = browser.page(next_page)
    assert len(_steps(second)) == 10
    assert not set(_steps(first)) & set(_steps(second))
    assert browser.get("/runs/1?format=nonsense").status_code == 422
    nothing = browser.page("/runs/1?format=torch_dcp&verification=damaged")
    assert "damaged 0" in nothing.text and "/runs/1?format=torch_dcp" in nothing.links  # without the filter
    assert browser.get("/runs/1?unknown=1").status_code == 422
    assert "115 would be deleted" in browser.page("/runs/1?keep_last=3&format=dcp").text  # of both formats


def _steps(page: PageText) -> list[str]:
    """Return the links to checkpoints in the list."""
    places = [given.get("id") for _, given in page.elements]
    rows = page.elements[places.index("checkpoints") : places.index("retention")]
    return [given["href"] for name, given in rows if given.get("href", "").startswith("/checkpoints/")]


def test_labels_by_forms(app: App, browser: Browser) -> None:
    """Tags and pins are added and removed with forms; an invalid alias gets 422."""
    one = add_checkpoint(app.service.database, "run/step-1")

    def send(action: str, **fields: str) -> str:
        forms = [f for f in browser.page(f"/checkpoints/{one}").forms if f.action.endswith(f"/{action}")]
        answer = browser.submit(forms[0], **fields)
        return PageText(answer.text).text if answer.status_code == 200 else str(answer.status_code)

    assert "Tag added." in send("tags", tag="release")
    assert app.base.get(f"/api/v1/checkpoints/{one}").json()["tags"] == ["release"]
    assert "Tag removed." in send("tags")
    assert "Pinned: protected from deletion." in send("pin")
    assert "No longer pinned" in send("pin")
    assert "names this checkpoint" in send("alias", alias="best")
    assert send("alias", alias="no blanks") == "422"


def test_a_moved_alias_can_be_moved_back(app: App, browser: Browser) -> None:
    """A moved alias is confirmed and can be moved back, unless another change came between."""
    one, two, three = (add_checkpoint(app.service.database, f"run/step-{n}") for n in (1, 2, 3))
    stranger = add_checkpoint(app.service.database, "another/step-1")

    def named() -> int | None:
        answer = app.base.get("/api/v1/runs/1/aliases/best")
        return answer.json()["checkpoint_id"] if answer.status_code == 200 else None

    def set_to(number: int) -> PageText:
        page = browser.page(f"/checkpoints/{number}")
        shown = PageText(browser.submit(page.form(f"/checkpoints/{number}/alias"), alias="best").text)
        if "Labels" in shown.text:
            return shown
        assert "Move best ?" in shown.text and named() != number
        return PageText(browser.submit(shown.form(f"/checkpoints/{number}/alias")).text)

    set_to(one)
    moved = set_to(two)
    assert "names this checkpoint now" in moved.text and "Undo: set it on step 1 again" in moved.text
    back = PageText(browser.submit(moved.form(f"/checkpoints/{one}/alias")).text)
    assert named() == one and "Undo: set it on step 2 again" in back.text
    removed = PageText(browser.submit(back.form(f"/checkpoints/{one}/unalias")).text)
    assert named() is None and " removed." in removed.text
    browser.submit(next(form for form in removed.forms if form.fields.get("alias") == "best"))
    assert named() == one
    moved = set_to(two)
    set_to(three)
    assert browser.submit(moved.form(f"/checkpoints/{one}/alias")).status_code == 412
    assert named() == three
    lies = ["moved:99:best", "moved:9999999999999999999:best", "moved:٣:best", "moved::", "moved:1:<script>"]
    for done in (*lies, f"moved:{one}:best", f"moved:{stranger}:best", f"unaliased:{stranger}:best"):
        assert "Undo" not in browser.page(f"/checkpoints/{two}?{urlencode({'done': done})}").text, done


def test_merging_and_averaging(app: App, browser: Browser) -> None:
    """Merges by id and by URL, and averages of the newest steps, become jobs; invalid fields get 422."""
    numbers = [add_checkpoint(app.service.database, f"run/step-{step}") for step in (1, 2, 3)]
    path = f"/checkpoints/{numbers[0]}"
    form = browser.page(path).form(f"{path}/merge")
    assert form.fields["target_key"] == "run/step-1-merged"
    others = f"{numbers[1]}, http://here/checkpoints/{numbers[2]}?view=list"
    given = {"with": others, "target_key": "soup", "leave_out": "optimizer, lr*", "accumulate": "float64"}
    given["to"] = "safetensors"
    answer = browser.submit(form, **given, weights="0.5, -1e-1,2")
    assert answer.url.path == "/jobs/1"
    params = app.base.get("/api/v1/jobs/1").json()["params"]
    assert (params["sources"], params["weights"]) == (numbers, [0.5, -0.1, 2.0])
    assert (params["exclude"], params["accumulate"]) == (["optimizer", "lr*"], "float64")
    browser.submit(form, **given | {"target_key": "other"}, formula="A + 0.4*(B - C)")
    assert app.base.get("/api/v1/jobs/2").json()["params"]["formula"] == "A + 0.4*(B - C)"
    run = app.base.get(f"/api/v1{path}").json()["run_id"]
    average = browser.page(f"/runs/{run}").form(f"/runs/{run}/merge")
    assert average.fields["last"] == "3" and average.fields["target_key"] == "run-average"
    assert browser.submit(average, to="dcp", decay="0.9").url.path == "/jobs/3"
    params = app.base.get("/api/v1/jobs/3").json()["params"]
    assert (params["run_id"], params["last"], params["decay"]) == (run, 3, 0.9)
    for wrong in (
        {"with": "step-2"},
        {"with": str(numbers[1]), "weights": "1"},
        {"with": str(numbers[1]), "weights": "1, much"},
        {"with": str(numbers[1]), "weights": "nan, 1"},
        {"with": str(numbers[0])},
    ):
        assert browser.submit(form, **{"to": "dcp", "target_key": "no", **wrong}).status_code == 422, wrong
    for odd in ({"last": "inf"}, {"last": "1.5"}, {"last": "0"}, {"last": "3", "decay": "1"}):
        assert browser.submit(average, **{"to": "dcp", "target_key": "no", **odd}).status_code == 422, odd
    assert browser.submit(average, to="dcp", last="4", target_key="no").status_code == 409


def test_deleting_and_undoing(app: App, browser: Browser) -> None:
    """A deletion can be undone on its page; stale forms change nothing, refused forms keep typed values."""
    number = add_checkpoint(app.service.database, "run/step-1")
    before = browser.page(f"/checkpoints/{number}")
    deleted = PageText(browser.submit(before.form(f"/checkpoints/{number}/delete")).text)
    assert re.search(r"Deleted \S.* by local \. It can be restored until", deleted.text), "who and when"
    restored = PageText(browser.submit(deleted.form(f"/checkpoints/{number}/restore")).text)
    assert "Restored." in restored.text
    stale = browser.submit(before.form(f"/checkpoints/{number}/delete"))
    assert (stale.status_code, f"/checkpoints/{number}" in PageText(stale.text).links) == (412, True)
    path = f"/checkpoints/{number}/convert"
    wrong = browser.submit(before.form(path), target_key="../away", dtype="float16")
    assert (wrong.status_code, f"/checkpoints/{number}" in PageText(wrong.text).links) == (422, True)
    again = PageText(wrong.text).form(path)
    assert (again.fields["target_key"], again.fields["dtype"]) == ("../away", "float16")
    made = browser.submit(again, to="safetensors", target_key="run/half")
    assert made.url.path == "/jobs/1", "nothing else is typed again"
    assert app.base.get("/api/v1/jobs/1").json()["params"]["dtype"] == "float16"


def green_badges(page: PageText) -> int:
    """Count the green badges of a page."""
    return sum(given.get("class") == "badge good" for _, given in page.elements)


def test_a_checkpoint_without_its_data_is_not_green(app: App, tmp_path: Path) -> None:
    """Pages of a verified checkpoint have no green badge after a file is lost, and name the missing file."""
    folder = tmp_path / "main/run/step-1"
    dcp.save({"w": torch.ones(4)}, checkpoint_id=folder, no_dist=True)
    catalog = Catalog(app, tmp_path)
    number = catalog.register("run/step-1")
    assert catalog.do("verify", checkpoint_id=number)["result"]["outcome"] == "good"
    browser, path = Browser(app.client()), "/api/v1/checkpoints/1/files"
    page = browser.page(f"/checkpoints/{number}")
    assert any(f"/checkpoints/{number}/files" == given.get("hx-get") for _, given in page.elements)
    assert green_badges(page) == 3, "committed, verified, its job; files are not checked yet"
    whole = browser.page(f"/checkpoints/{number}/files")
    assert (green_badges(whole), app.base.get(path).json()["missing"]) == (4, [])
    (data,) = folder.glob("*.distcp")
    size = data.stat().st_size
    data.write_bytes(b"x")
    cut = browser.page(f"/checkpoints/{number}/files")
    assert green_badges(cut) == 0 and f"{data.name} has 1 B" in cut.text
    data.unlink()
    lost = browser.page(f"/checkpoints/{number}/files")
    assert green_badges(lost) == 0 and f"{data.name} is missing" in lost.text
    missing = {"name": data.name, "bytes": None, "expected_bytes": size}
    assert app.base.get(path).json()["missing"] == [missing]


def test_partial_saves_and_nans_are_marked(app: App, browser: Browser) -> None:
    """A partial save is marked as partial; a NaN metric is shown instead of the last finite value."""
    for step, user in ((1, {}), (2, {"metrics": {"loss": math.nan, "lr": 0.1}, "partial": ["model"]})):
        metrics = {"loss": 0.25} if step == 1 else {"lr": 0.1}
        number = add_checkpoint(app.service.database, f"run/step-{step}", user_metadata=user, metrics=metrics)
    found = app.base.get(f"/api/v1/checkpoints/{number}").json()
    assert (found["nonfinite_metrics"], found["partial"]) == ({"loss": "nan"}, ["model"])
    shown = browser.page(f"/checkpoints/{number}").text
    assert "partial state only model" in shown and "loss NaN" in shown
    assert "partial" in browser.page(f"/checkpoints/{number}").text.partition("Committed")[0]
    assert "loss NaN" in browser.page("/").text and "0.25" not in browser.page("/").text
    rows = browser.page("/checkpoints").text
    assert "NaN" in rows and "partial" in rows
    run = browser.page("/runs/1").text
    assert "NaN or infinite in 1 checkpoint, at step 2" in run
    series = app.base.get("/api/v1/runs/1/series?metric=loss").json()
    assert (series["count"], series["nonfinite_count"], series["last_nonfinite_step"]) == (1, 1, 2)


def test_a_job_that_found_damage_is_not_green(app: App, browser: Browser, tmp_path: Path) -> None:
    """A job that found damage is not green; the checkpoint's page has the findings and no promise to load."""
    catalog = Catalog(app, tmp_path)
    number = catalog.add("run/step-1")  # without data
    assert "any number of ranks" in browser.page(f"/checkpoints/{number}").text
    browser.submit(browser.page(f"/checkpoints/{number}").form(f"/checkpoints/{number}/jobs/verify"))
    catalog.work()
    for path, of_tasks in (("/jobs", 0), ("/jobs/1", 1)):  # the task itself succeeded
        page = browser.page(path)
        assert "damaged" in page.text and green_badges(page) == of_tasks, path
    (finding,) = app.base.get("/api/v1/jobs/1").json()["result"]["findings"]
    assert finding["message"] in browser.page("/jobs/1").text
    text = browser.page(f"/checkpoints/{number}").text
    assert finding["message"] in text.partition("Verifications")[2]
    strip = text.partition("Loads in stock torch")[2].partition("Facts")[0]
    assert "any number" not in strip and " yes" not in strip and "damaged" in strip


def test_large_pages_are_compressed(app: App) -> None:
    """Large pages are compressed on request, small and tagged responses are not; each has its own token."""
    for step in range(40):
        add_checkpoint(app.service.database, f"run/step-{step}")
    client = app.client()
    whole = client.get("/runs/1", headers={"Accept": "text/html", "Accept-Encoding": "identity"})
    sent = client.get("/runs/1", headers={"Accept": "text/html", "Accept-Encoding": "br, gzip"})
    assert "content-encoding" not in whole.headers and sent.headers["content-encoding"] == "gzip"
    assert int(sent.headers["content-length"]) * 5 < int(whole.headers["content-length"])
    assert "Accept-Encoding" in whole.headers["vary"] and "Accept-Encoding" in sent.headers["vary"]
    assert abs(len(sent.text) - len(whole.text)) < 100 and "step 39" in sent.text
    tokens = {PageText(one.text).form("/theme").fields["token"] for one in (whole, sent)}
    assert len(tokens) == 2
    for path, given in (
        ("/healthz", {}),
        ("/api/v1/checkpoints/1", {}),  # has an ETag
        ("/runs/1", {"Accept": "text/html", "Accept-Encoding": "gzip;q=0"}),
    ):
        assert "content-encoding" not in client.get(path, headers=given).headers, path


def test_a_job_is_cancelled_and_retried(app: App, browser: Browser) -> None:
    """A job is cancelled and retried with buttons; the page names its checkpoint, the log the actor."""
    number = add_checkpoint(app.service.database, "run/step-1")
    browser.submit(browser.page(f"/checkpoints/{number}").form(f"/checkpoints/{number}/jobs/verify"))
    queued = browser.page("/jobs/1")
    assert "run/step-1" in queued.text and "run/step-1" in browser.page("/jobs").text
    assert any("/api/v1/jobs/1/events" in given.get("sse-connect", "") for _, given in queued.elements)
    followed = browser.page(f"/checkpoints/{number}")
    assert ".live > *" in {given.get("hx-select") for _, given in followed.elements}
    for page in (queued, followed):  # both contain the state, which changes
        assert "its-state" in {given.get("class") for _, given in page.elements}
    assert browser.submit(queued.form("/jobs/1/cancel")).status_code == 200
    assert browser.submit(queued.form("/jobs/1/cancel")).status_code == 200  # a second cancellation succeeds
    cancelled = browser.page("/jobs/1")
    assert app.base.get("/api/v1/jobs/1").json()["state"] == "cancelled"
    assert "local" in cancelled.text.partition("Log")[2]
    assert browser.submit(cancelled.form("/jobs/1/retry")).status_code == 200
    assert app.base.get("/api/v1/jobs/1").json()["state"] == "queued"


def test_keys_that_only_read_see_no_forms(keyed: App) -> None:
    """A key that only reads sees no forms, and is refused if it submits them anyway."""
    number = add_checkpoint(keyed.service.database, "run/step-1")
    reader, writer = Browser(keyed.client()), Browser(keyed.client())
    reader.sign_in(keyed.key("read"))
    writer.sign_in(keyed.key("read", "write", "convert", "delete"))
    actions = {"jobs/verify", "convert", "merge", "delete", "tags", "alias", "pin"}
    offered = {
        form.action.removeprefix(f"/checkpoints/{number}/")
        for form in writer.page(f"/checkpoints/{number}").forms
    }
    assert actions <= offered
    page = reader.page(f"/checkpoints/{number}")
    assert not actions & {form.action.removeprefix(f"/checkpoints/{number}/") for form in page.forms}
    assert "/main" not in page.text.replace("runs/main", ""), "where a root is, only administrators see"
    token = page.form("/theme").fields["token"]
    for action in sorted(actions):
        answer = reader.client.post(f"/checkpoints/{number}/{action}", data={"token": token, "tag": "x"})
        assert answer.status_code == 403, action
    assert keyed.client("read", name="r2").get(f"/api/v1/checkpoints/{number}").json()["tags"] == []


def test_hidden_roots_are_not_shown(keyed: App, of_main: Browser) -> None:
    """Hidden roots appear in no list, count, search or neighbor; their ids get 404."""
    own = add_checkpoint(keyed.service.database, "shared-name/step-1")
    other = add_checkpoint(keyed.service.database, "secret-name/step-2", root="other")
    for path in (
        "/",
        "/checkpoints",
        "/checkpoints?state=any",
        "/search?q=name",
        "/roots",
        f"/checkpoints/{own}",
    ):
        assert "secret" not in of_main.get(path).text, path
        assert "other" not in PageText(of_main.get(path).text).text.replace("Other values", ""), path
    for path in (f"/checkpoints/{other}", f"/checkpoints/{other}/files", "/runs/2"):
        assert of_main.get(path).status_code == 404, path
    hidden, missing = of_main.get("/?root=other"), of_main.get("/?root=another")
    assert hidden.status_code == missing.status_code == 422
    assert of_main.get("/lookup?root=other&key=secret-name/step-2").status_code == 404


def test_hidden_roots_are_not_compared(keyed: App, of_main: Browser, tmp_path: Path) -> None:
    """No page, difference or job shows a checkpoint of a hidden root: each answers as for a missing one."""
    own = add_checkpoint(keyed.service.database, "shared-name/step-1")
    other = add_checkpoint(keyed.service.database, "secret-name/step-2", root="other")
    dcp.save({"w": torch.ones(1)}, checkpoint_id=tmp_path / "main/shared-name/step-1", no_dist=True)
    all_roots = keyed.client("read", name="all-roots")
    for a, b in ((own, other), (other, own)):
        body = {"kind": "diff", "params": {"a": a, "b": b}}
        assert all_roots.post("/api/v1/jobs", json=body).status_code == 202
    parts = ("shards", "shards/chunks", "anatomy", "layers", "lineage", "will-it-load", "tensors?fqn=w")
    for path in (
        *(f"/checkpoints/{other}/{part}" for part in parts),
        *(f"/checkpoints/{other}/tensors/{part}?fqn=w" for part in ("slice", "steps")),
        f"/diff?a={own}&b={other}",
        f"/diff?a={other}&b={own}",
        f"/diff?of={own}&of={other}",
        f"/diff?b={other}",
        f"/checkpoints/{own}/will-it-load?state_of={other}",
        f"/checkpoints/{own}/will-it-load?shapes_job=1",
        "/runs/2/drift",
        *(
            f"/{page}/{job}{rest}"
            for job in (1, 2)
            for page, rest in (("jobs", ""), ("api/v1/jobs", "/events"))
        ),
    ):
        assert of_main.get(path).status_code == 404, path
    assert not [link for link in of_main.page("/jobs").links if link.startswith("/jobs/")]
    token = of_main.page("/jobs").form("/theme").fields["token"]
    for path, fields in (
        ("/diff/values", {"a": other, "b": own}),
        ("/diff/values", {"a": own, "b": other}),
        ("/diff/values", {"a": other, "b": own, "on": "checkpoint"}),
        (f"/checkpoints/{other}/statistics", {}),
        (f"/checkpoints/{other}/will-it-load", {"text": '{"w": [1]}'}),
        ("/runs/2/drift", {}),
        ("/jobs/1/cancel", {}),
    ):
        answer = of_main.client.post(path, data={"token": token, **fields})
        assert answer.status_code == 404, (path, answer.text)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("steps", "layers"), [(5_000, 5_000)])
def test_pages_of_large_runs_stay_small(app: App, browser: Browser, steps: int, layers: int) -> None:
    """Pages stay small with thousands of steps and layers."""
    structure = structure_of([f"m.layers.{n}.{part}" for n in range(layers) for part in "abcdefghij"])
    number = add_checkpoint(app.service.database, "big/step-0", structure=structure)
    add_steps(app, "big/step", range(1, steps + 1), loss=True)
    for path in (
        "/",
        "/checkpoints",
        "/runs/1",
        f"/checkpoints/{number}",
        f"/checkpoints/{number}?glob=layers.4",
    ):
        answer = browser.get(path)
        assert answer.status_code == 200, path
        assert len(answer.content) < 400_000, (path, len(answer.content))
    assert f"{steps + 1:,}" in browser.page("/runs/1").text
