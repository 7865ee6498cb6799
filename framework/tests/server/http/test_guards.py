"""Access to the HTTP interface without a token, and refusals otherwise."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import topicstore as ts
from topicstore.server import Address, Server
from topicstore.server.access import Access
from topicstore.server.config.model import (
    AuthenticationSettings,
    AuthorizationSettings,
    HttpSettings,
    ListenerSettings,
    Rule,
    ServerSettings,
    TlsSettings,
)
from topicstore_conformance.mqtt.certificates import Authority
from topicstore_conformance.mqtt.embedded import ANY_PORT, Embedded, serving_http

from .conftest import client_of, connected


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ts.Database, Server]]:
    """A server that requires a token of everybody."""
    path = tmp_path_factory.mktemp("closed") / "db"
    with ts.open(path, backend="memory") as db, serving_http(db, anonymous="never") as one:
        yield db, one


def operations(site: httpx.Client) -> list[tuple[str, str]]:
    """Return the methods and paths of the document that need a token: all except health and the page."""
    paths = site.get("/schema/openapi.json").json()["paths"]
    return [
        (method.upper(), re.sub(r"{\w+}", "1", path))
        for path, item in paths.items()
        if path.startswith("/api/")
        for method in item
        if method in ("get", "put", "post", "delete", "patch")
    ]


def test_no_route_of_the_interface_is_reached_without_a_token(closed: tuple[ts.Database, Server]) -> None:
    """Without a token every route of the interface answers 401, except health."""
    with client_of(closed[1], "") as site:
        found = operations(site)
        assert {("GET", "/api/v5/config"), ("GET", "/api/v5/figures")} < set(found)
        for path in ("live", "ready"):
            assert site.get(f"/health/{path}").status_code == 200
        for method, path in (*found, ("GET", "/metrics")):
            answer = site.request(method, path)
            assert (method, path, 401) == (method, path, answer.status_code)
            assert answer.headers["WWW-Authenticate"] == "Bearer"


def test_a_token_for_reading_changes_nothing(closed: tuple[ts.Database, Server]) -> None:
    server = closed[1]
    assert server.http is not None
    server.http.context.tokens.path.parent.mkdir(exist_ok=True)
    token = server.http.context.tokens.add("reader", "read")
    with client_of(server, "") as site:
        for method, path in operations(site):
            if method != "GET" and not path.endswith("/retention/outlook"):  # a query, though sent by POST
                answer = site.request(method, path, headers={"Authorization": f"Bearer {token}"})
                assert (method, path, 403) == (method, path, answer.status_code)


@pytest.mark.parametrize("header", ["", "Bearer", "Basic YTpi", "Bearer \u00ff", "token", "Bearer a b"])
def test_what_is_no_token_lets_nobody_in_even_from_here(http: httpx.Client, header: str) -> None:
    """A request with an invalid Authorization header is refused, even from this machine."""
    assert http.get("/info", headers={"Authorization": header.encode("latin-1")}).status_code == 401


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost:1"}, 200),
        ({"Host": "[::1]:18083"}, 200),
        ({"Host": "LOCALHOST"}, 200),
        ({"Host": "127.0.0.1:5", "Origin": "http://127.0.0.1:5", "Sec-Fetch-Site": "same-origin"}, 200),
        ({"Sec-Fetch-Site": "none"}, 200),
        # a host name that resolves to this machine
        ({"Host": "evil.example"}, 401),
        ({"Host": "127.0.0.1.evil.example"}, 401),
        ({"Host": "[::1"}, 200),
        ({"Host": ""}, 401),
        # a request from a page of another site or of another local server
        ({"Origin": "https://evil.example"}, 401),
        ({"Origin": "null"}, 401),
        ({"Origin": "http://127.0.0.1:1"}, 401),
        ({"Host": "localhost:5", "Origin": "https://localhost:5"}, 401),
        ({"Sec-Fetch-Site": "cross-site"}, 401),
        ({"Sec-Fetch-Site": "same-site"}, 401),
        # a request that a proxy on this host forwards
        ({"X-Forwarded-For": "203.0.113.1"}, 401),
        ({"X-Forwarded-For": "127.0.0.1"}, 401),
        ({"X-Forwarded-Host": "store.example"}, 401),
        ({"Forwarded": "for=203.0.113.1"}, 401),
        ({"X-Real-IP": "203.0.113.1"}, 401),
        ({"Via": "1.1 proxy"}, 401),
        ({"CF-Connecting-IP": "203.0.113.1"}, 401),
        ({"X-Forwarded": "for=203.0.113.1"}, 401),
        ({"X-Cluster-Client-IP": "203.0.113.1"}, 401),
        ({"X-Envoy-External-Address": "203.0.113.1"}, 401),
    ],
)
def test_without_a_token_only_this_machine_itself_is_let_in(
    http: httpx.Client, headers: dict[str, str], status: int
) -> None:
    assert http.get("/info", headers=headers).status_code == status


def test_with_a_token_it_does_not_matter_where_from(owner: dict[str, str], http: httpx.Client) -> None:
    elsewhere = {"Host": "store.example", "X-Forwarded-For": "203.0.113.1"}
    assert http.get("/info", headers={**owner, **elsewhere}).status_code == 200


def test_a_proxy_that_asks_in_the_old_version_is_not_this_machine(served: tuple[ts.Database, Server]) -> None:
    """A request in HTTP/1.0 doesn't count as one from this machine, because a proxy may have sent it.

    By default nginx sends such requests, with the server's own address as the host and no further header.
    """
    address = served[1].urls_of_http[0].removeprefix("http://")
    for version, status in ((b"1.0", b"401"), (b"1.1", b"200")):
        with connected(served[1]) as connection:
            connection.sendall(
                b"GET /api/v5/info HTTP/%b\r\nHost: %b\r\nConnection: close\r\n\r\n" % (version, address.encode())
            )
            assert connection.makefile("rb").readline().split()[1] == status


def test_two_tokens_are_refused(owner: dict[str, str], http: httpx.Client) -> None:
    """A request with two Authorization headers is refused, because a proxy may check the other one."""
    own = owner["Authorization"]
    for second in (own, "Bearer x", ""):
        assert http.get("/info", headers=[("Authorization", own), ("Authorization", second)]).status_code == 400


def test_a_damaged_file_of_tokens_lets_in_only_who_runs_the_server(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With a damaged token file only the server's own token is accepted.

    Other clients learn neither its path nor its contents; the log reports the damage once.
    """
    with ts.open(tmp_path / "db") as db, serving_http(db) as server:
        assert server.http is not None
        tokens, url = server.http.context.tokens, f"{server.urls_of_http[0]}/api/v5/info"
        reader = tokens.add("reader", "read")
        tokens.path.write_text(f"{tokens.path.read_text()}a secret\n")
        for token, status in ((reader, 503), ("x", 503), (tokens.own, 200)):
            answer = httpx.get(url, headers={"Authorization": f"Bearer {token}"}, trust_env=False)
            assert (answer.status_code, "http-tokens" in answer.text) == (status, False)
        assert caplog.text.count("http-tokens, line 2") == 1


