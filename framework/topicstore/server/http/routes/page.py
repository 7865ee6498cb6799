"""``/``: the web page, its files from the folder ``page``, and the library for its charts.

These routes need no token, because the files contain no data. The page requests its data from the API.
"""

from __future__ import annotations

import gzip
import hashlib
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import attrs
import msgspec
from litestar import Request, Response, get
from litestar.exceptions import NotFoundException
from litestar.params import FromPath

__all__ = ["OUTSIDE"]

_FOLDER = Path(__file__).parent.parent / "page"
_MEDIA = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
_LIBRARY = "plotly", "package_data/plotly.min.js"
"""The package that contains the library for charts, and the library's path in it."""
_SHORT = 1_024
"""Smaller files are not compressed, in bytes."""


@attrs.frozen
class _File:
    """A file with its compressed form and its ETag."""

    media: str
    body: bytes
    compressed: bytes
    etag: str

    @classmethod
    def of(cls, media: str, body: bytes) -> _File:
        packed = gzip.compress(body, mtime=0) if len(body) >= _SHORT else body
        return cls(media, body, packed, f'"{hashlib.sha256(body).hexdigest()[:16]}"')

    def answer(self, request: Request[Any, Any, Any], keep: str = "no-cache") -> Response[bytes]:
        """Return the file, or 304 if the client's copy is current. ``keep`` is the header Cache-Control."""
        headers = {"ETag": self.etag, "Cache-Control": keep, "Vary": "Accept-Encoding"}
        if self.etag in request.headers.get("if-none-match", ""):
            return Response(b"", status_code=304, headers=headers)
        packs = "gzip" in request.headers.get("accept-encoding", "") and self.compressed is not self.body
        if packs:
            headers["Content-Encoding"] = "gzip"
        return Response(self.compressed if packs else self.body, media_type=self.media, headers=headers)


@cache
def _files() -> dict[str, _File]:
    return {
        path.relative_to(_FOLDER).as_posix(): _File.of(_MEDIA[path.suffix], path.read_bytes())
        for path in sorted(_FOLDER.rglob("*"))
        if path.suffix in _MEDIA
    }


@cache
def _library() -> _File | None:
    package, name = _LIBRARY
    found = find_spec(package)  # finds the package without importing it
    if found is None or found.origin is None:
        return None
    path = Path(found.origin).parent / name
    return _File.of(_MEDIA[".js"], path.read_bytes()) if path.is_file() else None


@get("/", include_in_schema=False, sync_to_thread=False)
def page(request: Request[Any, Any, Any]) -> Response[bytes]:
    """Return the page's HTML."""
    return _files()["index.html"].answer(request)


@get("/page/{name:path}", include_in_schema=False, sync_to_thread=False)
def file(request: Request[Any, Any, Any], name: FromPath[str]) -> Response[bytes]:
    """Return one of the page's files."""
    found = _files().get(name.lstrip("/"))
    if found is None:
        raise NotFoundException(f"the page has no file {name!r}")
    return found.answer(request)


@get("/charts", include_in_schema=False, sync_to_thread=True)
def charts(request: Request[Any, Any, Any]) -> Response[bytes]:
    """Return the URL of the library for charts, or how to install it."""
    library = _library()
    found = (
        {"library": f"charts/{library.etag.strip(chr(34))}/library.js", "missing": None}
        if library is not None
        else {"library": None, "missing": 'Charts need plotly: pip install "topicstore[server]"'}
    )
    return _File.of("application/json", msgspec.json.encode(found)).answer(request)


@get("/charts/{version:str}/library.js", include_in_schema=False, sync_to_thread=True)
def library(request: Request[Any, Any, Any], version: FromPath[str]) -> Response[bytes]:
    """Return the library for charts, which browsers cache: its URL changes with its content."""
    found = _library()
    if found is None or found.etag.strip('"') != version:
        raise NotFoundException("there is no such version of the library for charts")
    return found.answer(request, keep="public, max-age=31536000, immutable")


OUTSIDE = [page, file, charts, library]
"""Routes outside of the API's path prefix."""
