"""Pages of the shards of a checkpoint and of the phases of its save."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch

from tests.support.app import App
from tests.support.catalog_roots import age
from tests.support.catalog_rows import add_checkpoint
from tests.support.page_rows import registered as note_one
from tests.support.page_rows import set_provenance
from tests.support.pages import Browser, PageText
from tests.support.sharded import grid, save_sharded

HOSTILE = "<img src=x onerror='alert(1)'>\u202e{{ 7*7 }}"


def sharded(app: App, tmp_path: Path, **provenance: Any) -> int:
    """Save a checkpoint of four ranks, with a replicated tensor, and return its id."""
    tensors = {"layers.0.w": torch.ones(64, 64), HOSTILE: torch.ones(6, 8), "twice": torch.ones(10)}
    boxes = {
        "layers.0.w": grid((64, 64), (4, 1)),
        HOSTILE: grid((6, 8), (3, 2)),
        "twice": [((0,), (10,))] * 2,
    }
    path = save_sharded(tmp_path / "main/run/step-1", tensors, boxes)
    set_provenance(path, {"world_size": 5, **provenance})
    return registered(app, path, "run/step-1")


def registered(app: App, path: Path, key: str) -> int:
    """Register a checkpoint, and return its id."""
    age(path)
    return note_one(app, key)


def test_the_page_shows_bytes_by_rank(app: App, browser: Browser, tmp_path: Path) -> None:
    """The page shows bytes by rank in text and links; ranks lead to a part, chunks have a page."""
    number = sharded(app, tmp_path)
    assert f"/checkpoints/{number}/shards" in browser.page(f"/checkpoints/{number}").links
    page = browser.page(f"/checkpoints/{number}/shards")
    assert "Rank 0 wrote 1.02 times" not in page.text
    assert "All ranks wrote about the same amount" in page.text and "1 of 5 ranks wrote nothing." in page.text
    assert "80 B belong to tensors stored more than once." in page.text
    for below in ("shards", "shards/chunks"):
        assert browser.get(f"/checkpoints/{number}/{below}?glob=a%7F").status_code == 422
    part = next(link for link in page.links if "first_rank=2" in link)
    assert parse_qs(urlsplit(part).query) == {"first_rank": ["2"], "last_rank": ["2"]}
    narrowed = browser.page(part)
    assert "Rank 2 wrote all bytes" in narrowed.text and "nothing" not in narrowed.text
    twin = next(given["href"] for _, given in narrowed.elements if given.get("class") == "twin")
    assert [row["first_rank"] for row in browser.get(twin).json()["rows"]] == [2]
    assert f"/checkpoints/{number}/shards" in narrowed.links
    chunks = next(link for link in narrowed.links if "/shards/chunks?" in link)
    assert "first_rank=2" in chunks
    listed = browser.page(chunks)
    assert "32:48, 0:64" in listed.text and "__2_0.0badc0de.distcp" in listed.text
    assert browser.get(f"/checkpoints/{number}/shards?first_rank=9").text.count("No rank in this part") == 1
    for wrong in ("begin=5&end=5", "colour=red", "x=1", "first_rank=-1"):
        assert browser.get(f"/checkpoints/{number}/shards?{wrong}").status_code == 422, wrong


def test_the_page_shows_blocked_time_of_a_save(app: App, browser: Browser, tmp_path: Path) -> None:
    """The page separates blocked time from background work, by phase and rank, and marks stragglers."""
    ranks = [
        {"blocked": 0.5, "staging": 0.4, "local_plan": 0.01, "plan": 0.2, "write": 2.0 + 3 * (rank == 70)}
        for rank in range(128)
    ]
    number = sharded(app, tmp_path, rank_seconds=ranks, assemble_seconds=0.25)
    assert f"/checkpoints/{number}/anatomy" in browser.page(f"/checkpoints/{number}").links
    page = browser.page(f"/checkpoints/{number}/anatomy")
    assert "Training waited 0.5 s; 5.2 s ran in the background." in page.text
    assert "it waited for rank 70, which took 5.0 s, 2.5 times the median of 2.0 s." in page.text
    assert page.text.index("local plan of plan") > page.text.index("plan background")
    cells = [
        given["class"] for name, given in page.elements if name == "td" and "h" in given.get("class", "")
    ]
    assert sum("straggler" in one for one in cells) == 1
    assert "The coordinator made the index in 0.2 s" in page.text
    group = next(link for link in page.links if "first_rank=70" in link and "last_rank=71" in link)
    narrowed = browser.page(group)
    rows = [1 for name, given in narrowed.elements if name == "th" and given.get("scope") == "row"]
    assert len(rows) == 5 + 2
    assert "All 128 ranks" in narrowed.text and "2.5 times the median" in narrowed.text
    assert "No such ranks" in browser.page(f"/checkpoints/{number}/anatomy?first_rank=500").text


def test_formats_without_ranks_and_phases(app: App, browser: Browser, tmp_path: Path) -> None:
    """Other formats have no ranks and phases; missing files get 410 and an unknown id 404."""
    path = tmp_path / "main" / "weights.pt"
    torch.save({"w": torch.ones(4, 4)}, path)
    number = registered(app, path, "weights.pt")
    assert "do not show which rank wrote them" in browser.page(f"/checkpoints/{number}/shards").text
    assert (
        "This checkpoint has no recorded phases of its save."
        in browser.page(f"/checkpoints/{number}/anatomy").text
    )
    gone = add_checkpoint(app.service.database, "gone/step-1")
    of_tensor = [f"tensors{part}?fqn=w" for part in ("", "/slice", "/steps")]
    for page in ("shards", "shards/chunks", "anatomy", "files", *of_tensor):
        answer = browser.get(f"/checkpoints/{gone}/{page}")
        assert answer.status_code == 410, page
        assert f"/checkpoints/{gone}" in PageText(answer.text).links, "back to what the catalog knows"
        assert browser.get(f"/checkpoints/999/{page}").status_code == 404, page
