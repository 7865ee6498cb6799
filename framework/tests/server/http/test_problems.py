"""Errors as problem documents: the status of each of the library's errors, and of invalid requests."""

from __future__ import annotations

import httpx
import pytest
from topicstore.contract import errors
from topicstore.server.http.problems import status_of

EXPECTED = {
    400: "ImportSource InvalidArgument InvalidCursor InvalidFilter InvalidMessage InvalidOption InvalidTopic "
    "LateMessage PlaceAhead ReplicasRefused TimestampAhead UnknownPlugin WrongDatabase",
    404: "DatabaseNotFound SessionNotFound UnknownSite",
    409: "Generation Incompatible ManifestMismatch NewerFormat NotADatabase ReadOnlyDatabase SessionEnded "
    "SessionTakenOver StateConflict SubscriptionClosed Unsupported",
    410: "GenerationArchived GenerationDropped",
    413: "MessageTooLarge",
    500: "BackendUnavailable Corruption DataLoss Engine FileAccess FileSystem ForkedProcess LogDamaged PathExists "
    "PathNotDirectory Plugin Topicstore Unrecoverable",
    503: "ClusterNotReady DatabaseClosed DatabaseLocked NestedCall Recoverable ShardElsewhere ShardMoved ShardReadOnly "
    "TooManyOpenFiles",
    507: "QuotaExceeded StorageFull",
}
"""Names of errors by status, without the suffix `Error`."""


def test_every_error_of_the_library_has_its_status() -> None:
    """Every error of the library has a status; a new error must be added here."""
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


def test_methods_that_are_allowed_are_reported(http: httpx.Client) -> None:
    answer = http.options("/info")
    assert answer.status_code == 204
    assert {"GET", "HEAD", "OPTIONS"} == set(answer.headers["allow"].split(", "))
    assert http.post("/info").headers["allow"]


def test_a_fault_tells_nothing_of_itself(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An unexpected error reveals nothing in the response, and is logged."""
    import topicstore as ts

    def fail(_: ts.Database) -> None:
        raise RuntimeError("a secret of the inside")

    monkeypatch.setattr(ts.Database, "info", fail)
    answer = http.get("/info")
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert "a secret of the inside" in caplog.text


@pytest.mark.parametrize("path", ["/health/live", "/", "/api/v5/info", "/api/v5/messages", "/api/v5/messages/tail"])
def test_head_is_answered_as_get_is_without_a_body(site: httpx.Client, path: str) -> None:
    """HEAD is answered as GET without a body, even where a GET never ends (RFC 9110, section 9.3.2)."""
    with site.stream("GET", path) as got:
        head = site.head(path)
    assert (head.status_code, head.content) == (got.status_code, b"")
    assert head.headers["content-type"] == got.headers["content-type"]


@pytest.mark.parametrize(
    "query",
    [
        "/messages?filter=a/+",
        "/topics?filter=%2B/+/b",
        "/clients?filter=+",
        "/topics/tree?prefix=a%2F+",
        "/retained?filter=+",
    ],
)
def test_a_wildcard_that_a_url_turns_into_a_space_is_refused(http: httpx.Client, query: str) -> None:
    answer = http.get(query)
    assert answer.status_code == 400
    assert "%2B" in answer.json()["errors"][0]["message"]


def test_a_delete_with_such_a_wildcard_deletes_nothing(http: httpx.Client) -> None:
    http.post("/messages?store=true", json={"topic": "plus/b", "payload": "1"})
    assert http.delete("/messages?filter=plus/+").status_code == 400
    assert http.delete("/messages?filter=plus/%2B").json() == {"deleted": 1}


@pytest.mark.parametrize("query", ["filter=a+b/c", "filter=a/%20/b", "start=2025-06-01+12:00"])
def test_spaces_within_topics_and_times_are_as_they_were(http: httpx.Client, query: str) -> None:
    assert http.get(f"/messages?{query}").status_code == 200


def test_a_query_parameter_that_is_given_twice_is_named(http: httpx.Client) -> None:
    """A query parameter given twice is refused by name, unless the parameter may be repeated."""
    answer = http.get("/messages?filter=a&limit=1&limit=2")
    assert answer.status_code == 400
    assert answer.json()["errors"] == [
        {"message": "it is given 2 times, and only one of them could count", "key": "limit", "source": "query"}
    ]
    assert "no session" in http.get("/lag?client_id=a&client_id=b").json()["detail"]
