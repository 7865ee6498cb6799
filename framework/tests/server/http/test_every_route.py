"""Generated requests to every route of the document: no 5xx, and responses as the document describes.

``make test`` tries a few for each route; ``make test-http`` tries ``HTTP_EXAMPLES`` of them. The requests are the same
in every run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import hypothesis
import msgspec
import pytest
import requests
import topicstore as ts
from topicstore.server import Server

schemathesis = pytest.importorskip("schemathesis", reason="needs schemathesis: pip install schemathesis")
from schemathesis import GenerationMode  # noqa: E402 - after the check that it is installed
from schemathesis.specs.openapi import checks  # noqa: E402

pytestmark = pytest.mark.slow


@schemathesis.serializer("application/x-msgpack")
def as_msgpack(_: object, value: object) -> bytes:
    """Return a value as a MessagePack body."""
    try:
        return msgspec.msgpack.encode(value)
    except OverflowError:  # an integer that MessagePack can't encode
        hypothesis.reject()


EXAMPLES = int(os.environ.get("HTTP_EXAMPLES") or 4)


def operations(url: str) -> Iterator[object]:
    """Yield the operations of a server's document, except those whose response never ends."""
    schema = schemathesis.openapi.from_url(f"{url}/schema/openapi.json")
    for found in schema.get_all_operations():
        operation = found.ok()
        responses = operation.definition.raw["responses"].values()
        if not any("text/event-stream" in response.get("content", ()) for response in responses):
            yield operation


def can_be_wrong(operation: object) -> bool:
    """Return whether an operation has parameters that can be invalid; any text is a valid path parameter."""
    return bool(operation.query or operation.body)  # type: ignore[attr-defined]


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_no_request_makes_the_server_fail(served: tuple[ts.Database, Server], mode: GenerationMode) -> None:
    db, server = served
    db.store([ts.Message("a/b", b'{"x": 1}', "c"), ts.Message("a/c", b"\xff", "d", retain=True)])
    tried, failures = 0, list[Exception]()
    for operation in operations(server.urls_of_http[0]):
        if mode is GenerationMode.NEGATIVE and not can_be_wrong(operation):
            continue
        try:
            strategy = operation.as_strategy(generation_mode=mode)  # type: ignore[attr-defined]
            tried += attempts(strategy)
        except (AssertionError, ExceptionGroup, requests.RequestException) as failed:
            failed.add_note(f"{operation.method.upper()} {operation.path}")
            failures.append(failed)
    assert tried >= EXAMPLES
    if failures:
        raise ExceptionGroup(f"{len(failures)} operations failed", failures)


def attempts(strategy: hypothesis.strategies.SearchStrategy[object]) -> int:
    """Send the generated requests of one operation and check the responses; return their number."""
    tried = 0

    @hypothesis.settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=strategy)
    def attempt(case: object) -> None:
        nonlocal tried
        tried += 1
        case.call_and_validate(checks=CHECKS)  # type: ignore[attr-defined]

    attempt()
    return tried


CHECKS = [
    schemathesis.checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.response_headers_conformance,
    checks.unsupported_method,
]
