"""Servers that share their messages: any client at any site, over HTTP and MQTT, while sites end and die."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from topicstore.storage.shard_map import ShardMap
from topicstore_conformance.conditions.skipping import need
from topicstore_conformance.faults.threads import wait_until
from topicstore_conformance.mqtt.serving import Serving

SHARDS = 4
NEVER = "1h"


class Answer:
    """A response of HTTP."""

    def __init__(self, response: Any) -> None:
        self.status, self.headers = response.status, response.headers
        data = response.read()
        self.json = json.loads(data) if data else None


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
        tokens = root / "tokens"
        tokens.write_text(f"tester admin {hashlib.sha256(self.token.encode()).hexdigest()}\n")
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
        """Send a request of HTTP to a site."""
        url = f"http://{self.sites[site].ready['http'][0]}{path}"
        data = None if body is None else json.dumps(body).encode()
        named = {**self._headers, **{key.replace("_", "-"): value for key, value in headers.items()}}
        try:
            with self._opener.open(urllib.request.Request(url, data, named, method=method)) as response:
                return Answer(response)
        except urllib.error.HTTPError as refused:
            with refused:
                return Answer(refused)

    @property
    def _headers(self) -> dict[str, str]:
        return {"Content-Type": "application/json", "Authorization": f"Bearer {self.token}"}

    def _read(self, site: str, path: str) -> list[str]:
        """Return the lines of a response."""
        url = f"http://{self.sites[site].ready['http'][0]}{path}"
        with self._opener.open(urllib.request.Request(url, headers=self._headers)) as response:
            return list(response.read().decode().splitlines())

    def payloads(self, site: str, topic_filter: str = "%23") -> list[str]:
        """Return the payloads of all messages, as a site replays them."""
        lines = self._read(site, f"/api/v5/messages?filter={topic_filter}")
        return [json.loads(line)["payload"] for line in lines]

    def metric(self, site: str, name: str) -> dict[str, float]:
        """Return the samples of a metric by their labels."""
        lines = [line for line in self._read(site, "/metrics") if line.startswith(name)]
        return {line.rpartition(" ")[0].removeprefix(name): float(line.rpartition(" ")[2]) for line in lines}

    def owned(self, site: str) -> set[int]:
        """Return the shards that a site owns."""
        found = self.metric(site, "topicstore_shard_owned")
        return {int(labels.split('"')[1]) for labels, owned in found.items() if owned}

    def owners(self, *names: str) -> dict[int, str]:
        """Wait until each shard has one owner among some sites, each of which owns some; return the owners."""
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
    """Return a client id whose shard is one of some."""
    of = ShardMap(SHARDS).of
    return next(name for number in range(10_000) if of(name := f"{prefix}{number}") in shards)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two sites, each of which owns shards, and which don't suspect each other."""
    need("rocksdb")
    with ExitStack() as closing:
        cluster = Cluster(tmp_path_factory.mktemp("pair"))
        closing.callback(cluster.close)
        cluster.start("a", "b")
        cluster.owners("a", "b")
        yield cluster


def test_what_is_published_at_any_site_is_stored_by_the_owners_and_read_everywhere(pair: Cluster) -> None:
    """A body with messages of both sites' shards is stored once, whichever site receives it.

    The sites need a token, and accept that of the cluster from each other.
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
    """A request that another site has forwarded to a site without the shard is 503, and nothing is stored."""
    message = {"topic": "one/hop", "payload": "1", "client_id": client_of(pair.owned("b"))}
    answer = pair.ask("a", "POST", "/api/v5/messages", message, Topicstore_Forwarded="b")
    assert (503, "1", "ShardElsewhereError") == (answer.status, answer.headers["Retry-After"], answer.json["title"])
    assert [] == pair.payloads("a", "one/hop")


def test_metrics_show_requests_takeovers_and_lag(pair: Cluster) -> None:
    """Each site exports its requests to the log store by kind, its take-overs, and how far its replicas are behind."""
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


def test_a_site_that_does_not_forward_redirects_to_the_owner(cluster: Cluster) -> None:
    """With ``forward = false`` a publish for another site's shard is 307; messages of several sites are 421."""
    cluster.settings["CLUSTER__FORWARD"] = "false"
    cluster.start("a", "b")
    cluster.owners("a", "b")
    mine, other = ({"topic": "t", "payload": "1", "client_id": client_of(cluster.owned(site))} for site in "ab")
    answer = cluster.ask("a", "POST", "/api/v5/messages?store=true", other)
    expected = f"http://{cluster.sites['b'].ready['http'][0]}/api/v5/messages?store=true"
    assert (307, expected) == (answer.status, answer.headers["Location"])
    assert 421 == cluster.ask("a", "POST", "/api/v5/messages", [mine, other]).status
    assert [] == cluster.payloads("b")
    cluster.sites["b"].kill()
    answer = cluster.ask("a", "POST", "/api/v5/messages", mine)
    assert 200 == answer.status


def test_a_publish_for_an_owner_that_is_gone_may_be_repeated(cluster: Cluster) -> None:
    """While the owner of a shard is dead and not replaced, a publish is 503 with ``Retry-After``."""
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
