"""Servers of a cluster: a client may use any site, over HTTP and MQTT, while sites are shut down and killed."""

from __future__ import annotations

import hashlib
import hmac
import itertools
import json
import os
import secrets
import signal
import socket
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from topicstore.cli import cli
from topicstore.replication.documents import Documents
from topicstore.replication.log_stores import open_log_store
from topicstore.server.listeners.peer import Peer, Via
from topicstore.server.listeners.proxy_header import site_header
from topicstore.storage.shard_map import ShardMap
from topicstore_conformance.conditions.skipping import need
from topicstore_conformance.faults.threads import PATIENCE, wait_until
from topicstore_conformance.mqtt import wire
from topicstore_conformance.mqtt.certificates import Authority
from topicstore_conformance.mqtt.serving import Serving

pytest.importorskip("paho.mqtt.client", reason="needs paho-mqtt: pip install paho-mqtt")
import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion, MessageState, MQTTProtocolVersion
from topicstore_conformance.mqtt.paho_client import PahoClient, properties

SHARDS = 4
NEVER = "1h"
HOSTS = (socket.gethostname(), "127.0.0.1")
"""The hosts of two sites, as the first one shows them."""
VIA = Via(name="mqtt", scheme="mqtt", certificate_users=True)


class Answer:
    """A response of HTTP."""

    def __init__(self, response: Any) -> None:
        self.status, self.headers = response.status, response.headers
        data = response.read()
        self.json = json.loads(data) if data else None


class Lines:
    """A response of HTTP with lines of text."""

    def __init__(self, response: Any) -> None:
        self.headers = response.headers
        self.lines: list[str] = response.read().decode().splitlines()


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


