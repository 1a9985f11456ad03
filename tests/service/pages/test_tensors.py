"""Pages of tensors and layers, without scripts: values, pictures with tables, optimizers, changes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import numpy as np
import pytest
import torch

import dcp
from tests.support.app import App, running_app
from tests.support.catalog import Catalog
from tests.support.catalog_roots import age
from tests.support.page_rows import registered
from tests.support.pages import Browser, PageText
from tests.support.sharded import grid, save_sharded

HOSTILE = (
    "<script>alert(1)</script>",
    "\"><img src=x onerror='alert(1)'>",
    "a/../b?c=d&e#f%2F+ g",
    "\u202egnp.exe \u2067\u05d0\u05d1",
    "[a-z]*?",
    "{{ 7*7 }}{% raw %}",
    "\U0001f4a5\u200d" * 5_000,
    f"layers.{'9' * 5000}.w",
    "nul\x00and\\x00",
)


def weights(step: int) -> dict[str, torch.Tensor]:
    """Return weights of a small model; at step 2 one is not finite, and one is unchanged."""
    generator = torch.Generator().manual_seed(7)
    made = {
        "layers.0.weight": torch.randn(32, 48, generator=generator) * (1 + 0.01 * step),
        "layers.0.bias": torch.zeros(32),
        "layers.1.weight": torch.randn(8, 16, generator=generator).bfloat16(),
        "conv": torch.arange(4 * 3 * 5 * 6.0).reshape(4, 3, 5, 6),
    }
    if step == 2:
        made["layers.1.weight"][3, 5] = math.nan
        made["layers.1.weight"][0, 0] = math.inf
    return made


def state(step: int) -> dict[str, Any]:
    """Return a state with Adam's states by name, as torch's functions for distributed checkpoints save."""
    model = weights(step)
    names = [name for name in model if name != "conv"]
    kept = {
        name: {
            "step": torch.tensor(float(step)),
            "exp_avg": torch.full_like(model[name], 0.5) if name != "layers.0.bias" else torch.zeros(32),
            "exp_avg_sq": torch.full_like(model[name], 4.0) if name != "layers.0.bias" else torch.zeros(32),
        }
        for name in names
    }
    return {
        "model": model,
        "optim": {"state": kept, "param_groups": [{"params": names, "lr": 0.1, "betas": (0.9, 0.99)}]},
        "odd": {
            "empty": torch.ones(0, 5),
            "scalar": torch.tensor(2.5),
            "nothing": torch.full((2, 3), math.nan),
            "complex": torch.ones(3, 4, dtype=torch.complex64),
            "flags": torch.tensor([True, False, True]),
        },
        "names": {name: torch.ones(3) for name in HOSTILE},
        "step": step,
    }


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[App, Browser, Path]]:
    """Start the application over two steps of a run and a sharded checkpoint."""
    folder = tmp_path_factory.mktemp("tensors")
    keys = ["run/step-1", "run/step-2", "sharded"]
    for step in (1, 2):
        dcp.save(state(step), checkpoint_id=folder / "main" / keys[step - 1])
    sharded = {"w": torch.arange(64.0).reshape(8, 8), "b": torch.ones(6), "deep": torch.ones(2, 4, 6)}
    boxes = {"w": grid((8, 8), (2, 2)), "b": grid((6,), (3,)), "deep": grid((2, 4, 6), (2, 2, 2))}
    save_sharded(folder / "main" / keys[2], sharded, boxes)
    age(folder / "main")
    with running_app(
        f"sqlite:///{folder / 'catalog.sqlite'}", folder, auth="off", rate_limit="100000/minute"
    ) as app:
        for key in keys:
            registered(app, key)
        yield app, Browser(app.client()), folder


def tensor(number: int, fqn: str, path: str = "", **query: str) -> str:
    """Return the URL of a tensor's page."""
    return f"/checkpoints/{number}/tensors{path}?{urlencode({'fqn': fqn, **query})}"


