"""Five servers with three replicas of each shard: any client may use any server, whichever replicas that has."""

from __future__ import annotations

import hashlib
import hmac
import itertools
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import cycle
from subprocess import run
from typing import Any
from urllib.request import Request, urlopen

import pytest
from topicstore.replication.documents import Documents
from topicstore.replication.log_stores import open_log_store
from topicstore.storage.shard_map import ShardMap
from topicstore_conformance.conditions.skipping import need
from topicstore_conformance.faults.threads import wait_until
from topicstore_conformance.mqtt.paho_client import PahoClient

from .test_cluster import SHARDS, Cluster, client_of

pytestmark = pytest.mark.slow

NAMES = "abcde"
FIRST = range(60)
"""The messages that are stored before the tests."""


def shards(cluster: Cluster) -> list[dict[str, Any]]:
    """Return each shard with its replicas and transitions."""
    found: list[dict[str, Any]] = cluster.ask("a", "GET", "/api/v5/ds/storages/messages").json["shards"]
    return found


def keeps(cluster: Cluster, site: str) -> set[int]:
    """Return the shards of which a site has a replica."""
    return {int(one["id"]) for one in shards(cluster) if site in [replica["site"] for replica in one["replicas"]]}


def shares(cluster: Cluster, site: str) -> set[str]:
    """Return the members with a share in a shared subscription, as a site lists them."""
    found = cluster.ask(site, "GET", "/api/v5/groups").json["items"]
    return {one["client_id"] for group in found for one in group["members"] if sum(one["slices"])}


def publish(cluster: Cluster, topic: str, numbers: range) -> None:
    """Publish messages of all shards, each through another server."""
    for number, site in zip(numbers, cycle(NAMES), strict=False):
        message = {
            "topic": f"{topic}/{number % 5}",
            "payload": str(number),
            "client_id": client_of({number % SHARDS}),
            "qos": 1,
        }
        answer = cluster.ask(site, "POST", "/api/v5/messages", message)
        assert 200 == answer.status, answer.json