class Cluster:
    """Server processes that share a log in a directory. Settings are given as variables of the environment."""

    def __init__(self, root: Path, **settings: str) -> None:
        self.root = root
        self.sites: dict[str, Serving] = {}
        self.settings = {
            "CLUSTER__BEAT_INTERVAL": "50ms",
            "CLUSTER__POLL_INTERVAL": "50ms",
            "CLUSTER__TAKEOVER_AFTER": NEVER,
            "DURABLE_STORAGE__MESSAGES__N_SHARDS": str(SHARDS),
            **settings,
        }
        self.token = secrets.token_urlsafe()
        """A token of the scope ``admin``, which all sites accept."""
        self.writer = secrets.token_urlsafe()
        """A token of the scope ``write``."""
        tokens, given = root / "tokens", {"admin": self.token, "write": self.writer}
        lines = [f"{scope} {scope} {hashlib.sha256(token.encode()).hexdigest()}\n" for scope, token in given.items()]
        tokens.write_text("".join(lines))
        tokens.chmod(0o600)
        self.settings["HTTP__LISTEN"] = "127.0.0.1:0"
        self.settings["HTTP__TOKEN_FILE"] = str(tokens)
        self._opener = urllib.request.build_opener(_NoRedirect)

    def start(self, *names: str) -> None:
        """Start sites one after the other, each on its own directory and port."""
        for name in names:
            if name not in self.sites:
                given = {**self.settings, "CLUSTER__URL": (self.root / "log").as_uri(), "CLUSTER__SITE": name}
                env = {**os.environ, **{f"TOPICSTORE__{key}": value for key, value in given.items()}}
                self.sites[name] = site = Serving(self.root / name, listen=False, env=env)
                env["TOPICSTORE__LISTENERS__MQTT__LISTEN"] = f"127.0.0.1:{site.port}"
            self.sites[name].start()

    def ask(self, site: str, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """Send an HTTP request to a site."""
        url = f"{self.url(site)}{path}"
        data = None if body is None else json.dumps(body).encode()
        named = {**self._headers, **{key.replace("_", "-"): value for key, value in headers.items()}}
        try:
            with self._opener.open(urllib.request.Request(url, data, named, method=method)) as response:
                return Answer(response)
        except urllib.error.HTTPError as refused:
            with refused:
                return Answer(refused)

    def url(self, site: str) -> str:
        """Return the URL of a site's HTTP interface."""
        scheme = next(one for one in ("https", "http") if self.sites[site].ready.get(one))
        return f"{scheme}://{self.sites[site].ready[scheme][0]}"

    def trust(self, context: ssl.SSLContext) -> None:
        """Send requests over TLS with a context."""
        self._opener = urllib.request.build_opener(_NoRedirect, urllib.request.HTTPSHandler(context=context))

    @property
    def _headers(self) -> dict[str, str]:
        return {"Content-Type": "application/json", "Authorization": f"Bearer {self.token}"}

    def read(self, site: str, path: str) -> Lines:
        """Return the lines of a response of a site."""
        url = f"{self.url(site)}{path}"
        with self._opener.open(urllib.request.Request(url, headers=self._headers)) as response:
            return Lines(response)

    def payloads(self, site: str, topic_filter: str = "%23") -> list[str]:
        """Return the payloads of all messages, as a site replays them."""
        lines = self.read(site, f"/api/v5/messages?filter={topic_filter}").lines
        return [json.loads(line)["payload"] for line in lines]

    def metric(self, site: str, name: str) -> dict[str, float]:
        """Return the samples of a metric by their labels."""
        lines = [line for line in self.read(site, "/metrics").lines if line.startswith(name)]
        return {line.rpartition(" ")[0].removeprefix(name): float(line.rpartition(" ")[2]) for line in lines}

    def owned(self, site: str) -> set[int]:
        """Return the shards that a site owns."""
        found = self.metric(site, "topicstore_shard_owned")
        return {int(labels.split('"')[1]) for labels, owned in found.items() if owned}

    def owners(self, *names: str) -> dict[int, str]:
        """Wait until these sites own all shards, and each of them at least one; return the owner of each shard."""
        found: dict[int, str] = {}

        def settled() -> bool:
            owned = {name: self.owned(name) for name in names}
            found.clear()
            found.update({shard: name for name, shards in owned.items() for shard in shards})
            return all(owned.values()) and sum(map(len, owned.values())) == len(found) == SHARDS

        wait_until(settled, "each shard has an owner")
        return found

    def close(self) -> None:
        """Kill all sites."""
        for site in self.sites.values():
            site.close()


def client_of(shards: set[int], prefix: str = "c") -> str:
    """Return a client id whose shard is one of these."""
    of = ShardMap(SHARDS).of
    return next(name for number in range(10_000) if of(name := f"{prefix}{number}") in shards)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two sites, each of which owns shards; neither ever takes the other for unresponsive."""
    need("rocksdb")
    with ExitStack() as closing:
        cluster = Cluster(tmp_path_factory.mktemp("pair"))
        closing.callback(cluster.close)
        cluster.start("a", "b")
        cluster.owners("a", "b")
        yield cluster


def test_what_is_published_at_any_site_is_stored_by_the_owners_and_read_everywhere(pair: Cluster) -> None:
    """A request with messages of both sites' shards is stored once, whichever site receives it.

    The sites require a token from clients, and accept the cluster's token from each other.
    """
    mine, other = client_of(pair.owned("a")), client_of(pair.owned("b"))
    for site in ("a", "b"):
        messages = [
            {"topic": "any/site", "payload": f"{site} {client} {n}", "client_id": client, "qos": 1}
            for n in range(3)
            for client in (mine, other)
        ]
        answer = pair.ask(site, "POST", "/api/v5/messages", messages)
        assert (200, {"count": 6, "stored": 6, "routed": 0, "retained": 0}) == (answer.status, answer.json)
    expected = sorted(f"{site} {client} {n}" for site in "ab" for n in range(3) for client in (mine, other))
    assert expected == sorted(pair.payloads("a", "any/site")) == sorted(pair.payloads("b", "any/site"))


def test_a_forwarded_request_is_not_forwarded_again(pair: Cluster) -> None:
    """A forwarded request to a site that doesn't own the shard gets the status 421, and nothing is stored."""
    message = {"topic": "one/hop", "payload": "1", "client_id": client_of(pair.owned("b"))}
    for method, path in (("POST", "/api/v5/messages"), ("PUT", "/api/v5/retained")):
        answer = pair.ask("a", method, path, message, Topicstore_Forwarded="b")
        assert (421, "1") == (answer.status, answer.headers["Retry-After"])
        assert "site b has forwarded" in answer.json["detail"]
    assert [] == pair.payloads("a", "one/hop")


def test_every_change_may_be_sent_to_any_site(pair: Cluster) -> None:
    """Changes of retained messages, sessions, rules and limits are forwarded to the owner, whose response is returned.

    That includes refusals and 404. The other site has the change soon after.
    """
    for site in ("a", "b"):
        for owner in ("a", "b"):
            name = client_of(pair.owned(owner), f"change-{site}{owner}")
            topic, here = f"set/{name}", f"/api/v5/retained?topic=set/{name}"
            answer = pair.ask(site, "PUT", "/api/v5/retained", {"topic": topic, "payload": "1", "client_id": name})
            assert (200, topic) == (answer.status, answer.json["topic"])
            assert "application/json" == answer.headers["Content-Type"]
            answer = pair.ask(site, "PUT", "/api/v5/retained", {"topic": topic, "payload": "", "client_id": name})
            assert (400, "application/problem+json") == (answer.status, answer.headers["Content-Type"])
            found = f"/api/v5/retained?filter={topic}"
            wait_until(lambda there=found: pair.ask("a", "GET", there).json["items"], "the retained message")
            wait_until(lambda there=found: pair.ask("b", "GET", there).json["items"], "the retained message")
            assert {"topic": topic, "cleared": True} == pair.ask(site, "DELETE", here).json
            with PahoClient(pair.sites[owner].port, name, clean=False, expiry=3_600) as client:
                client.subscribe("nothing", 1)
                path = f"/api/v5/sessions/{name}"
                wait_until(lambda there=path: 200 == pair.ask("a", "GET", there).status, "the session")
                wait_until(lambda there=path: 200 == pair.ask("b", "GET", there).status, "the session")
                answer = pair.ask(site, "POST", f"{path}/kick")
                assert (200, {"client_id": name, "kicked": True}) == (answer.status, answer.json)
                assert 0x98 == client.ended()
            assert {"client_id": name, "expired": True} == pair.ask(site, "DELETE", path).json
        rule = {"topic_filter": f"rules/{site}/#"}
        assert 201 == pair.ask(site, "POST", "/api/v5/persistence", rule).status
        path = "/api/v5/persistence?topic_filter="
        assert 200 == pair.ask(site, "DELETE", f"{path}rules/{site}/%23").status
        assert 404 == pair.ask(site, "DELETE", f"{path}rules/{site}/%23").status
        assert 400 == pair.ask(site, "PUT", "/api/v5/retention", {"max_age": "soon"}).status
        days = {"a": 30, "b": 40}[site]
        assert 86_400 * days == pair.ask(site, "PUT", "/api/v5/retention", {"max_age": f"{days}d"}).json["max_age"]
        assert 200 == pair.ask(site, "PUT", "/api/v5/retention", {"max_age": None}).status


@contextmanager
def listed(pair: Cluster, prefix: str) -> Iterator[tuple[list[str], list[str]]]:
    """Open two sessions in each shard; yield the client ids of all, and of those whose clients are connected."""
    names = sorted(client_of({shard}, f"{prefix}{n}-") for shard in range(SHARDS) for n in range(2))
    with ExitStack() as closing:
        for name in names:
            client = closing.enter_context(PahoClient(pair.sites["a"].port, name, clean=False, expiry=3_600))
            client.subscribe(f"{prefix}/#", 1)
            if name in names[::2]:
                client.close()
        yield names, names[1::2]
    for name in names:
        assert 200 == pair.ask("a", "DELETE", f"/api/v5/sessions/{name}").status


def test_any_site_lists_the_sessions_of_all_sites(pair: Cluster) -> None:
    """Session pages of any size are the same at both sites, and include the clients connected to either."""
    path = "/api/v5/sessions?prefix=listed"

    def pages(site: str, limit: int) -> list[tuple[str, bool]]:
        found, after = [], ""
        while True:
            page = pair.ask(site, "GET", f"{path}&limit={limit}{after}").json
            assert ({}, True) == (page["missing"], len(page["items"]) <= limit)
            found += [(one["client_id"], one["connected"]) for one in page["items"]]
            if page["next"] is None:
                return found
            after = f"&after={page['next']}"

    with listed(pair, "listed") as (names, connected):
        expected = [(name, name in connected) for name in names]
        wait_until(lambda: expected == pages("a", 100), "the ends of connections")
        for site, limit in itertools.product("ab", (1, 3, 100)):
            assert expected == pages(site, limit)
        for site in ("a", "b"):
            for name in names:
                shown = pair.ask(site, "GET", f"/api/v5/sessions/{name}").json
                assert (name in connected) is shown["connected"] is (shown["connection"] is not None)
            answer = pair.ask(site, "GET", "/api/v5/sessions/nobody")
            assert (404, "SessionNotFoundError") == (answer.status, answer.json["title"])


def test_any_site_has_the_lag_of_all_sessions(pair: Cluster) -> None:
    """The lag of some sessions, of all, and the list of those that are furthest behind are the same at both sites."""

    def behind(site: str) -> list[int]:
        found = pair.ask(site, "GET", "/api/v5/sessions?prefix=late&sort=lag&limit=4").json["items"]
        return [one["lag"]["messages"] for one in found]

    with listed(pair, "late") as (names, connected):
        message = {"topic": "late/x", "payload": "1", "client_id": names[0], "qos": 1}
        assert 200 == pair.ask("a", "POST", "/api/v5/messages", message).status
        for site in ("a", "b"):
            wait_until(lambda site=site: [1] * 4 == behind(site), "the lag of those that are away")
            lags = pair.ask(site, "GET", "/api/v5/lag?" + "&".join(f"client_id={name}" for name in names)).json
            assert names == [*lags]
            assert {1} == {lags[name]["late/#"]["messages"] for name in set(names).difference(connected)}
            assert {*names} <= pair.ask(site, "GET", "/api/v5/lag").json.keys()
            answer = pair.ask(site, "GET", "/api/v5/lag?client_id=nobody")
            assert (404, "SessionNotFoundError") == (answer.status, answer.json["title"])


def test_messages_are_deleted_at_all_owners(pair: Cluster) -> None:
    """A deletion at any site removes messages of all shards, and returns their total number."""
    clients = [client_of({shard}, "delete") for shard in range(SHARDS)]
    for site in ("a", "b"):
        messages = [{"topic": f"gone/{site}", "payload": "1", "client_id": client} for client in clients]
        assert 200 == pair.ask(site, "POST", "/api/v5/messages?store=true", messages).status
        answer = pair.ask(site, "DELETE", f"/api/v5/messages?filter=gone/{site}")
        assert (200, {"deleted": SHARDS}) == (answer.status, answer.json)
        assert [] == pair.payloads("a", f"gone/{site}") == pair.payloads("b", f"gone/{site}")
        assert (
            403 == pair.ask(site, "DELETE", "/api/v5/messages?filter=a", Authorization=f"Bearer {pair.writer}").status
        )
        answer = pair.ask(site, "DELETE", "/api/v5/messages?filter=a%23")
        assert (400, "InvalidFilterError") == (answer.status, answer.json["title"])
        for wrong in ("", "0,", "-1", str(SHARDS), "9" * 5_000):
            assert 400 == pair.ask(site, "DELETE", "/api/v5/messages?filter=a", Topicstore_Shards=wrong).status


def test_an_import_is_stored_by_the_owners_of_its_rows_once(pair: Cluster) -> None:
    """Rows of all shards are imported through any site; a repetition through another one continues from its progress.

    The user who runs the server may import ``$SYS`` topics, also for another site's shards.
    """
    clients = [client_of({shard}, "import") for shard in range(SHARDS)]
    rows = [
        {"topic": topic, "payload": f"{client} {number}", "client_id": client, "qos": 1}
        for number in range(50)
        for client in clients
        for topic in ("imported/x", "$SYS/imported")
    ]
    (file := pair.root / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for site in ("a", "b"):
        done = CliRunner().invoke(cli, ["import", str(pair.root / site), str(file)])
        assert 0 == done.exit_code, done.output
        for topic in ("imported/%23", "$SYS/imported"):
            assert sorted(row["payload"] for row in rows[::2]) == sorted(pair.payloads(site, topic))


def test_the_site_that_a_client_reaches_decides_what_it_may_do(pair: Cluster) -> None:
    """The site that a client reaches checks the client's token, so a forwarded request has no other rights.

    A missing scope is refused there, even though sites trust the cluster's token.
    """
    settings = {"max_age": None}
    for site in ("a", "b"):
        assert 403 == pair.ask(site, "PUT", "/api/v5/retention", settings, Authorization=f"Bearer {pair.writer}").status
        assert 401 == pair.ask(site, "PUT", "/api/v5/retention", settings, Authorization="Bearer none").status
        name = client_of(pair.owned({"a": "b", "b": "a"}[site]), "may")
        message = {"topic": "may", "payload": "1", "client_id": name}
        answer = pair.ask(site, "PUT", "/api/v5/retained", message, Authorization=f"Bearer {pair.writer}")
        assert 200 == answer.status


def test_metrics_show_requests_takeovers_and_lag(pair: Cluster) -> None:
    """Each site exports its requests to the log store by kind, its takeovers, and how far its replicas lag."""
    for site in ("a", "b"):
        counts = pair.metric(site, "topicstore_log_store_seconds_count")
        assert {"get", "list", "put"} <= {labels.split('"')[1] for labels, count in counts.items() if count}
        assert sum(pair.metric(site, "topicstore_takeovers_total").values()) >= len(pair.owned(site))
        assert {0.0} == set(pair.metric(site, "topicstore_fenced_writes_total").values())
        lag = pair.metric(site, "topicstore_replica_lag_seconds")
        assert SHARDS == len(lag)
        assert pair.owned(site) <= {int(labels.split('"')[1]) for labels, seconds in lag.items() if seconds == 0}
        assert SHARDS == len(pair.metric(site, "topicstore_replica_lag_entries"))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster without sites, whose settings a test may change before it starts them."""
    need("rocksdb")
    with ExitStack() as closing:
        cluster = Cluster(tmp_path)
        closing.callback(cluster.close)
        yield cluster


@pytest.mark.slow
def test_a_site_that_does_not_forward_redirects_to_the_owner(cluster: Cluster) -> None:
    """With ``forward = false``, a publish for another site's shard gets the status 307; one for several sites, 421."""
    cluster.settings["CLUSTER__FORWARD"] = "false"
    cluster.start("a", "b")
    cluster.owners("a", "b")
    mine, other = ({"topic": "t", "payload": "1", "client_id": client_of(cluster.owned(site))} for site in "ab")
    answer = cluster.ask("a", "POST", "/api/v5/messages?store=true", other)
    expected = f"http://{cluster.sites['b'].ready['http'][0]}/api/v5/messages?store=true"
    assert (307, expected) == (answer.status, answer.headers["Location"])
    assert 421 == cluster.ask("a", "POST", "/api/v5/messages", [mine, other]).status
    assert 421 == cluster.ask("a", "DELETE", "/api/v5/messages?filter=t").status
    answer = cluster.ask("a", "PUT", "/api/v5/retained", other)
    expected = f"http://{cluster.sites['b'].ready['http'][0]}/api/v5/retained"
    assert (307, expected) == (answer.status, answer.headers["Location"])
    assert [] == cluster.payloads("b")
    cluster.sites["b"].kill()
    answer = cluster.ask("a", "POST", "/api/v5/messages", mine)
    assert 200 == answer.status


@pytest.mark.slow
def test_a_publish_for_an_owner_that_is_gone_may_be_repeated(cluster: Cluster) -> None:
    """While the owner of a shard is dead and not replaced, a publish gets the status 503 with ``Retry-After``."""
    cluster.start("a", "b")
    cluster.owners("a", "b")
    other = {"topic": "t", "payload": "1", "client_id": client_of(cluster.owned("b"))}
    cluster.sites["b"].kill()
    answer = cluster.ask("a", "POST", "/api/v5/messages", other)
    assert (503, "1") == (answer.status, answer.headers["Retry-After"])
    assert "site b, which writes the shard, can't be reached" in answer.json["detail"]
    cluster.start("b")
    wait_until(lambda: 200 == cluster.ask("a", "POST", "/api/v5/messages", other).status, "the owner is back")
    assert ["1"] == cluster.payloads("a")


@pytest.mark.slow
def test_ds_shows_and_changes_the_sites_of_a_cluster(cluster: Cluster) -> None:
    """`ds` shows all sites, lets a site leave, join and be forgotten, and refuses to lose a shard's last replica."""
    cluster.settings["CLUSTER__TAKEOVER_AFTER"] = "1s"
    cluster.start("a", "b")
    cluster.owners("a", "b")
    (token := cluster.root / "token").write_text(cluster.token)

    def ds(*words: str, code: int = 0) -> str:
        asked = ("--url", f"http://{cluster.sites['a'].ready['http'][0]}", "--token-file", str(token))
        done = CliRunner().invoke(cli, ["ds", *words, *asked])
        assert code == done.exit_code, done.output
        return done.output

    def keeps(site: str) -> bool:
        shards = json.loads(ds("info", "--json"))["shards"]
        assert SHARDS == len(shards)
        return any(site in shard["replicas"] or f"+{site}" in shard["transitions"] for shard in shards)

    lines = ds("info").splitlines()
    assert "a" == lines[1]
    assert [f"{site}    'topicstore@{host}'        up" for site, host in zip("ab", HOSTS, strict=True)] == lines[4:6]
    assert f"messages/0{' ' * 24}a      b" in [line.rstrip() for line in lines]
    assert "ok\n" == ds("leave", "messages", "b")
    wait_until(lambda: not keeps("b"), "site b has left")
    assert "ok\n" == ds("join", "messages", "b")
    wait_until(lambda: keeps("b"), "site b is back")
    assert "site b is running: its last heartbeat is less than" in ds("forget", "b", code=2)
    cluster.sites["b"].kill()
    wait_until(lambda: "(x) down" in ds("info"), "site b is down")
    wait_until(lambda: set(range(SHARDS)) == cluster.owned("a"), "site a has taken over")
    assert "ok\n" == ds("forget", "b")
    assert ["a"] == [site["id"] for site in json.loads(ds("info", "--json"))["sites"]]
    ds("leave", "messages", "a", code=2)
    ds("leave", "messages", "nobody", code=2)


# --- MQTT ---


def test_a_client_is_served_at_any_site_under_its_own_address(pair: Cluster) -> None:
    """Clients of both versions subscribe and publish through any site; the owner learns the client's own address."""
    for version in (4, 5):
        for site, owner in (("a", "a"), ("a", "b"), ("b", "a"), ("b", "b")):
            name = client_of(pair.owned(owner), f"{site}{owner}{version}-")
            with PahoClient(pair.sites[site].port, name, version=version) as client:
                client.subscribe(f"own/{name}", 1)
                client.publish(f"own/{name}", name.encode(), 2)
                assert [name] == client.payloads(1)
                session = pair.ask(owner, "GET", f"/api/v5/sessions/{name}").json
                host, port = client.paho.socket().getsockname()
                assert f"{host}:{port}" == session["connection"]["address"]
        assert sorted(pair.payloads("a", "own/%23")) == sorted(pair.payloads("b", "own/%23"))


def test_subscribers_receive_what_is_published_at_other_sites(pair: Cluster) -> None:
    """A subscriber of one site receives messages of publishers whose shards another site owns."""
    mine, other = client_of(pair.owned("a"), "s"), client_of(pair.owned("b"), "p")
    with PahoClient(pair.sites["b"].port, mine) as subscriber, PahoClient(pair.sites["a"].port, other) as publisher:
        subscriber.subscribe("between/#", 1)
        for number in range(20):
            publisher.publish(f"between/{number % 3}", b"%d" % number, 1)
        assert {str(number) for number in range(20)} == set(subscriber.payloads(20))


@pytest.mark.slow
def test_what_only_clients_wait_for_goes_once_all_have_it(cluster: Cluster) -> None:
    """A server of a cluster removes messages stored only for sessions, by default after ten minutes.

    The sessions may be on any site. Messages stored for a rule are kept.
    """
    cluster.settings["DURABLE_SESSIONS__PERSISTENCE"] = '[{topic_filter = "kept/#"}]'
    cluster.start("a", "b")
    cluster.owners("a", "b")
    assert 600 == cluster.ask("b", "GET", "/api/v5/retention").json["delivered"]
    assert 200 == cluster.ask("b", "PUT", "/api/v5/retention", {"delivered": "200ms"}).status
    mine, other = client_of(cluster.owned("a"), "s"), client_of(cluster.owned("b"), "p")
    with (
        PahoClient(cluster.sites["b"].port, mine) as subscriber,
        PahoClient(cluster.sites["b"].port, other) as publisher,
    ):
        subscriber.subscribe("#", 1)
        expected = {*map(str, range(20)), "rule"}
        for number in range(20):
            publisher.publish(f"between/{number % 3}", b"%d" % number, 1)
        publisher.publish("kept/a", b"rule", 1)
        assert expected == set(subscriber.payloads(21))
        wait_until(lambda: ["rule"] == cluster.payloads("a") == cluster.payloads("b"), "the removal of all but one")


def test_members_of_a_shared_subscription_are_at_any_site(pair: Cluster) -> None:
    """Members of a shared subscription, with sessions at both sites, share messages published at either site.

    Each message goes to one member.
    """
    names = [client_of(pair.owned(site), f"share{number}-") for number in range(2) for site in "ab"]

    def slices() -> list[int]:
        (group,) = pair.ask("a", "GET", "/api/v5/groups").json["items"]
        return [sum(member["slices"]) for member in group["members"]]

    with ExitStack() as clients:
        members = [clients.enter_context(PahoClient(pair.sites["a"].port, name)) for name in names]
        assert [1] * 4 == [member.subscribe("$share/workers/jobs/#", 1) for member in members]
        wait_until(lambda: [64 * SHARDS // 4] * 4 == slices(), "a share for each member")
        publishers = [clients.enter_context(PahoClient(pair.sites[site].port, f"boss-{site}")) for site in "ab"]
        for number in range(60):
            publishers[number % 2].publish(f"jobs/{number}", str(number), 1)
        wait_until(lambda: 60 <= sum(len(member.messages) for member in members), "all jobs")
        done = [message.payload.decode() for member in members for message in member.messages]
        assert sorted(map(str, range(60))) == sorted(done)
        assert all(member.messages for member in members)


def test_wills_and_retained_messages_are_those_of_all_sites(pair: Cluster) -> None:
    """A client of one site gets the wills of another site's clients, and the messages that they retain and clear."""
    mine, other = client_of(pair.owned("a"), "w"), client_of(pair.owned("b"), "w")
    will = {"prepared": lambda client: client.will_set("will/of", mine, 1, retain=True)}
    with PahoClient(pair.sites["b"].port, mine, **will) as client:
        for number in range(8):
            client.publish(f"kept/{number}", str(number), 1, retain=True)
        client.paho.socket().shutdown(socket.SHUT_RDWR)
        client.ended()
    with PahoClient(pair.sites["a"].port, other) as client:
        client.subscribe("kept/+", 1)
        assert {*map(str, range(8))} == set(client.payloads(8))
        client.subscribe("will/#", 1)
        assert mine == client.payloads(9)[-1]
        client.publish("kept/0", b"", 1, retain=True)
    path = "/api/v5/retained?filter=kept/0"
    wait_until(lambda: not pair.ask("a", "GET", path).json["items"], "the other site has what was cleared")
    with PahoClient(pair.sites["b"].port, mine) as client:
        client.subscribe("kept/#", 1)
        assert {*map(str, range(1, 8))} == set(client.payloads(7))


def test_a_client_without_an_id_is_served_where_it_connects(pair: Cluster) -> None:
    """A client without an id gets one whose shard is owned by the site that it connects to."""
    for site in ("a", "b"):
        with pair.sites[site].client() as client:
            assigned = client.connect("").properties["assigned_client_identifier"]
            assert ShardMap(SHARDS).of(assigned) in pair.owned(site)


def test_a_header_that_no_site_has_made_is_refused(pair: Cluster) -> None:
    """A connection that begins with a header of the PROXY protocol is closed, unless a site has signed the header."""
    peer = Peer(via=VIA, address="192.0.2.1:50000", loopback=True, certificate_name="admin")
    with socket.create_connection(("127.0.0.1", pair.sites["a"].port)) as connection:
        connection.sendall(site_header(b"guessed", "b", peer))
        assert b"" == connection.recv(1)


def test_a_client_of_a_stopped_owner_is_let_go_when_another_process_takes_its_name(cluster: Cluster) -> None:
    """A connection relayed to a paused owner is closed when another process replaces that owner and serves the client.

    The paused process can't close the connection, and its kernel keeps it open.
    """
    cluster.start("a", "b")
    cluster.owners("a", "b")
    name, stopped = client_of(cluster.owned("b")), cluster.sites.pop("b")
    with closing(stopped), cluster.sites["a"].client() as client:
        assert 0 == client.connect(name, keep=True).reason
        stopped.signal(signal.SIGSTOP)
        (cluster.root / "b").rename(cluster.root / "stopped")
        cluster.start("b")
        assert client.ended() is None
        with cluster.sites["a"].client() as again:
            assert again.connect(name, keep=True).present


def test_a_listener_may_refer_clients_to_the_owner_of_their_session(cluster: Cluster) -> None:
    """With ``redirect = true``, an MQTT 5 client gets 0x9C and the owner's address; an MQTT 3.1.1 client is relayed.

    When a shard moves to a site that joins, its clients get 0x9C, and their sessions continue on the new owner.
    """
    cluster.settings["LISTENERS__MQTT__REDIRECT"] = "true"
    cluster.start("a", "b")
    cluster.owners("a", "b")
    name = client_of(cluster.owned("b"))
    with cluster.sites["a"].client() as client:
        connack = client.connect(name)
        port = cluster.sites["b"].port
        assert (0x9C, f"127.0.0.1:{port}") == (connack.reason, connack.properties["server_reference"])
    with cluster.sites["a"].client(version=4) as client:
        assert 0 == client.connect(name).reason
    before = {site: cluster.owned(site) for site in "ab"}
    with ExitStack() as clients:
        connected = {}
        for site, shards in before.items():
            for shard in shards:
                client_id = client_of({shard}, f"stays-{site}")
                connected[shard] = clients.enter_context(
                    PahoClient(cluster.sites[site].port, client_id, clean=False, expiry=3_600)
                )
                connected[shard].subscribe("stays/#", 1)
        cluster.start("c")
        cluster.owners("a", "b", "c")
        moved = cluster.owned("c")
        assert moved
        for shard, client in connected.items():
            if shard in moved:
                assert 0x9C == client.ended()
            else:
                assert client.disconnect is None
    for shard in moved:
        client_id = client_of({shard}, f"stays-{next(site for site, shards in before.items() if shard in shards)}")
        with PahoClient(cluster.sites["c"].port, client_id, clean=False, expiry=3_600) as client:
            assert client.present
            client.publish("stays/here", str(shard), 1)
            assert [str(shard)] == client.payloads(1)


@pytest.mark.slow
def test_clients_wait_once_for_a_silent_log_store(cluster: Cluster) -> None:
    """Only the first batch waits for the log store; clients of all shards are then refused at once, until it responds.

    Publishers of QoS 1 are disconnected, and send again; requests that need no log store are served.
    """
    cluster.settings["CLUSTER__STORE_TIMEOUT"] = "1s"
    cluster.start("a")
    wait_until(lambda: SHARDS == len(cluster.owned("a")), "the site owns all shards")
    site, clients = cluster.sites["a"], [client_of({shard}, "silent") for shard in range(SHARDS)]
    published = wire.publish("silent/x", b"1", qos=1, packet_id=1)
    with site.client() as first, site.client() as second:
        first.connect(clients[0])
        second.connect(clients[1])
        # The first message also makes the server write which messages sessions need, once for each shard.
        first.send(wire.publish("silent/x", b"0", qos=1, packet_id=9))
        assert "PUBACK" == first.receive().kind
        (cluster.root / "log").rename(cluster.root / "elsewhere")
        first.send(published)
        assert ("DISCONNECT", 0x89) == first.farewell()
        second.send(published)
        assert ("DISCONNECT", 0x89) == second.farewell()
    for name in clients:
        with site.client() as client:
            assert 0x89 == client.connect(name, session_expiry_interval=3_600).reason
    with site.client() as client:
        assert 0 == client.connect(clients[0]).reason
        client.ping()
    message = {"topic": "silent/x", "payload": "1", "client_id": clients[2]}
    answer = cluster.ask("a", "POST", "/api/v5/messages", message)
    assert (503, "StorageUnavailableError") == (answer.status, answer.json["title"])
    assert "nothing was queued" in answer.json["detail"]
    (cluster.root / "elsewhere").rename(cluster.root / "log")
    for name in clients[1:]:

        def acknowledged(name: str = name) -> bool:
            with site.client() as client:
                client.connect(name)
                client.send(published)
                packet = client.receive()
                return packet is not None and packet.kind == "PUBACK"

        wait_until(acknowledged, "the store is back")
    waited = [line for line in site.log().splitlines() if "may be stored" in line and "client_id" in line]
    assert [clients[0]] == [json.loads(line)["client_id"] for line in waited]


@pytest.mark.slow
def test_sites_reach_each_other_over_tls(cluster: Cluster) -> None:
    """Clients are relayed over mutual TLS, and requests forwarded over TLS.

    A site whose certificate names another host is refused; new certificates and authorities take effect after SIGHUP.
    """
    authority = Authority(cluster.root)
    files = [str(path) for path in authority.sign("server")]
    wrong = authority.signs.issue_cert("elsewhere.example")
    tls = {"CERTIFICATE": files[0], "KEY": files[1]}
    required = {**tls, "CLIENT_AUTHORITIES": str(authority.path), "CLIENT_CERTIFICATES": "required"}
    cluster.settings |= {"CLUSTER__TLS": "true", "CLUSTER__CA_FILE": str(authority.path)}
    cluster.settings |= {f"CLUSTER__{key}": value for key, value in tls.items()}
    cluster.settings |= {f"LISTENERS__MQTT__TLS__{key}": value for key, value in required.items()}
    cluster.settings |= {f"HTTP__TLS__{key}": value for key, value in tls.items()}
    cluster.trust(authority.trusting())
    cluster.start("a", "b")
    cluster.owners("a", "b")

    def connected(site: str, name: str) -> PahoClient:
        own = (str(authority.path), *files)
        return PahoClient(cluster.sites[site].port, name, prepared=lambda client: client.tls_set(*own))

    for site, owner in (("a", "b"), ("b", "a"), ("a", "a")):
        name = client_of(cluster.owned(owner), f"tls{site}")
        with connected(site, name) as client:
            client.subscribe(f"tls/{name}/#", 1)
            message = {"topic": f"tls/{name}/http", "payload": "1", "client_id": name}
            assert 200 == cluster.ask(site, "PUT", "/api/v5/retained", message).status
            client.publish(f"tls/{name}/mqtt", "x" * 300_000, 2)
            assert ["1", "x" * 300_000] == client.payloads(2)
            session = cluster.ask(owner, "GET", f"/api/v5/sessions/{name}").json
            host, port = client.paho.socket().getsockname()
            assert f"{host}:{port}" == session["connection"]["address"]
    name = client_of(cluster.owned("b"), "wrong")
    wrong.private_key_pem.write_to_path(files[1])
    Path(files[0]).write_bytes(b"".join(one.bytes() for one in wrong.cert_chain_pems))
    cluster.sites["b"].signal(signal.SIGHUP)
    wait_until(lambda: "were read again" in cluster.sites["b"].log(), "the new certificate")
    message = {"topic": "tls/wrong", "payload": "1", "client_id": name}
    answer = cluster.ask("a", "PUT", "/api/v5/retained", message)
    assert (503, True) == (answer.status, "certificate" in answer.json["detail"])
    with cluster.sites["a"].client() as client:
        context = authority.trusting(authority.sign("client"))
        client.socket = context.wrap_socket(client.socket, server_hostname="127.0.0.1")
        assert 0x88 == client.connect(name).reason
    renewed = Authority(cluster.root)
    renewed.sign("server")
    for site, times in (("a", 1), ("b", 2)):
        cluster.sites[site].signal(signal.SIGHUP)
        log = cluster.sites[site].log
        wait_until(lambda log=log, times=times: times == log().count("were read again"), "the new authority")
    cluster.trust(renewed.trusting())
    assert 200 == cluster.ask("a", "PUT", "/api/v5/retained", message).status


def test_a_header_in_pieces_within_tls_is_read_and_one_of_nobody_refused(cluster: Cluster) -> None:
    """A site's header may arrive in pieces, followed by the CONNECT; a header without a site's signature is refused.

    The server then closes the connection.
    """
    authority = Authority(cluster.root)
    files = [str(path) for path in authority.sign("server")]
    cluster.settings |= {"LISTENERS__MQTT__TLS__CERTIFICATE": files[0], "LISTENERS__MQTT__TLS__KEY": files[1]}
    cluster.settings |= {"CLUSTER__TLS": "true", "CLUSTER__CA_FILE": str(authority.path)}
    cluster.start("a")
    peer = Peer(via=VIA, address="192.0.2.1:50000", loopback=True, certificate_name="admin")
    context = authority.trusting()
    documents = Documents(open_log_store((cluster.root / "log").as_uri()), lambda _: None)
    _, document = documents.newest()
    assert document is not None
    key = hmac.digest(document.token, b"mqtt", hashlib.sha256)

    def answered(data: bytes, pieces: int) -> bytes:
        with (
            socket.create_connection(("127.0.0.1", cluster.sites["a"].port)) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
        ):
            for start in range(0, len(data), pieces):
                connection.sendall(data[start : start + pieces])
            return connection.recv(1)

    header = site_header(key, "b", peer)
    for pieces in (1, 7, 10_000):
        assert b"\x20" == answered(header + wire.connect("pieces"), pieces)
    assert b"\x20" == answered(wire.connect("none"), 1)
    assert b"" == answered(site_header(b"guessed", "b", peer) + wire.connect("guessed"), 10_000)
    assert b"" == answered(header[:1] + b"nonsense", 10_000)
    assert "the header is not from a site of this cluster" in cluster.sites["a"].log()


# --- sites that end and die ---


class _Paho(paho.Client):
    """A client of paho that sends PUBREL again also after several connections that failed.

    After the second one, paho-mqtt 2.1 sends the whole PUBLISH again (`_messages_reconnect_reset_out`), although a
    PUBREC has come [MQTT-4.3.3-6]; then a server stores the message twice, because it has freed the packet id.
    """

    def _messages_reconnect_reset_out(self) -> None:
        with self._out_message_mutex:
            for message in self._out_messages.values():
                if message.state == MessageState.MQTT_MS_RESEND_PUBREL:
                    message.state = MessageState.MQTT_MS_WAIT_FOR_PUBCOMP
        super()._messages_reconnect_reset_out()


class Roaming:
    """A paho client that connects to the next site when its connection ends, and resumes its session.

    ports: the ports of the sites, in the order in which the client tries them.
    """

    def __init__(self, ports: Sequence[int], client_id: str) -> None:
        self._ports = itertools.cycle(ports)
        self._lock = threading.Lock()
        self.received: list[str] = []
        """The payloads that have arrived, in order. Guarded by the lock."""
        self._paho = _Paho(
            CallbackAPIVersion.VERSION2, client_id, protocol=MQTTProtocolVersion.MQTTv5, reconnect_on_failure=True
        )
        self._paho.reconnect_delay_set(0.1, 0.1)
        self._subscribed = threading.Event()
        self._filters: list[tuple[str, int]] = []
        self._paho.on_connect = self._on_connect
        self._paho.on_subscribe = lambda *_: self._subscribed.set()
        self._paho.on_disconnect = lambda *_: self._next()
        self._paho.on_connect_fail = lambda *_: self._next()
        self._paho.on_message = lambda _client, _data, message: self._keep(message.payload.decode())
        self._answers: dict[int, Any] = {}
        """The reason codes of the last acknowledgements, by packet id."""
        self._paho.on_publish = lambda _client, _data, number, reason, _values: self._answers.update({number: reason})
        self._next()
        self._paho.loop_start()

    def _next(self) -> None:
        how = properties("CONNECT", SessionExpiryInterval=3_600)
        self._paho.connect_async("127.0.0.1", next(self._ports), clean_start=False, properties=how)

    def _on_connect(self, _client: Any, _data: Any, _flags: Any, reason: Any, _values: Any) -> None:
        if not reason.is_failure and self._filters:
            self._paho.subscribe(self._filters)

    def _keep(self, payload: str) -> None:
        with self._lock:
            self.received.append(payload)

    def subscribe(self, topic_filter: str, qos: int) -> None:
        """Subscribe at each connection; return when a site has acknowledged it."""
        self._filters = [(topic_filter, qos)]
        wait_until(self._paho.is_connected, "a connection")
        self._paho.subscribe(self._filters)
        assert self._subscribed.wait(PATIENCE)

    def publish(self, topic: str, payload: str, qos: int) -> None:
        """Publish, and wait until a site acknowledges the message, even if other sites die meanwhile."""
        number = self._paho.publish(topic, payload, qos).mid
        wait_until(lambda: number in self._answers, f"an acknowledgement of {payload}")
        reason = self._answers.pop(number)
        # A PUBREL that is repeated, because its PUBCOMP was lost, finds no packet id (MQTT 5, section 4.3.3).
        assert reason.value in (0, 0x92), f"{payload} was refused: {reason}"

    def close(self) -> None:
        self._paho.disconnect()
        self._paho.loop_stop()


def publish_while(cluster: Cluster, rounds: int, disturb: Callable[[int], object]) -> dict[str, list[str]]:
    """Publish by four clients, two of QoS 1 and two of QoS 2, in rounds; disturb the sites in the middle of each round.

    Returns the acknowledged messages of each publisher, in order. Checks that a subscriber of QoS 2, which stays
    connected, has received all of them: messages of QoS 2 once, and those of each publisher in order.
    """
    names = list(cluster.sites)
    ports = [cluster.sites[name].port for name in names]
    acknowledged: dict[str, list[str]] = {}
    with ExitStack() as closing:
        subscriber = Roaming(ports[::-1], "subscriber")
        closing.callback(subscriber.close)
        subscriber.subscribe("load/#", 2)
        publishers = {}
        for number in range(4):
            name = f"publisher-{number}"
            publishers[name] = Roaming(ports[number % len(ports) :] + ports[: number % len(ports)], name)
            closing.callback(publishers[name].close)
            acknowledged[name] = []

        def work(name: str, turn: int, half: threading.Barrier) -> None:
            qos = 1 + int(name[-1]) % 2
            for number in range(10):
                if number == 5:
                    half.wait(PATIENCE)
                payload = f"{name} {turn * 10 + number}"
                publishers[name].publish(f"load/{name}", payload, qos)
                acknowledged[name].append(payload)

        for turn in range(rounds):
            half = threading.Barrier(len(publishers) + 1)
            with ThreadPoolExecutor(len(publishers)) as threads:
                works = [threads.submit(work, name, turn, half) for name in publishers]
                half.wait(PATIENCE)
                disturb(turn)
                for one in works:
                    one.result()
        every = {payload for payloads in acknowledged.values() for payload in payloads}
        wait_until(lambda: every <= set(subscriber.received), "the subscriber has all")
        received = list(subscriber.received)
    for name, payloads in acknowledged.items():
        of = [payload for payload in received if payload.startswith(name)]
        if int(name[-1]) % 2:
            assert payloads == of
        assert payloads == list(dict.fromkeys(of))
    return acknowledged


def check_stored(cluster: Cluster, site: str, acknowledged: Mapping[str, Sequence[str]]) -> None:
    """Check that a site replays all acknowledged messages: those of QoS 2 once."""
    stored = cluster.payloads(site, "load/%23")
    for name, payloads in acknowledged.items():
        of = [payload for payload in stored if payload.startswith(name)]
        assert payloads == (of if int(name[-1]) % 2 else list(dict.fromkeys(of)))


def test_no_message_is_lost_while_a_site_is_killed_and_another_drained(cluster: Cluster) -> None:
    """Clients publish and receive at QoS 1 and 2 over three sites, of which one is killed and one is shut down."""
    cluster.settings["CLUSTER__TAKEOVER_AFTER"] = "1s"
    cluster.start("a", "b", "c")
    cluster.owners("a", "b", "c")
    acknowledged = publish_while(cluster, 2, lambda turn: (cluster.sites["a"].kill, cluster.sites["b"].stop)[turn]())
    check_stored(cluster, "c", acknowledged)


@pytest.mark.slow
def test_no_message_is_lost_over_many_deaths(cluster: Cluster) -> None:
    """No message is lost while sites are killed, paused and resumed, drained, and started again, round after round."""
    cluster.settings["CLUSTER__TAKEOVER_AFTER"] = "1s"
    names = ("a", "b", "c")
    cluster.start(*names)
    cluster.owners(*names)

    def disturb(turn: int) -> None:
        name = names[turn % 3]
        site = cluster.sites[name]
        if turn % 4 == 3:
            owners = {other for other in names if other != name}
            site.signal(signal.SIGSTOP)
            wait_until(lambda: SHARDS == sum(len(cluster.owned(one)) for one in owners), "others have taken over")
            site.signal(signal.SIGCONT)
        else:
            site.kill() if turn % 2 else site.stop()
            cluster.start(name)

    acknowledged = publish_while(cluster, 12, disturb)
    for name in names:
        check_stored(cluster, name, acknowledged)