def test_the_page_of_a_tensor(site: Any) -> None:
    """The page shows current values, the place of the bytes, and code to read the tensor; links work."""
    _, browser, folder = site
    page = browser.page(tensor(1, "model.layers.0.weight"))
    expected = weights(1)["layers.0.weight"].double()
    for fact in ("float32", "32 \N{MULTIPLICATION SIGN} 48", "1.54 K", "6.00 KiB", f"{expected.norm():.5g}"):
        assert fact in page.text, fact
    assert "read just now" in page.text.lower()
    assert "only='model.layers.0.weight'" in page.text
    rows = re.findall(r"__0_0\S+ ([\d,]+) ([\d,]+)", page.text)
    (offset, size) = (int(found.replace(",", "")) for found in rows[0])
    (file,) = (folder / "main/run/step-1").glob("__0_0*")
    stored = np.frombuffer(file.read_bytes()[offset : offset + size], np.float32)
    assert np.array_equal(stored, weights(1)["layers.0.weight"].numpy().ravel())
    (npy,) = [link for link in page.links if link.endswith("format=npy")]
    assert browser.get(npy).content[:6] == b"\x93NUMPY"
    (after,) = [given["href"] for _, given in page.elements if given.get("rel") == "next"]
    assert "NaN" in browser.page(after).text and after.startswith("/checkpoints/2/tensors")
    assert browser.get(tensor(1, "model.nothing")).status_code == 404
    assert browser.get("/checkpoints/1/tensors").status_code == 422


@pytest.mark.parametrize("name", HOSTILE)
def test_tensors_are_found_by_any_name(site: Any, name: str) -> None:
    """A tensor is found in the list by any name: slashes, globs, 10,000 characters, NUL."""
    _, browser, _ = site
    listed = browser.page("/checkpoints/1?view=list")
    links = [link for link in listed.links if "/tensors?fqn=names" in link]
    assert len(links) == len(HOSTILE)
    own = quote(f"names.{name}"[:100].split("\x00")[0], safe="/")
    (link,) = [link for link in links if own in link]
    page = browser.page(link)
    assert "Values" in page.text and "Norm (L2) 1.7321" in page.text
    assert len([1 for element, _ in page.elements if element == "img"]) == 0
    for path in (below for below in page.links if "/tensors/" in below and "/api/" not in below):
        assert len(browser.get(path).content) < 300_000, path
    assert all(browser.get(path).status_code == 200 for path in page.links if "format=" in path)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("empty", "The tensor has no elements"),
        ("nothing", "No element is finite"),
        ("scalar", "2.5"),
        ("complex", "have no order"),
        ("flags", "0.66667"),
    ],
)
def test_tensors_of_every_kind(site: Any, name: str, says: str) -> None:
    """Tensors without elements, dimensions or ordered values have pages that say this."""
    _, browser, _ = site
    page = browser.page(tensor(1, f"odd.{name}"))
    assert says in browser.page(tensor(1, f"odd.{name}", "/slice")).text + page.text
    assert browser.page(tensor(1, f"odd.{name}", "/steps")).text
    assert name != "nothing" or "for the histogram" not in page.text


def test_chunks_as_boxes(site: Any) -> None:
    """Chunks are drawn over the two split dimensions; with more dimensions only the table is shown."""
    _, browser, _ = site

    def boxes(fqn: str) -> list[tuple[str, ...]]:
        elements = browser.page(tensor(3, fqn)).elements
        places = ("x", "y", "width", "height")
        at = next((n for n, (_, g) in enumerate(elements) if g.get("class") == "boxes"), len(elements))
        return [
            tuple(g[p] for p in places) for name, g in elements[at:] if name == "rect" and "class" not in g
        ]

    assert boxes("w")[:4] == [
        ("0.0%", "0.0%", "50.0%", "50.0%"),
        ("50.0%", "0.0%", "50.0%", "50.0%"),
        ("0.0%", "50.0%", "50.0%", "50.0%"),
        ("50.0%", "50.0%", "50.0%", "50.0%"),
    ]
    assert [one[0] for one in boxes("b")[:3]] == ["0.0%", "33.333%", "66.667%"]
    text = browser.page(tensor(3, "deep")).text
    assert "split along too many dimensions" in text and text.count(".distcp") == 8


def test_optimizer_states_are_shown_with_weights(site: Any) -> None:
    """Optimizer states are shown with their weight, from both pages, with derived gradients."""
    _, browser, _ = site
    for fqn in ("model.layers.0.weight", "optim.state.layers.0.weight.exp_avg"):
        page = browser.page(tensor(1, fqn))
        panel = page.text.partition("Optimizer")[2]
        for fact in ("layers.0.weight of optim", "weight", "exp_avg", "exp_avg_sq", "step"):
            assert fact in panel, (fqn, fact)
        assert "Gradient, root mean square 20 " in panel  # the root of 4 / (1 - 0.99)
        assert "First moment / gradient 0.25" in panel  # 0.5 / (1 - 0.9) / 20
    assert "dead" in browser.page(tensor(1, "model.layers.0.bias")).text
    assert "Optimizer" not in browser.page(tensor(1, "model.conv")).text


