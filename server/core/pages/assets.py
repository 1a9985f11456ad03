"""Static files of pages: in memory, and at addresses that change with their contents.

So a browser may keep each for ever, and never has a script of another version than the page.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fastapi import APIRouter, Request, Response

from dcp.server.core.feature import Feature
from dcp.server.core.http.admission import STATIC_PREFIX
from dcp.server.core.http.dependencies import public
from dcp.server.core.problems import NotFoundError

__all__ = ["Assets", "router"]

_FOLDER: Final = Path(__file__).parent / "static"
_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_FOR_EVER: Final = "public, max-age=31536000, immutable"

router = APIRouter(dependencies=[public], include_in_schema=False)


@dataclass(frozen=True, slots=True)
class Asset:
    """A file; ``digest`` is the first 16 digits of its SHA-256."""

    body: bytes
    media_type: str
    digest: str


class Assets:
    """All files but licences, by their paths below ``static/``; those of a feature with its name before."""

    def __init__(self, features: Iterable[Feature]) -> None:
        own = {f"{one.name}/": one.folder / "static" for one in features if one.is_package}
        self._files = {
            start + path.relative_to(folder).as_posix(): _read(path)
            for start, folder in {"": _FOLDER, **own}.items()
            for path in sorted(folder.rglob("*"))
            if path.suffix in _TYPES
        }

    def url(self, name: str) -> str:
        """The address of the file ``name``."""
        return f"{STATIC_PREFIX}{self._files[name].digest}/{name}"

    def find(self, name: str) -> Asset | None:
        """The file ``name``."""
        return self._files.get(name)


def _read(path: Path) -> Asset:
    body = path.read_bytes()
    return Asset(body, _TYPES[path.suffix], hashlib.sha256(body).hexdigest()[:16])


@router.get(STATIC_PREFIX + "{digest}/{name:path}")
async def get_asset(digest: str, name: str, request: Request) -> Response:
    """A file. By the address that an older page has it is the one of today, which is not to be kept."""
    asset = request.app.state.assets.find(name)
    if asset is None:
        raise NotFoundError("there is nothing at this path")
    kept = _FOR_EVER if digest == asset.digest else "no-cache"
    return Response(asset.body, media_type=asset.media_type, headers={"Cache-Control": kept})
