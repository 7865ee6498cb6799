"""The web page of the OpenAPI document: Swagger UI, with the files of the package ``flask-swagger-ui``.

Flask itself is not used. The page loads nothing from other origins, and has no inline scripts.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from litestar import Request, Response, Router, get
from litestar.exceptions import NotFoundException
from litestar.openapi.plugins import OpenAPIRenderPlugin
from litestar.params import FromPath

__all__ = ["SchemaPage"]

_TYPES = {"swagger-ui.css": "text/css", "swagger-ui-bundle.js": "text/javascript"}
_CACHED = {"Cache-Control": "max-age=3600"}
_PAGE = b"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>topicstore: the HTTP interface</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="/schema/assets/swagger-ui.css">
<script src="/schema/assets/swagger-ui-bundle.js" defer></script>
<script src="/schema/assets/begin.js" defer></script>
</head>
<body><div id="document"></div></body>
</html>
"""
_BEGIN = b'SwaggerUIBundle({url: "/schema/openapi.json", dom_id: "#document", deepLinking: true});\n'


class SchemaPage(OpenAPIRenderPlugin):
    """The page at ``/schema``, and its files below ``/schema/assets``."""

    def __init__(self) -> None:
        super().__init__(path="/")

    def render(self, request: Request[Any, Any, Any], openapi_schema: dict[str, Any]) -> bytes:
        """Return the page's HTML, which loads the document in the browser."""
        return _PAGE

    def receive_router(self, router: Router) -> None:
        """Register the route of the page's files."""
        router.register(_asset)


@get("/assets/{name:str}", include_in_schema=False, sync_to_thread=True)
def _asset(name: FromPath[str]) -> Response[bytes]:
    if name == "begin.js":
        return Response(_BEGIN, media_type="text/javascript")
    if name not in _TYPES:
        raise NotFoundException(f"the page of the document has no file {name!r}")
    return Response((_directory() / name).read_bytes(), media_type=_TYPES[name], headers=_CACHED)


def _directory() -> Path:
    spec = importlib.util.find_spec("flask_swagger_ui")
    if spec is None or spec.origin is None:
        raise NotFoundException('the page needs flask-swagger-ui: pip install "topicstore[server]"')
    return Path(spec.origin).parent / "dist"
