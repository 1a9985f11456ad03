"""Files and folders skipped by a scan, with counts and reasons, and links inside and out of a root."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.support.catalog import API, Catalog
from tests.support.catalog_roots import age

MAX_DEPTH = 24
STATE = {"w": torch.arange(8.0)}


def test_invalid_names_are_counted_by_reason(catalog: Catalog) -> None:
    """Names that are invalid as keys, too deep or too long are counted by reason, with an example."""
    catalog.save("run/step-1")
    for name in ("two\nlines", "\x1b[2Jansi", "back\\slash", "%2e%2e", "~home", "a::b"):
        catalog.save(f"{name}/step-1")
    catalog.place("run/new\nline.pt").write_bytes(b"x")
    catalog.save("/".join(["deep"] * (MAX_DEPTH + 1) + ["step-1"]))
    catalog.save("/".join(["l" * 200] * 5 + ["m" * 100]))
    report = catalog.scan()
    assert list(catalog.states()) == ["run/step-1"]
    found = {line.removeprefix("skipped: ").partition(", such as ")[0] for line in report["trouble"]}
    assert found == {
        "names invalid as keys: contains control characters or invalid Unicode: 3",
        "names invalid as keys: each part between its slashes must be a plain name of up to 255 bytes: 2",
        "names invalid as keys: a key is a path in the root, not a URL: 1",
        "names invalid as keys: no part may end in ':' or begin with '~': 1",
        f"more than {MAX_DEPTH} folders deep: 1",
        "keys of more than 1024 characters: 1",
    }
    assert "".join(report["trouble"]).isprintable()
    root = catalog.get("/roots/main")
    assert root["scan_error"] is None
    assert root["last_scan"]["trouble"] == report["trouble"]


def _hub(folder: Path) -> Path:
    """Create the cache of a model hub: a snapshot of links to nameless blobs."""
    snapshot = folder / "models--org--name" / "snapshots" / ("ab" * 20)
    blobs = folder / "models--org--name" / "blobs"
    for each in (snapshot, blobs):
        each.mkdir(parents=True)
    save_file(STATE, blobs / "0123abcd")
    (blobs / "4567ef").write_text("{}")
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123abcd")
    (snapshot / "config.json").symlink_to("../../blobs/4567ef")
    return snapshot


def test_the_cache_of_a_model_hub_is_catalogued(catalog: Catalog) -> None:
    """Snapshots in the cache of a model hub are found, registered and downloaded, and opened once."""
    snapshot = _hub(catalog.place(""))
    age(catalog.place(""))
    assert catalog.scan()["trouble"] == []
    key = str(snapshot.relative_to(catalog.place("")))
    assert catalog.states() == {key: "committed"}
    row = catalog.rows()[key]
    assert (row["format"], row["step"], row["bytes"] > 32) == ("safetensors", None, True)
    assert catalog.register(key) == row["id"]
    assert catalog.scan()["opened"] == 0
    answer = catalog.http.get(f"{API}/checkpoints/{row['id']}/files/model.safetensors")
    assert answer.content == (snapshot / "model.safetensors").read_bytes()


def test_links_inside_the_root_are_followed_once(catalog: Catalog) -> None:
    """A link inside the root is followed if its target is not found otherwise; cycles end."""
    for key in ("run/step-1", "run/step-2", ".store/moved/step-7"):
        catalog.save(key)
    save_file(STATE, catalog.place("run/epoch-3.safetensors"))
    torch.save(STATE, catalog.place(".store/blob"))
    links = {
        "run/latest": "step-2",
        "run/last.safetensors": "epoch-3.safetensors",
        "all": ".",
        "run/up": "..",
        "moved": ".store/moved",
        "again": ".store/moved",
        ".store/moved/back": "..",
        "best.pt": ".store/blob",
        "round": "about",
        "about": "round",
    }
    for name, target in links.items():
        catalog.place(name).symlink_to(target)
    age(catalog.place("run"))
    report = catalog.scan()
    assert catalog.states() == dict.fromkeys(
        ["again/step-7", "best.pt", "run/epoch-3.safetensors", "run/step-1", "run/step-2"], "committed"
    )
    assert report["trouble"] == ["skipped: circular links: 2, such as 'about'"]


def test_links_out_of_the_root_are_not_followed(catalog: Catalog) -> None:
    """Links out of the root are counted, not followed; a checkpoint replaced by a link does not vanish."""
    outside = catalog.folder / "outside"
    for key in ("a/step-1", "a/step-2", "b/step-1", "c/step-1"):
        catalog.save(key)
    save_file(STATE, catalog.folder / "secret.safetensors")
    catalog.scan()
    outside.mkdir()
    for key in ("a/step-1", "b"):
        shutil.move(catalog.place(key), outside / key.replace("/", "-"))
        catalog.place(key).symlink_to(outside / key.replace("/", "-"))
    for name, target in (
        ("model.safetensors", catalog.folder / "secret.safetensors"),
        ("gone.pt", Path("nothing")),
        ("notes.txt", catalog.folder / "secret.safetensors"),
    ):
        catalog.place(f"c/{name}").symlink_to(target)
    report = catalog.scan()
    assert set(catalog.states().values()) == {"committed"}
    assert (report["found"], report["vanished"], report["lost"]) == (2, 0, 0)
    assert [line.partition(", such")[0] for line in report["trouble"]] == [
        "skipped: broken links: 1",
        "skipped: links out of the root, which are not followed: 3",
    ]
    assert str(catalog.folder) not in "".join(report["trouble"])
