"""Forbidden actions are refused, dropped or not delivered, as the protocol version allows; other clients are served."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any

import argon2
import msgspec
import pytest
import topicstore as ts
from topicstore.server.access.access import Access, AccessHooks
from topicstore.server.access.passwords import PasswordFile
from topicstore.server.config.model import AuthenticationSettings, AuthorizationSettings, Limits, Rule, ServerSettings
from topicstore.server.mqtt import rights
from topicstore.sessions import Sessions
from topicstore_conformance.faults.threads import PATIENCE, wait_until
from topicstore_conformance.mqtt import wire
from topicstore_conformance.mqtt.embedded import Embedded
from topicstore_conformance.mqtt.paho_client import PahoClient

both = pytest.mark.parametrize("version", [4, 5])


def listed(*rules: Rule) -> ServerSettings:
    return ServerSettings(authorization=AuthorizationSettings(rules=rules, unlisted="allow"))


SECRETS = listed(
    Rule(permission="deny", topics=("secret/#",)),
    Rule(permission="allow", topics=("mine/%c/#",)),
    Rule(permission="deny", topics=("mine/#",)),
)


@both
def test_what_may_not_be_published_goes_nowhere(db: ts.Database, version: int) -> None:
    """A forbidden PUBLISH is not routed; MQTT 3.1.1 acknowledges it anyway [MQTT-3.3.5-2]."""
    refused = 0 if version == 4 else 0x87
    with (
        Embedded(db, SECRETS) as embedded,
        PahoClient(embedded.port, "me", version=version) as client,
        db.subscribe("#") as everything,
    ):
        assert client.publish("secret/a", b"no") == refused
        assert client.publish("mine/you", b"no") == refused
        assert client.publish("mine/me", b"yes") == 0
        client.publish("secret/a", b"no", 0)
        assert client.publish("mine/me", b"last") == 0
        payloads: list[bytes] = []
        while b"last" not in payloads:
            payloads += [message.payload for message in everything.fetch(timeout=PATIENCE).messages]
        assert payloads == [b"yes", b"last"]


def test_an_exchange_of_qos_2_ends_with_the_refusal(db: ts.Database) -> None:
    """A refused QoS 2 exchange ends with its PUBREC: the packet id is free and doesn't count as in flight."""
    settings = msgspec.structs.replace(SECRETS, limits=Limits(in_flight=2))
    with Embedded(db, settings) as embedded, embedded.client("me") as client:
        for _ in range(5):
            answer = client.publish("secret/a", b"no", 2)
            assert (answer.kind, answer.reason) == ("PUBREC", 0x87)


@both
def test_a_refused_subscription_may_be_left_unexplained(db: ts.Database, version: int) -> None:
    """If settings say so, refused subscriptions get 0x80 in both versions [MQTT-3.9.3-2].

    A subscription with an invalid filter still gets its own reason code.
    """
    settings = msgspec.structs.replace(
        SECRETS, authorization=msgspec.structs.replace(SECRETS.authorization, refused_subscription="unspecified")
    )
    with Embedded(db, settings) as embedded, embedded.client("me", version=version) as client:
        bad = 0x8F if version == 5 else 0x80
        assert client.subscribe("secret/a", "open/a", "$share/g/secret/a", "a#", options=1) == (0x80, 1, 0x80, bad)


@both
def test_what_may_not_be_read_is_refused_filter_by_filter(db: ts.Database, version: int) -> None:
    """Forbidden filters are refused one by one; a wildcard is granted and delivers no forbidden message."""
    refused = 0x80 if version == 4 else 0x87
    with Embedded(db, SECRETS) as embedded, PahoClient(embedded.port, "me", version=version) as client:
        assert client.subscribe("secret/a") == refused
        assert client.subscribe("$share/g/secret/a") == refused
        assert client.subscribe("$replay/-1h/secret/a") == refused
        assert client.subscribe("mine/me/+") == 1
        assert client.subscribe("$share/g/mine/me/+") == 1
        assert client.subscribe("#") == 1
        db.publish([ts.Message(topic, topic.encode(), "program", 1) for topic in ("secret/a", "mine/you", "mine/me")])
        assert client.payloads(1) == ["mine/me"]


@both
def test_a_will_that_may_not_be_published_lets_nobody_in(db: ts.Database, version: int) -> None:
    with Embedded(db, SECRETS) as embedded, embedded.client(version=version) as client:
        answer = client.connect("me", will=wire.Will(topic="secret/a", payload=b"x"))
        assert answer.reason == (5 if version == 4 else 0x87)
        assert client.ended() is None


