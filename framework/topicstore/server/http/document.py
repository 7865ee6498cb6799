"""The OpenAPI document of the HTTP interface, and its web page.

The page is Swagger UI, with the files of the package ``flask-swagger-ui``; Flask itself is not used. It loads nothing
from other origins, and has no inline scripts.
"""

from __future__ import annotations

import asyncio
import importlib.util
import re
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from litestar import Litestar, Request, Response, Router, get
from litestar.exceptions import NotFoundException
from litestar.handlers import HTTPRouteHandler
from litestar.openapi import OpenAPIConfig
from litestar.openapi.plugins import OpenAPIRenderPlugin
from litestar.openapi.spec import (
    Components,
    OpenAPIMediaType,
    OpenAPIResponse,
    OpenAPIType,
    Operation,
    PathItem,
    Reference,
    RequestBody,
    Schema,
    SecurityScheme,
)
from litestar.params import FromPath
from litestar.routes import HTTPRoute

import topicstore as ts

from .formats.response_bodies import JSON
from .problems import PROBLEM

__all__ = [
    "Document",
    "SchemaPage",
    "document_settings",
]

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
_BEGIN = b"""const system = matchMedia("(prefers-color-scheme: dark)");
const show = () => {
  const dark = (localStorage.getItem("topicstore-theme") || (system.matches ? "dark" : "light")) === "dark";
  document.documentElement.classList.toggle("dark-mode", dark);
};
system.addEventListener("change", show);
show();
SwaggerUIBundle({url: "/schema/openapi.json", dom_id: "#document", deepLinking: true});
"""
"""Colours are those that the web page of the server has: the system's, until its switch says otherwise."""


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


_TEXT, _NUMBER = Schema(type=OpenAPIType.STRING), Schema(type=OpenAPIType.INTEGER)
_PROBLEM = Schema(
    type=OpenAPIType.OBJECT,
    title="Problem",
    description="What went wrong (RFC 9457).",
    required=["type", "title", "status", "detail"],
    properties={
        "type": Schema(type=OpenAPIType.STRING, description="`about:blank`, or `urn:topicstore:` and an error's name."),
        "title": Schema(type=OpenAPIType.STRING, description="The name of the error, or the phrase of the status."),
        "status": _NUMBER,
        "detail": Schema(type=OpenAPIType.STRING, description="What went wrong, in a sentence."),
        "errors": Schema(
            description="The mistakes in parameters and body.",
            type=OpenAPIType.ARRAY,
            items=Schema(
                type=OpenAPIType.OBJECT,
                properties={
                    "message": _TEXT,
                    "key": Schema(type=OpenAPIType.STRING, description="The parameter or field."),
                    "source": Schema(type=OpenAPIType.STRING, description="Where it is: `query`, `body`, …"),
                },
            ),
        ),
    },
)
_MESSAGE = Schema(
    type=OpenAPIType.OBJECT,
    required=["topic"],
    properties={
        "topic": _TEXT,
        "payload": Schema(description="Text, or any other JSON."),
        "payload_base64": Schema(type=OpenAPIType.STRING, description="Instead of `payload`: any bytes."),
        "client_id": _TEXT,
        "qos": _NUMBER,
        "retain": Schema(type=OpenAPIType.BOOLEAN),
        "timestamp": Schema(type=OpenAPIType.INTEGER, description="Microseconds since the epoch."),
        "properties": Schema(type=OpenAPIType.OBJECT),
    },
)
_MESSAGES = {JSON: OpenAPIMediaType(schema=Schema(one_of=[_MESSAGE, Schema(type=OpenAPIType.ARRAY, items=_MESSAGE)]))}
"""The schemas of request bodies that handlers decode themselves, for media types that a schema can describe."""
_FAILURE = OpenAPIResponse(
    description="The request failed.",
    content={PROBLEM: OpenAPIMediaType(schema=Reference(ref="#/components/schemas/Problem"))},
)


def document_settings() -> OpenAPIConfig:
    """Return Litestar's configuration of the document."""
    return OpenAPIConfig(
        title="topicstore",
        version=ts.__version__,
        description="A durable, replayable store of MQTT messages. Requests from the server's own machine need no "
        "token, if its settings allow that; others have one of `topicstore tokens add`.",
        components=Components(
            security_schemes={
                "token": SecurityScheme(type="http", scheme="bearer", description="topicstore tokens add")
            }
        ),
        security=[{"token": []}, {}],
        use_handler_docstrings=True,
        openapi_router=Router("/schema", route_handlers=[], include_in_schema=False, before_request=_built),
        render_plugins=[SchemaPage()],
    )


class Document:
    """The document of an application, which is built when it is first requested, because building it is slow."""

    def __init__(self, application: Litestar) -> None:
        self._application = application
        self._lock = threading.Lock()
        """Held while the document is built."""
        self.built = False
        """Whether the document is complete and can be served."""

    def build(self) -> None:
        """Build the document if it isn't built yet. Thread-safe."""
        with self._lock:
            if not self.built:
                _complete(self._application)
                self.built = True


async def _built(request: Request[Any, Any, Any]) -> None:
    """Build the document before it is served, in a thread, so that other requests don't wait."""
    document: Document = request.app.state.document
    if not document.built:
        await asyncio.to_thread(document.build)


def _complete(application: Litestar) -> None:
    """Complete the document that Litestar generates.

    All operations fail with problem documents. A handler's option ``produces`` lists the media types of its responses,
    if there are others than JSON. The option ``consumes`` lists those of request bodies that the handler decodes
    itself.
    """
    document = application.openapi_schema
    assert document.components.schemas is not None  # noqa: S101 - Litestar has created them
    document.components.schemas["Problem"] = _PROBLEM
    for path in (document.paths or {}).values():
        for operation in _operations(path):
            responses = operation.responses = operation.responses or {}
            responses.pop("400", None)  # Litestar's format for bad parameters, which is not used
            responses["default"] = _FAILURE
            operation.summary = _first_sentence(operation.description or "")
    for route in application.routes:
        if isinstance(route, HTTPRoute):
            item = (document.paths or {}).get(route.path_format)
            for handler in route.route_handlers:
                for method in handler.http_methods:
                    described = getattr(item, method.lower(), None)
                    if isinstance(described, Operation):
                        _name_media_types(described, handler)


def _first_sentence(text: str) -> str:
    """Return the first sentence of a description on one line, without marks of code, which a summary would show."""
    sentence = " ".join(text.split("\n\n")[0].split()).replace("`", "")
    return re.split(r"(?<=[.:;]) ", sentence, maxsplit=1)[0].rstrip(".:;")


def _name_media_types(operation: Operation, handler: HTTPRouteHandler) -> None:
    """Set the media types of a handler's requests and responses; schemas that Litestar knows are kept."""
    if kinds := handler.opt.get("consumes"):
        operation.request_body = RequestBody(content=_contents(kinds, _MESSAGES), required=True)
    if kinds := handler.opt.get("produces"):
        response = (operation.responses or {})[str(handler.status_code)]
        assert isinstance(response, OpenAPIResponse)  # noqa: S101 - Litestar doesn't use references for responses
        response.content = _contents(kinds, response.content or {})


def _contents(kinds: Iterable[str], known: Mapping[str, OpenAPIMediaType]) -> dict[str, OpenAPIMediaType]:
    return {kind: known.get(kind, OpenAPIMediaType(schema=Schema(type=OpenAPIType.STRING))) for kind in kinds}


def _operations(path: PathItem) -> list[Operation]:
    return [value for value in vars(path).values() if isinstance(value, Operation)]
