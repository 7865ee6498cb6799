"""Makes the page of HTTP operations from the OpenAPI document of a running server, so that the page is up to date."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

PAGE = "http_operations.md"
METHODS = ("get", "put", "post", "patch", "delete")
HEAD = """\
# Operations of HTTP

Each operation of the server's HTTP interface, by path. [The guide](guides/http.md) says who may call them, and what
errors look like. A running server has the same as a page to try them at `/schema`, and as OpenAPI at
`/schema/openapi.json`.
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page of the HTTP operations; called by mkdocs."""
    document = served_document()
    files.append(File.generated(config, PAGE, content="\n".join(lines_of(document))))
    return files


def served_document() -> dict[str, Any]:
    """Start a server, return its OpenAPI document, and end the server."""
    free = "127.0.0.1:0"
    command = [sys.executable, "-m", "topicstore.cli", "serve", "--print-ready", "--listen", free, "--http", free]
    with (
        tempfile.TemporaryDirectory() as directory,
        subprocess.Popen([*command, f"{directory}/db"], stdout=subprocess.PIPE) as server,
    ):
        try:
            line = server.stdout.readline() if server.stdout is not None else b""
            if not line:
                raise PluginError("topicstore serve ended before it was ready")
            host = json.loads(line)["http"][0]
            with urllib.request.urlopen(f"http://{host}/schema/openapi.json") as answer:
                document: dict[str, Any] = json.load(answer)
        finally:
            server.terminate()
    return document


def lines_of(document: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the page."""
    yield HEAD
    paths = sorted(document["paths"].items())
    for area, members in groupby(paths, lambda item: area_of(item[0])):
        yield f"## {area}\n"
        for path, operations in members:
            for method in METHODS:
                if method in operations:
                    yield from operation_lines(f"{method.upper()} {path}", operations[method])


def area_of(path: str) -> str:
    """Return the heading under which a path stands: the part that follows ``/api/v5``, or else the first."""
    parts = [part for part in path.removeprefix("/api/v5").split("/") if part]
    return f"/{parts[0]}" if parts else "/"


def operation_lines(name: str, operation: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of one operation."""
    yield f"### `{name}`\n"
    if text := operation.get("description"):  # the summary is its first sentence
        yield f"{text}\n"
    parameters = operation.get("parameters", [])
    if parameters:
        yield "| parameter | in | type | |\n| --- | --- | --- | --- |"
        for parameter in parameters:
            needed = "required. " if parameter.get("required") else ""
            about = " ".join(parameter.get("description", "").split())
            kind = cell(type_of(parameter.get("schema", {})))
            yield f"| `{parameter['name']}` | {parameter['in']} | {kind} | {cell(needed + about)} |"
        yield ""
    body = operation.get("requestBody", {}).get("content", {})
    if body:
        yield f"Body: {', '.join(f'`{one}`' for one in body)}.\n"
    answers = [f"{status}: {answer.get('description', '')}" for status, answer in operation["responses"].items()]
    yield "\n".join(f"- {cell(one)}" for one in answers) + "\n"


def type_of(schema: dict[str, Any]) -> str:
    """Return the type of a parameter in words."""
    kinds = schema.get("oneOf") or schema.get("anyOf")
    if kinds:
        return " or ".join(dict.fromkeys(type_of(kind) for kind in kinds))
    if "enum" in schema:
        return ", ".join(f"`{one}`" for one in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {type_of(schema.get('items', {}))}"
    return str(schema.get("type") or schema.get("$ref", "any").rpartition("/")[2])


def cell(text: str) -> str:
    """Return a text that can stand in a table."""
    return " ".join(text.split()).replace("|", "\\|")
