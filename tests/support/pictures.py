"""Create the pictures of docs/tutorial/pages.md from a demo: ``python -m tests.support.pictures``.

Uses a kept demo with ``--demo DIR`` (from ``dcp demo --root DIR``); otherwise runs a new demo.
"""

from __future__ import annotations

import argparse
import base64
import struct
import subprocess
import sys
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
from numpy.typing import NDArray
from playwright.sync_api import Browser, Page

from dcp.demo.catalog import CatalogService
from dcp.demo.places import FolderPlace
from dcp.server.client import Client
from tests.support.chromium import running_chromium, window

_ROOT: Final = Path(__file__).parents[2]
_FOLDER: Final = _ROOT / "docs/pictures"
_DECODE: Final = """
async source => {
  const image = await createImageBitmap(await (await fetch(source)).blob());
  const canvas = new OffscreenCanvas(image.width, image.height);
  const context = canvas.getContext("2d");
  context.drawImage(image, 0, 0);
  const bytes = context.getImageData(0, 0, image.width, image.height).data;
  let text = "";
  const some = 32768; // arguments at once
  for (let at = 0; at < bytes.length; at += some) {
    text += String.fromCharCode(...bytes.subarray(at, at + some));
  }
  return [image.width, image.height, btoa(text)];
}
"""


@dataclass(frozen=True, slots=True)
class Picture:
    """A page: ``path`` with the names of `_places`, and the shown height in pixels."""

    name: str
    path: str
    height: int = 820
    width: int = 1200
    colours: Any = "light"


PICTURES: Final = (
    Picture("runs", "/", 560),
    Picture("run", "/runs/{run}", 1000),
    Picture("checkpoint", "/checkpoints/{last}", 980),
    Picture("lineage", "/checkpoints/{export}/lineage", 560),
    Picture("damaged", "/checkpoints/{damaged}", 560, colours="dark"),
    Picture("tensor", "/checkpoints/{last}/tensors?fqn={tensor}", 1000),
    Picture("shards", "/checkpoints/{last}/shards", 760),
    Picture("anatomy", "/checkpoints/{last}/anatomy", 820),
    Picture("diff", "/diff?a={before}&b={last}&top=app.model", 900),
    Picture("drift", "/runs/{run}/drift", 820, colours="dark"),
    Picture("will-it-load", "/checkpoints/{export}/will-it-load?state_of={last}", 900),
)


def main() -> None:
    """Create all pictures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--demo", type=Path, help="what dcp demo --root DIR has left")
    parser.add_argument("--only", help="the name of one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dcp-pictures-") as folder:
        root = options.demo or Path(folder) / "demo"
        if options.demo is None:
            subprocess.run([sys.executable, "-m", "dcp.demo", "--root", str(root)], check=True)
        _take(root.resolve(), options.only)


def _take(root: Path, only: str | None) -> None:
    with (
        CatalogService(root, FolderPlace(root / "checkpoints")) as service,
        Client(service.url, transport=httpx.HTTPTransport()) as client,
        running_chromium() as browser,
    ):
        _dress(client)
        places = _places(client)
        for picture in PICTURES:
            if only in (None, picture.name):
                data = _screenshot(browser, service.url, picture, places)
                (_FOLDER / f"page-{picture.name}.png").write_bytes(data)
                print(f"{picture.name}: {len(data) / 1024:.0f} KiB")


def _dress(client: Client) -> None:
    """Verify, name, and compare the checkpoints like a user."""
    steps = sorted(client.checkpoints(run="uninterrupted"), key=lambda one: one.step or 0)
    for one in steps[1:]:
        client.wait(client.verify(one.id))
    client.add_tag(steps[-1].id, "release")
    for name, one in (("best", steps[-1]), ("base", steps[0])):
        if name not in one.aliases:
            client.set_alias(one.run_id, name, one.id)
    client.wait(client.compute_drift(steps[0].run_id))
    client.wait(client.submit("diff", {"a": steps[-2].id, "b": steps[-1].id}))
    client.wait(client.compute_statistics(steps[-1].id))


def _places(client: Client) -> dict[str, int | str]:
    """Return ids of the demo's checkpoints, and the name of a matrix in one of them."""
    found = list(client.checkpoints(state="any"))
    by_key = {one.key: one for one in found}
    of_run = sorted((one for one in found if one.run == "uninterrupted"), key=lambda one: one.step or 0)
    step = of_run[-1].name
    matrices = client.tensors(of_run[-1].id, glob="*model*weight", kind="tensor")
    return {
        "run": of_run[-1].run_id,
        "before": of_run[-2].id,
        "last": of_run[-1].id,
        "tensor": max((one for one in matrices if len(one.shape or ()) == 2), key=lambda one: one.bytes).fqn,
        "damaged": by_key[f"damaged/{step}"].id,
        "export": by_key[f"exports/{step}"].id,
    }


def _screenshot(browser: Browser, url: str, picture: Picture, places: dict[str, int | str]) -> bytes:
    with window(browser, url, picture.width, picture.colours) as seen:
        seen.page.set_viewport_size({"width": picture.width, "height": picture.height})
        seen.open(picture.path.format(**places))
        seen.page.wait_for_load_state("networkidle")
        taken = seen.page.screenshot()
        assert seen.faults == [], seen.faults
    with browser.new_context() as context:
        return palette_png(_pixels(context.new_page(), taken))


def _pixels(page: Page, png: bytes) -> NDArray[np.uint8]:
    """Return height x width x red, green, blue, decoded by the browser."""
    source = "data:image/png;base64," + base64.b64encode(png).decode()
    width, height, text = page.evaluate(_DECODE, source)
    return np.frombuffer(base64.b64decode(text), np.uint8).reshape(height, width, 4)[:, :, :3]


def palette_png(pixels: NDArray[np.uint8]) -> bytes:
    """Return a PNG of the 256 most frequent colours; other colours become the nearest of these."""
    codes = pixels.astype(np.uint32) @ np.array([1 << 16, 1 << 8, 1], np.uint32)
    colours, inverse, counts = np.unique(codes, return_inverse=True, return_counts=True)
    parts = np.stack([colours >> 16, colours >> 8 & 255, colours & 255], axis=1).astype(np.int32)
    kept = np.argsort(counts)[::-1][:256]
    nearest = np.empty(len(colours), np.uint8)
    for begin in range(0, len(colours), 4096):
        apart = ((parts[begin : begin + 4096, None] - parts[None, kept]) ** 2).sum(axis=2)
        nearest[begin : begin + 4096] = apart.argmin(axis=1)
    rows = nearest[inverse].reshape(codes.shape)
    height, width = len(rows), len(rows[0])
    data = np.zeros((height, width + 1), np.uint8)  # each row begins with its filter type, 0 for none
    data[:, 1:] = rows
    return (
        b"\x89PNG\r\n\x1a\n"
        + _part(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0))
        + _part(b"PLTE", parts[kept].astype(np.uint8).tobytes())
        + _part(b"IDAT", zlib.compress(data.tobytes(), 9))
        + _part(b"IEND", b"")
    )


def _part(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


if __name__ == "__main__":
    main()