def test_a_stored_session_gives_up_what_may_no_longer_be_read(db: ts.Database) -> None:
    """A resumed session loses subscriptions that are now forbidden, before any message is sent."""
    with Embedded(db) as embedded, PahoClient(embedded.port, "me", clean=False, expiry=3600) as client:
        for text in ("secret/a", "$share/g/secret/b", "open"):
            assert client.subscribe(text) == 1
    db.publish([ts.Message(topic, topic.encode(), "program", 1) for topic in ("secret/a", "secret/b", "open")])
    with Embedded(db, SECRETS) as embedded, PahoClient(embedded.port, "me", clean=False, expiry=3600) as client:
        assert client.present
        assert client.payloads(1) == ["open"]
        assert [text for text, _ in db.sessions["me"].subscriptions] == ["open"]


def test_a_session_that_can_not_be_read_is_not_opened(db: ts.Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session whose record can't be read isn't opened, because it might keep forbidden filters."""
    with Embedded(db) as embedded, PahoClient(embedded.port, "me", clean=False, expiry=3600) as client:
        assert client.subscribe("secret/a") == 1
    read = Sessions.__getitem__
    for error in (ts.CorruptionError("damaged"), RuntimeError("a fault")):

        def fails(*_: Any, error: Exception = error) -> Any:
            raise error

        with Embedded(db, SECRETS) as embedded:
            monkeypatch.setattr(Sessions, "__getitem__", fails)
            with embedded.client() as client:
                assert client.connect("me", clean=False).reason == 0x88
            monkeypatch.setattr(Sessions, "__getitem__", read)
            with embedded.client() as client:
                connack = client.connect("me", clean=False, session_expiry_interval=3600)
                assert (connack.reason, connack.present) == (0, True)
            assert db.sessions["me"].subscriptions == ()


class Names:
    """A plugin that accepts every client under the user name in its CONNECT."""

    @ts.hookimpl
    def topicstore_authenticate(self, request: Any) -> list[str]:
        return [client.user_name for client in request.clients]


@pytest.mark.parametrize("qos", [1, 2])
@both
def test_messages_in_flight_go_to_no_other_user(db: ts.Database, version: int, qos: int) -> None:
    """A client with another user's client id gets none of that user's messages in flight or waiting."""
    rules = (
        Rule(permission="allow", users=("owner",), topics=("#",)),
        Rule(permission="allow", users=("other",), topics=("public/#",)),
    )
    who = AccessHooks([("names", Names())], "topicstore_authenticate")
    access = Access(AuthenticationSettings(), AuthorizationSettings(rules=rules), authenticate=who)
    topics = ["secret/a", "public/a", "secret/b", "public/b"]
    messages = [ts.Message(topic, topic.encode(), "program", qos) for topic in topics]
    with Embedded(db, access=access) as embedded:
        with embedded.client("dev", version=version, keep=True, user_name="owner", password=b"x") as owner:
            assert owner.subscribe("secret/#", "public/#", options=qos) == (qos, qos)
            db.publish(messages[:2])
            assert len(owner.publishes(2)) == 2
        wait_until(lambda: db.sessions.connected("dev") is None, "the session to end")
        db.publish(messages[2:])
        with embedded.client("dev", version=version, keep=True, user_name="other", password=b"x") as other:
            assert [packet.topic for packet in other.publishes(2)] == ["public/a", "public/b"]
            other.ping()
            assert [text for text, _ in db.sessions["dev"].subscriptions] == ["public/#"]
    access.close()


@both
def test_messages_in_flight_are_not_resent_once_their_rule_is_gone(db: ts.Database, version: int) -> None:
    """Messages in flight are not redelivered once no rule allows them."""
    both_allowed = listed(Rule(permission="allow", topics=("a/#", "b/#")))
    one_allowed = listed(Rule(permission="allow", topics=("b/#",)))
    before, after = (
        msgspec.structs.replace(one, authorization=msgspec.structs.replace(one.authorization, unlisted="deny"))
        for one in (both_allowed, one_allowed)
    )
    with Embedded(db, before) as embedded, embedded.client("me", version=version, keep=True) as client:
        assert client.subscribe("a/#", "b/#", options=1) == (1, 1)
        db.publish([ts.Message(topic, topic.encode(), "program", 1) for topic in ("a/x", "b/x")])
        client.publishes(2)
    with Embedded(db, after) as embedded, embedded.client("me", version=version, keep=True) as client:
        assert [packet.topic for packet in client.publishes(1)] == ["b/x"]
        client.ping()


def test_rules_that_are_read_again_hold_for_messages_of_clients_that_are_connected(db: ts.Database) -> None:
    """Reloaded rules apply to connected clients: to messages waiting for them and to messages they publish.

    Clients whose permissions don't change get all messages.
    """
    everything = AuthorizationSettings(rules=(Rule(permission="allow", topics=("#",)),))
    less = AuthorizationSettings(
        rules=(Rule(permission="deny", clients=("me",), topics=("secret/#",)), Rule(permission="allow", topics=("#",)))
    )
    with (
        Embedded(db, ServerSettings(authorization=everything)) as embedded,
        embedded.client("me", receive_maximum=1) as me,
        embedded.client("other") as other,
    ):
        for client in (me, other):
            assert client.subscribe("+/a", options=1) == (1,)
        topics = ["open/a", "secret/a", "more/a"]
        db.publish([ts.Message(topic, topic.encode(), "program", 1) for topic in topics])
        [first] = me.publishes(1)
        settings = msgspec.structs.replace(embedded.server.settings, authorization=less)
        embedded.do(embedded.server.reload(settings))
        assert me.publish("secret/b", b"x").reason == 0x87
        me.acknowledge(first)
        assert [packet.topic for packet in me.publishes(1)] == ["more/a"]
        assert [packet.topic for packet in other.publishes(3)] == topics
        settings = msgspec.structs.replace(settings, authorization=everything)
        embedded.do(embedded.server.reload(settings))
        assert me.publish("secret/b", b"x").reason == 0x10


def test_figures_of_the_server_are_sent_to_who_may_read_them(db: ts.Database) -> None:
    """A client with a wildcard subscription receives only the server topics that it may read."""
    rules = (
        Rule(permission="deny", topics=("$SYS/broker/clients/#",)),
        Rule(permission="allow", topics=("$SYS/#", "#")),
    )
    settings = ServerSettings(authorization=AuthorizationSettings(rules=rules))
    with Embedded(db, settings) as embedded, embedded.client("me") as client:
        assert client.subscribe("$SYS/broker/#") == (0,)
        client.send(wire.PINGREQ)
        topics = []
        while (packet := client.receive()) is not None and packet.kind == "PUBLISH":
            topics.append(packet.topic)
        assert "$SYS/broker/version" in topics
        assert not [topic for topic in topics if topic.startswith("$SYS/broker/clients/")]


def test_a_group_loses_nothing_by_what_one_member_may_not_have(db: ts.Database) -> None:
    rules = (
        Rule(permission="deny", clients=("some",), topics=("a/secret/#",)),
        Rule(permission="allow", topics=("#",)),
    )
    settings = ServerSettings(authorization=AuthorizationSettings(rules=rules))
    with Embedded(db, settings) as embedded, embedded.client("some") as some, embedded.client("all") as every:
        for client in (some, every):
            assert client.subscribe("$share/g/a/#", options=1) == (1,)
        topics = [f"a/secret/{number}" for number in range(20)]
        db.publish([ts.Message(topic, b"", "program", 1) for topic in topics])
        assert sorted(packet.topic for packet in every.publishes(20)) == sorted(topics)
        some.ping()


# --- plugins ---


class Plugin:
    """A plugin that allows topics without the prefix "no", and blocks until the test allows answers."""

    def __init__(self) -> None:
        self.may_answer = threading.Event()
        self.asked: list[str] = []
        self.fails = False
        self.refused: set[str] = set()

    @ts.hookimpl
    def topicstore_authorize(self, request: Any) -> list[bool | None]:
        self.asked += [question.topic for question in request.questions]
        assert self.may_answer.wait(PATIENCE)
        if self.fails:
            raise RuntimeError("it is out of order")
        topics = [question.topic for question in request.questions]
        return [not topic.startswith("no") and topic not in self.refused for topic in topics]


@pytest.fixture
def plugin() -> Plugin:
    return Plugin()


@pytest.fixture
def asking(db: ts.Database, plugin: Plugin) -> Iterator[Embedded]:
    hooks = AccessHooks([("one", plugin)], "topicstore_authorize")
    access = Access(AuthenticationSettings(), AuthorizationSettings(), authorize=hooks)
    with Embedded(db, access=access) as embedded:
        yield embedded
    access.close()


@both
def test_a_client_waits_for_the_plugin_and_nobody_else_does(asking: Embedded, plugin: Plugin, version: int) -> None:
    """A client's packets wait for the plugin's answer and keep their order; other clients don't have to wait."""
    with asking.client("me", version=version) as client, asking.client("other", version=version) as other:
        client.send(
            wire.publish("yes/1", b"1", qos=1, packet_id=1, version=version),
            wire.publish("no/1", b"2", qos=1, packet_id=2, version=version),
            wire.publish("yes/1", b"3", qos=1, packet_id=3, version=version),
            wire.subscribe(4, [("no/2", 1), ("yes/2", 1)], version=version),
            wire.PINGREQ,
        )
        wait_until(lambda: plugin.asked, "the plugin to be asked")
        other.ping()
        plugin.may_answer.set()
        acks = [client.expect("PUBACK") for _ in range(3)]
        assert [ack.packet_id for ack in acks] == [1, 2, 3]
        assert [ack.reason for ack in acks] == ([0, 0, 0] if version == 4 else [0x10, 0x87, 0x10])
        assert client.expect("SUBACK").reasons == ((0x80, 1) if version == 4 else (0x87, 1))
        client.expect("PINGRESP")
        assert plugin.asked == ["yes/1", "no/1", "no/2", "yes/2"]


def test_a_client_that_goes_while_the_plugin_thinks_is_forgotten(asking: Embedded, plugin: Plugin) -> None:
    with asking.client("me", session_expiry_interval=3600) as client:
        client.send(wire.publish("yes", b"late", qos=1, packet_id=1), wire.subscribe(2, [("yes", 1)]))
        wait_until(lambda: plugin.asked, "the plugin to be asked")
    plugin.may_answer.set()
    wait_until(lambda: asking.db.sessions.connected("me") is None, "the session to end")
    assert [text for text, _ in asking.db.sessions["me"].subscriptions] == ["yes"]


def test_a_plugin_that_fails_allows_nothing_and_is_asked_again(
    asking: Embedded, plugin: Plugin, caplog: pytest.LogCaptureFixture
) -> None:
    """If the plugin raises, everything is refused and logged, and the next request asks again."""
    plugin.may_answer.set()
    plugin.fails = True
    with PahoClient(asking.port, "me") as client:
        assert client.publish("yes", b"1") == 0x87
        assert client.subscribe("yes") == 0x87
        assert caplog.text.count("RuntimeError: it is out of order") == 2
        plugin.fails = False
        assert client.subscribe("yes") == 1
        assert client.publish("yes", b"2") == 0
        assert client.payloads(1) == ["2"]


@both
def test_a_stored_session_stays_whole_while_the_plugin_fails(asking: Embedded, plugin: Plugin, version: int) -> None:
    """While the plugin fails, a client is refused and its stored session stays whole."""
    plugin.may_answer.set()
    with PahoClient(asking.port, "me", version=version, clean=False, expiry=3600) as client:
        assert client.subscribe("yes") == 1
    plugin.fails = True
    with asking.client(version=version) as client:
        refused = client.connect("me", clean=False)
        assert refused.reason == (3 if version == 4 else 0x88)
        assert client.ended() is None
    with asking.client(version=version) as client:
        refused = client.connect("other", will=wire.Will(topic="yes", payload=b"gone"))
        assert refused.reason == (3 if version == 4 else 0x88)
    plugin.fails = False
    asking.db.publish([ts.Message("yes", b"1", "program", 1)])
    with PahoClient(asking.port, "me", version=version, clean=False, expiry=3600) as client:
        assert client.present
        assert client.payloads(1) == ["1"]


@both
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_a_plugin_is_asked_before_messages_are_sent(asking: Embedded, plugin: Plugin, version: int, qos: int) -> None:
    """The plugin is asked before messages are delivered; allowed messages arrive in order, refused messages don't.

    Other clients don't have to wait for the plugin.
    """
    plugin.may_answer.set()
    with asking.client("me", version=version) as client, asking.client("other", version=version) as other:
        assert client.subscribe("+/a", options=qos) == (qos,)
        plugin.may_answer.clear()
        plugin.asked.clear()
        topics = ["yes1/a", "no1/a", "yes2/a", "yes1/a", "no2/a", "yes3/a"]
        asking.db.publish([ts.Message(topic, topic.encode(), "program", qos) for topic in topics])
        wait_until(lambda: plugin.asked, "the plugin to be asked")
        other.ping()
        client.ping()
        plugin.may_answer.set()
        assert [packet.topic for packet in client.publishes(4)] == ["yes1/a", "yes2/a", "yes1/a", "yes3/a"]
        client.ping()
        assert sorted(set(plugin.asked)) == sorted(plugin.asked)


def test_messages_wait_for_a_plugin_that_fails(
    asking: Embedded, plugin: Plugin, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the plugin fails, messages wait and none is lost; the log mentions this once for each client."""
    monkeypatch.setattr(rights, "_LONGEST", 0.01)
    plugin.may_answer.set()
    with asking.client("me") as client:
        assert client.subscribe("+/a", options=1) == (1,)
        plugin.asked.clear()
        plugin.fails = True
        asking.db.publish([ts.Message(topic, topic.encode(), "program", 1) for topic in ("yes1/a", "no1/a", "yes2/a")])
        wait_until(lambda: len(plugin.asked) >= 9, "the plugin to be asked three times")
        client.ping()
        plugin.fails = False
        assert [packet.topic for packet in client.publishes(2)] == ["yes1/a", "yes2/a"]
        client.ping()
    assert caplog.text.count("messages wait because a plugin failed") == 1


def test_a_plugin_is_asked_about_more_topics_than_decisions_are_kept(asking: Embedded, plugin: Plugin) -> None:
    """If there are more topics than cached decisions, the plugin is asked in portions.

    Allowed messages arrive in order, even with topics too long to be cached.
    """
    plugin.may_answer.set()
    topics = [f"{'no' if number % 3 == 0 else 'yes'}/{number}/{'x' * (number % 2 * 9_000)}" for number in range(1_500)]
    with asking.client("me") as client:
        assert client.subscribe("#", options=1) == (1,)
        asking.db.publish([ts.Message(topic, b"", "program", 1) for topic in topics])
        wanted = [topic for topic in topics if topic.startswith("yes")]
        assert [packet.topic for packet in client.publishes(len(wanted))] == wanted


def test_messages_in_flight_are_asked_about_again(asking: Embedded, plugin: Plugin) -> None:
    """On each connection, the plugin is asked again about messages in flight; refused messages aren't redelivered."""
    plugin.may_answer.set()
    with asking.client("me", keep=True) as client:
        assert client.subscribe("yes/#", options=1) == (1,)
        asking.db.publish([ts.Message(topic, b"", "program", 1) for topic in ("yes/1", "yes/2", "yes/3")])
        client.publishes(3)
    wait_until(lambda: asking.db.sessions.connected("me") is None, "the session to end")
    plugin.refused.add("yes/2")
    with asking.client("me", keep=True) as client:
        assert [packet.topic for packet in client.publishes(2)] == ["yes/1", "yes/3"]
        client.ping()


def held_by(root: object) -> Iterator[object]:
    """Yield all objects that an object refers to, but not through classes, functions and modules."""
    seen, left = {id(root)}, [root]
    while left:
        one = left.pop()
        yield one
        for each in msgspec.structs.astuple(one) if isinstance(one, msgspec.Struct) else gc.get_referents(one):
            if id(each) not in seen and not isinstance(each, type | FunctionType | ModuleType | FrameType):
                seen.add(id(each))
                left.append(each)


def test_no_password_stays_in_memory(db: ts.Database, tmp_path: Path) -> None:
    """The server keeps no password of a connected client in memory, even after a SUBSCRIBE and a PUBLISH."""
    users = PasswordFile(tmp_path / "users", argon2.PasswordHasher(time_cost=1, memory_cost=8, parallelism=1))
    users.put("ann", b"a password of ann")
    settings = ServerSettings(authentication=AuthenticationSettings(password_file=users.path))
    with Embedded(db, settings) as served, served.client() as client:
        assert client.connect("one", user_name="ann", password=b"a password of ann").reason == 0
        client.subscribe("a/#")
        client.publish("b", b"a payload")
        found = {one for one in held_by(served.server) if isinstance(one, bytes | str)}
    assert {"one", "ann", "a/#"} <= found
    assert not [one for one in found if one in (b"a password of ann", "a password of ann")]