RULE = AuthorizationSettings(rules=(Rule(permission="allow", topics=("#",)),))


def status(server: Server, **headers: str) -> int:
    """Request the deletion of all messages; return the status of the response."""
    with client_of(server) as site:
        return site.delete("/messages", params={"filter": "#"}, headers=headers).status_code


def test_the_first_token_ends_what_this_machine_may_without_one(tmp_path: Path) -> None:
    """Access without a token from this machine ends with the first token, and returns when the last one is revoked.

    A token file that can't be read counts as one with tokens.
    """
    with ts.open(tmp_path / "db") as db, serving_http(db) as server:
        assert server.http is not None
        tokens = server.http.context.tokens
        assert 200 == status(server)
        tokens.add("reader", "read")
        assert 401 == status(server)
        assert 200 == status(server, Authorization=f"Bearer {tokens.own}")
        tokens.revoke("reader")
        assert 200 == status(server)
        tokens.path.unlink()
        assert 200 == status(server)
        tokens.path.write_text("damage\n")
        assert 503 == status(server)


@pytest.mark.parametrize("what", ["rule", "user", "never", "deny", "certificate"])
def test_the_first_user_or_rule_ends_what_this_machine_may_without_a_token(
    tmp_path: Path, authority: Authority, what: str
) -> None:
    """Access without a token from this machine ends with the first user or access rule, at the start or by a reload.

    The access returns when the users and rules are removed.
    """
    users = tmp_path / "users"
    users.touch()
    certificate, key = authority.sign("server")
    changed: dict[str, dict[str, Any]] = {
        "rule": {"authorization": RULE},
        "user": {"authentication": AuthenticationSettings(password_file=users)},
        "never": {"authentication": AuthenticationSettings(anonymous="never")},
        "deny": {"authorization": AuthorizationSettings(unlisted="deny")},
        "certificate": {
            "listeners": {
                "tls": ListenerSettings(
                    listen=ANY_PORT,
                    tls=TlsSettings(
                        certificate=certificate,
                        key=key,
                        client_authorities=authority.path,
                        client_certificates="required",
                        user_from_certificate=True,
                    ),
                )
            }
        },
    }
    before = ServerSettings(http=HttpSettings(listen=ANY_PORT), listeners={"mqtt": ListenerSettings(listen=ANY_PORT)})
    after = msgspec.structs.replace(before, **changed[what])
    with ts.open(tmp_path / "db", backend="memory") as db, Embedded(db, before) as embedded:
        for settings, answer in ((before, 200), (after, 401), (before, 200)):
            embedded.do(embedded.server.reload(settings))
            assert answer == status(embedded.server)
    # with a certificate, the server would need a listener, which `Embedded` doesn't start here
    if what != "certificate":
        with ts.open(tmp_path / "other", backend="memory") as db, Embedded(db, after) as embedded:
            assert 401 == status(embedded.server)


def test_the_access_that_a_program_gives_its_server_ends_it_too(tmp_path: Path) -> None:
    settings = ServerSettings(http=HttpSettings(listen=ANY_PORT))
    with (
        ts.open(tmp_path / "db", backend="memory") as db,
        closing(Access(AuthenticationSettings(), RULE)) as access,
        Embedded(db, settings, access=access) as embedded,
    ):
        assert 401 == status(embedded.server)


def test_behind_a_proxy_nothing_is_this_machine(tmp_path: Path) -> None:
    """With ``behind_proxy`` no request counts as one from this machine.

    A proxy that speaks HTTP/1.1 and adds no header looks like a local program.
    """
    with ts.open(tmp_path / "db", backend="memory") as db, serving_http(db, behind_proxy=True) as server:
        assert server.http is not None
        assert 401 == status(server)
        assert 200 == status(server, Authorization=f"Bearer {server.http.context.tokens.own}")


def test_a_clients_address_is_the_sockets(tmp_path: Path) -> None:
    """A server on all addresses accepts requests without a token only if they address it by a loopback name."""
    with ts.open(tmp_path / "db", backend="memory") as db, serving_http(db, listen=Address("0.0.0.0:0")) as server:
        port = server.urls_of_http[0].rpartition(":")[2]
        assert httpx.get(f"http://127.0.0.1:{port}/api/v5/info", trust_env=False).status_code == 200
        assert httpx.get(f"http://0.0.0.0:{port}/api/v5/info", trust_env=False).status_code == 401, "no loopback name"