@pytest.fixture(scope="module")
def five(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Five servers after all replicas have been placed, so that some servers lack shards."""
    need("rocksdb")
    with ExitStack() as closing:
        cluster = Cluster(tmp_path_factory.mktemp("five"), HTTP__SQL="true")
        closing.callback(cluster.close)
        cluster.start(*NAMES)

        def settled() -> bool:
            found = shards(cluster)
            return all(
                not one["transitions"] and (one["id"] == "0" or len(one["replicas"]) == 3) for one in found
            ) and SHARDS == sum(len(cluster.owned(site)) for site in NAMES)

        wait_until(settled, "three copies of each shard")
        publish(cluster, "five", FIRST)
        yield cluster


def test_some_servers_keep_not_all_shards(five: Cluster) -> None:
    """At least one server lacks shards, as the other tests of this module require."""
    assert any(len(keeps(five, site)) < SHARDS for site in NAMES)


def test_any_server_replays_all_messages(five: Cluster) -> None:
    """A replay, a look-up of the newest message, and pages read from different servers have every message once."""
    expected = sorted(str(number) for number in FIRST)
    for site in NAMES:
        assert expected == sorted(five.payloads(site, "five/%23"))
        (newest,) = five.read(site, "/api/v5/messages?filter=five/%23&reverse=true&limit=1").lines
        assert str(FIRST[-1]) == json.loads(newest)["payload"]
    found: list[str] = []
    query: str | None = "filter=five/%23&limit=7"
    for site in cycle(NAMES):
        answer = five.read(site, f"/api/v5/messages?{query}")
        found += [json.loads(line)["payload"] for line in answer.lines]
        if (following := answer.headers["Topicstore-Next"]) is None:
            break
        query = f"after={following}&limit=7"
    assert expected == sorted(found)


def test_any_server_lists_topics_and_last_messages(five: Cluster) -> None:
    """Topics, clients and the last message of each topic cover the shards of all servers."""
    for site in NAMES:
        topics = five.ask(site, "GET", "/api/v5/topics?filter=five/%23").json["items"]
        assert {f"five/{number}": len(FIRST) // 5 for number in range(5)} == {
            one["topic"]: one["messages"] for one in topics
        }
        assert SHARDS == len(five.ask(site, "GET", "/api/v5/clients?filter=five/%23").json["items"])
        last = five.ask(site, "GET", "/api/v5/latest?filter=five/%23").json["items"]
        assert sorted(str(number) for number in FIRST[-5:]) == sorted(one["payload"] for one in last)


def test_any_server_serves_replays_over_mqtt(five: Cluster) -> None:
    """``$replay`` has all messages, whichever server a client connects to, and whichever owns its session's shard."""
    for site, shard in itertools.product(NAMES, range(SHARDS)):
        with PahoClient(five.sites[site].port, client_of({shard}, f"r{site}")) as client:
            client.subscribe("$replay/beginning/five/#", 1)
            assert sorted(str(number) for number in FIRST) == sorted(client.payloads(len(FIRST)))


def test_durable_sessions_receive_the_messages_of_all_shards(five: Cluster) -> None:
    """A session with a wildcard receives messages published at any server, both live and after a reconnection."""
    names = {client_of({shard}, "durable-"): site for shard, site in zip(range(SHARDS), NAMES, strict=False)}
    with ExitStack() as closing:
        for name, site in names.items():
            client = closing.enter_context(PahoClient(five.sites[site].port, name, expiry=3_600))
            client.subscribe(f"{name}/#", 1)
            publish(five, name, range(20))
            assert {str(number) for number in range(20)} == set(client.payloads(20))
            client.close()
            publish(five, name, range(20, 40))
            again = closing.enter_context(PahoClient(five.sites["e"].port, name, expiry=3_600, clean=False))
            assert again.present
            assert {str(number) for number in range(20, 40)} == set(again.payloads(20))
            publish(five, name, range(40, 60))
            assert {str(number) for number in range(20, 60)} == set(again.payloads(40))
            again.close()


def test_any_server_answers_every_route_and_command(five: Cluster) -> None:
    """Reading routes, SQL, and commands run on a server's directory cover all shards, even if it lacks some."""
    site, count = min(NAMES, key=lambda one: len(keeps(five, one))), len(FIRST)
    paths = five.ask(site, "GET", "/schema/openapi.json").json["paths"]
    asked = 0
    for path, ways in paths.items():
        if "get" not in ways or "{" in path or path.endswith(("/tail", "/users", "/shards/moves")):
            continue
        names = {one["name"] for one in ways["get"].get("parameters", ())}
        url = f"{five.url(site)}{path}" + "?filter=five/%23" * ("filter" in names)
        with urlopen(Request(url, headers={"Authorization": f"Bearer {five.token}"})) as answer:
            asked += answer.status == 200
    assert asked > 20
    explained = five.ask(site, "GET", "/api/v5/messages/explain?filter=five/%23").json
    assert (count, SHARDS) == (explained["messages"], len(explained["slabs"]))
    assert count == five.ask(site, "GET", "/api/v5/messages/histogram?filter=five/%23").json["messages"]
    info = five.ask(site, "GET", "/api/v5/info").json
    assert ({}, [*range(SHARDS)]) == (info["missing"], [one["number"] for one in info["shards"]])
    assert info["messages"] >= count
    (generation,) = five.ask(site, "GET", "/api/v5/generations").json["items"]
    assert ({}, info["messages"]) == (generation["missing"], generation["messages"])
    (departure,) = five.ask(site, "GET", "/api/v5/retention").json["outlook"]
    assert info["messages"] == departure["messages"]
    limits = {"filters": {"five/#": "1ms"}}
    coming = five.ask(site, "POST", "/api/v5/retention/outlook", limits).json
    assert [count] == [one["messages"] for one in coming if one["generation"] is None]
    names = sorted(client_of({shard}, "session-") for shard in range(SHARDS))
    for name in names:
        with PahoClient(five.sites[site].port, name, clean=False, expiry=3_600) as client:
            client.subscribe("sessions/#", 1)
    listed = five.ask(site, "GET", "/api/v5/sessions?prefix=session-").json
    assert ({}, names) == (listed["missing"], [one["client_id"] for one in listed["items"]])
    streams = five.ask(site, "GET", "/api/v5/streams?filter=five/%23").json["items"]
    assert {*range(SHARDS)} == {one["shard"] for one in streams}
    statement = "SELECT topic FROM messages WHERE topic LIKE 'five/%'"
    table = five.ask(site, "POST", "/api/v5/sql", {"statement": statement})
    assert (200, count) == (table.status, len(table.json["rows"]))
    for command, *arguments, rows in (
        ("latest", "five/#", 5),
        ("sessions", "--no-lag", 0),
        ("info", 0),
        ("generations", 0),
        ("retention", 0),
        ("replay", "five/#", count),
        ("sql", statement, "--csv", count),
        ("topics", "five/#", 5),
    ):
        words = [str(command), str(five.root / site), *map(str, arguments)]
        done = run([sys.executable, "-m", "topicstore.cli", *words], capture_output=True, text=True, check=False)
        assert (0, "", rows) == (done.returncode, done.stderr, done.stdout.count("five/")), done.stdout


def test_a_repeated_import_stores_nothing_twice(five: Cluster) -> None:
    """An import that is repeated through another server continues from its progress, whichever replicas that has."""
    clients = [client_of({shard}, "import") for shard in range(SHARDS)]
    rows = [
        {"topic": "imported", "payload": f"{client} {n}", "client_id": client} for n in range(9) for client in clients
    ]
    (file := five.root / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for site in sorted(NAMES, key=lambda one: len(keeps(five, one))):
        words = ["import", str(five.root / site), str(file)]
        done = run([sys.executable, "-m", "topicstore.cli", *words], capture_output=True, text=True, check=False)
        assert 0 == done.returncode, done.stderr
        assert sorted(row["payload"] for row in rows) == sorted(five.payloads(site, "imported"))


def test_a_shared_subscription_has_members_at_all_servers(five: Cluster) -> None:
    """Members at all servers, which have different shards, get each message once."""
    with ExitStack() as closing:
        members = []
        for shard, site in zip(range(SHARDS), NAMES, strict=False):
            client = closing.enter_context(PahoClient(five.sites[site].port, client_of({shard}, "member-")))
            client.subscribe("$share/g/shared/#", 1)
            members.append(client)

        def divided() -> bool:
            found = [five.ask(site, "GET", "/api/v5/groups").json["items"] for site in NAMES]
            return all(
                len(group["members"]) == SHARDS and all(sum(one["slices"]) for one in group["members"])
                for groups in found
                for group in groups
            ) and all(found)

        wait_until(divided, "a share of each member")
        for site in NAMES:
            (group,) = five.ask(site, "GET", "/api/v5/groups").json["items"]
            assert 0 == group["lag"]["messages"]
        publish(five, "shared", range(100))
        wait_until(lambda: sum(len(one.messages) for one in members) >= 100, "all messages")
        got = [text for one in members for text in one.payloads(len(one.messages))]
        assert sorted(map(str, range(100))) == sorted(got)


def test_new_messages_are_reported_to_servers_that_do_not_own_their_shard(five: Cluster) -> None:
    """Sessions get messages of other servers' shards at once, though their own server polls only once an hour.

    That server has a replica of one of the shards, and none of the other. It also assigns a shared subscription, and so
    learns of a member whose session is in the second shard.
    """
    lacking = next(site for site in NAMES if 0 < len(five.owned(site)) < len(keeps(five, site)) < SHARDS)
    owned, kept = five.owned(lacking), keeps(five, lacking)
    others = [min(set(range(SHARDS)) - kept), min(kept - owned)]
    env = five.sites[lacking]._options["env"]
    five.sites[lacking].kill()
    env["TOPICSTORE__CLUSTER__POLL_INTERVAL"] = "1h"
    five.start(lacking)
    try:
        wait_until(lambda: owned == five.owned(lacking), "the server is back")
        with PahoClient(five.sites[lacking].port, client_of(owned, "hourly-")) as client:
            client.subscribe("hourly/#", 1)
            for number in range(6):
                message = {
                    "topic": f"hourly/{number}",
                    "payload": str(number),
                    "client_id": client_of({others[number % 2]}),
                    "qos": 1,
                }
                assert 200 == five.ask("a", "POST", "/api/v5/messages", message).status
                assert [str(one) for one in range(number + 1)] == client.payloads(number + 1)
        names = (f"$share/g{number}/hourly-shared/#" for number in range(1_000))
        group = next(name for name in names if ShardMap(SHARDS).of(name) in owned)
        with ExitStack() as closing:
            clients = [client_of({shard}, "hourly-member-") for shard in (min(owned), others[0])]
            members = [closing.enter_context(PahoClient(five.sites[lacking].port, name)) for name in clients]
            for number, member in enumerate(members):  # the server reads all records when the group begins
                member.subscribe(group, 1)
                expected = {*clients[: number + 1]}
                wait_until(lambda some=expected: shares(five, lacking) == some, "a share of each member")
            publish(five, "hourly-shared", range(40))
            wait_until(lambda: sum(len(member.messages) for member in members) >= 40, "all messages")
            got = [text for member in members for text in member.payloads(len(member.messages))]
            assert sorted(map(str, range(40))) == sorted(got)
    finally:
        five.sites[lacking].kill()
        env["TOPICSTORE__CLUSTER__POLL_INTERVAL"] = five.settings["CLUSTER__POLL_INTERVAL"]
        five.start(lacking)
        wait_until(lambda: owned == five.owned(lacking), "the server is back")


def test_only_sites_ask_each_other(five: Cluster) -> None:
    """Only sites may use the route between sites: a client gets 403 with any token, and a malformed request 400.

    A site without a replica of the shard answers 421.
    """
    assert 403 == five.ask("a", "POST", "/api/v5/shards/0/ask", {}).status
    _, document = Documents(open_log_store((five.root / "log").as_uri()), lambda _: None).newest()
    assert document is not None
    key = hmac.digest(document.token, b"http", hashlib.sha256).hex()
    of_site = {"Authorization": f"Bearer {key}", "Topicstore_Forwarded": "b", "Topicstore_Granted": "read"}
    answer = five.ask("a", "POST", "/api/v5/shards/0/ask", {}, **of_site)
    assert (400, True) == (answer.status, "not of a known form" in answer.json["detail"])
    lacking = next(site for site in NAMES if len(keeps(five, site)) < SHARDS)
    shard = min(set(range(SHARDS)) - keeps(five, lacking))
    answer = five.ask(lacking, "POST", f"/api/v5/shards/{shard}/ask", {}, **of_site)
    assert (421, True) == (answer.status, "is not kept on this site" in answer.json["detail"])


def test_a_server_asks_another_one_while_an_owner_is_dead(five: Cluster) -> None:
    """While a shard's owner is dead and not replaced, the shard is read at another server with a replica.

    Its sessions are reported as missing, because only the owner knows their connections.
    """
    lacking = next(site for site in NAMES if len(keeps(five, site)) < SHARDS)
    shard = min(set(range(SHARDS)) - keeps(five, lacking))
    owner = next(site for site in NAMES if shard in five.owned(site))
    expected = sorted(str(number) for number in FIRST)
    reader = client_of(five.owned(lacking) or {shard}, "after-")
    with PahoClient(five.sites[lacking].port, reader) as client:
        gone = five.owned(owner)
        five.sites[owner].kill()
        assert expected == sorted(five.payloads(lacking, "five/%23"))
        assert {} == five.ask(lacking, "GET", "/api/v5/info").json["missing"]
        page = five.ask(lacking, "GET", "/api/v5/sessions").json
        assert gone == {int(number) for number in page["missing"]}
        assert all(f"site {owner}" in why for why in page["missing"].values())
        assert reader in [one["client_id"] for one in page["items"]] or not five.owned(lacking)
        answer = five.ask(lacking, "GET", "/api/v5/lag")
        assert (503, True) == (answer.status, f"site {owner}" in answer.json["detail"])
        listing = run(
            [sys.executable, "-m", "topicstore.cli", "sessions", str(five.root / lacking)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert (True, True) == (listing.returncode != 0, f"site {owner}" in listing.stderr), listing
        if five.owned(lacking):
            client.subscribe("$replay/beginning/five/#", 1)
            assert expected == sorted(client.payloads(len(FIRST)))
    five.start(owner)
    wait_until(lambda: shard in five.owned(owner), "the owner is back")
