"""Errors as problem documents: the status of each error of the library, and what a client's mistake looks like."""

from __future__ import annotations

import httpx
import pytest
from topicstore.contract import errors
from topicstore.server.http.problems import status_of

EXPECTED = {
    400: "ImportSource InvalidArgument InvalidCursor InvalidFilter InvalidMessage InvalidOption InvalidTopic "
    "LateMessage TimestampAhead UnknownPlugin WrongDatabase",
    404: "DatabaseNotFound SessionNotFound",
    409: "Generation Incompatible ManifestMismatch NewerFormat NotADatabase ReadOnlyDatabase SessionEnded "
    "SessionTakenOver StateConflict SubscriptionClosed Unsupported",
    410: "GenerationArchived GenerationDropped",
    413: "MessageTooLarge",
    500: "BackendUnavailable Corruption DataLoss Engine ForkedProcess LogDamaged Plugin Topicstore Unrecoverable",
    503: "DatabaseClosed DatabaseLocked NestedCall Recoverable ShardReadOnly TooManyOpenFiles",
    507: "QuotaExceeded StorageFull",
}
"""The names of errors by their status, without `Error`."""


def test_every_error_of_the_library_has_its_status() -> None:
    """A new error must be given one here."""
    expected = {f"{name}Error": status for status, names in EXPECTED.items() for name in names.split()}
    assert expected == {name: status_of(getattr(errors, name)("x")) for name in errors.__all__}


@pytest.mark.parametrize(
    ("method", "path", "status", "title"),
    [
        ("GET", "/nowhere", 404, "Not Found"),
        ("GET", "/%ff%fe", 404, "Not Found"),
        ("GET", "/../../etc/passwd", 404, "Not Found"),
        ("GET", "/ds/sites/..%2f..%2fetc%2fpasswd", 404, "UnknownSiteError"),
        ("GET", "/ds/sites/%00", 404, "UnknownSiteError"),
        ("GET", "/ds/sites/%ff", 400, "Bad Request"),
        ("GET", "/ds/sites/a%0d%0aX-Injected:%201", 404, "UnknownSiteError"),
        ("POST", "/info", 405, "Method Not Allowed"),
        ("TRACE", "/info", 405, "Method Not Allowed"),
        ("BREW", "/info", 405, "Method Not Allowed"),
    ],
)
def test_what_is_not_there_is_a_problem(http: httpx.Client, method: str, path: str, status: int, title: str) -> None:
    answer = http.request(method, path)
    assert answer.headers["content-type"] == "application/problem+json"
    assert "x-injected" not in answer.headers
    body = answer.json()
    assert (status, status, title) == (answer.status_code, body["status"], body["title"])
    assert {"type", "title", "status", "detail"} == set(body)


def test_a_wrong_body_is_a_problem_with_its_place(http: httpx.Client) -> None:
    body = http.put("/ds/storages/messages/replicas", json={"no": "list"}).json()
    assert body["errors"] == [{"message": "Expected `array`, got `object`", "key": "data", "source": "body"}]
    body = http.put("/ds/storages/messages/replicas").json()
    assert body["errors"] == [{"message": "it is missing", "key": "data", "source": "body"}]


def test_methods_that_are_allowed_are_told(http: httpx.Client) -> None:
    answer = http.options("/info")
    assert answer.status_code == 204
    assert {"GET", "OPTIONS"} == set(answer.headers["allow"].split(", "))
    assert http.post("/info").headers["allow"]


def test_a_fault_tells_nothing_of_itself(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is in the log."""
    import topicstore as ts

    def fail(_: ts.Database) -> None:
        raise RuntimeError("a secret of the inside")

    monkeypatch.setattr(ts.Database, "info", fail)
    answer = http.get("/info")
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert "a secret of the inside" in caplog.text