def test_large_tensors_are_read_on_request(site: Any) -> None:
    """Values of a large tensor are loaded on request; a larger tensor needs a job."""
    app, browser, folder = site
    huge = torch.from_numpy(np.zeros((1 << 24) + 1, np.float32))  # allocates no memory
    sizes = {"large": torch.ones(600, 512), "huge": huge}
    dcp.save(sizes, checkpoint_id=folder / "main/sizes")
    age(folder / "main/sizes")
    number = registered(app, "sizes")
    page = browser.page(tensor(number, "large"))
    (part,) = [g for _, g in page.elements if g.get("id") == "values"]
    assert "Standard deviation" not in page.text and part["hx-get"] in page.links
    read = browser.page(part["hx-get"])
    assert "Standard deviation" in read.text and "Bins are powers of two" in read.text
    assert not [g for _, g in read.elements if g.get("id") == "values" and "hx-get" in g]
    for path in (tensor(number, "huge"), tensor(number, "huge", read="true")):
        shown = browser.page(path)
        assert "not been computed yet" in shown.text and shown.form(f"/checkpoints/{number}/statistics")


@pytest.mark.parametrize("case", ["order", "named", "twice", "buffers"])
def test_numbered_states_are_matched_to_weights(site: Any, case: str) -> None:
    """Numbered optimizer states are matched to weights by names in the groups, or by an unambiguous order."""
    app, browser, folder = site
    model: Any = torch.nn.BatchNorm1d(4) if case == "buffers" else torch.nn.Linear(3, 5)
    parameters: Any = list(model.named_parameters() if case == "named" else model.parameters())
    optimizer = torch.optim.Adam(parameters, lr=0.1)
    sum((one**2).sum() for one in model.parameters()).backward()
    optimizer.step()
    extra = {"ema": torch.nn.Linear(3, 5).state_dict()} if case == "twice" else {}
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **extra}
    dcp.save(saved, checkpoint_id=folder / "main" / case)
    age(folder / "main" / case)
    panel = browser.page(tensor(registered(app, case), "model.weight")).text.partition("Optimizer")[2]
    assert ("exp_avg_sq" in panel) == (case in ("order", "named"))


def test_layers_dead_and_exploding(site: Any) -> None:
    """Statistics of layers are computed on request, then shown with marks and reasons, and filtered."""
    app, browser, folder = site
    before = browser.page("/checkpoints/2/layers")
    assert "not been computed yet" in before.text
    sent = browser.submit(before.form("/checkpoints/2/statistics"))
    assert sent.url.path == "/checkpoints/2/layers"
    waiting = PageText(sent.text)
    assert [g for _, g in waiting.elements if "/events" in g.get("sse-connect", "")]
    Catalog(app, folder).work()
    page = browser.page("/checkpoints/2/layers")
    row = page.text.partition("model.layers.1")[2].partition("model.layers.2")[0]
    assert "exploding" in row
    assert " NaN " in row.partition("exploding")[0], "the norm of a layer that has NaN"
    assert "1 NaN and 1 infinite" in browser.get("/checkpoints/2/layers").text
    assert "126 finite elements, without the 2" in browser.page(tensor(2, "model.layers.1.weight")).text
    by_norm = browser.page("/checkpoints/2/layers?sort=norm").text
    assert by_norm.index("model.layers.1") < by_norm.index("model.layers.0")
    norm = weights(2)["layers.0.weight"].double().norm()
    assert f"{norm:.5g}" in page.text
    dead = browser.page("/checkpoints/2/layers?mark=dead")
    assert "model.layers.0" in dead.text and "model.layers.1" not in dead.text
    assert browser.page("/checkpoints/2/layers?sort=norm&mark=any").text
    kept = browser.page(tensor(2, "model.layers.0.weight"))
    assert "Computed by a job" in kept.text
    steps = browser.page(tensor(1, "model.layers.0.weight", "/steps"))
    first = weights(1)["layers.0.weight"].double().norm()
    assert f"{norm:.5g}" in steps.text and f"{first:.5g}" in steps.text
