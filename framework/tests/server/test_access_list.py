"""The access list: what it grants whom, and that names in its topics widen nothing."""

from __future__ import annotations

import itertools
from typing import Literal

import pytest
from topicstore.contract.topics import TopicFilter
from topicstore.server.access.access_list import AccessList, ClientRules
from topicstore.server.access.topic_patterns import TopicPattern
from topicstore.server.settings import AuthorizationSettings, Rule, SettingsError

LEVELS = ("a", "b", "", "$x")
TOPICS = ["/".join(levels) for n in (1, 2, 3) for levels in itertools.product(LEVELS, repeat=n) if levels != ("",)]
FILTERS = [
    "/".join((*levels, *end))
    for n in (0, 1, 2)
    for levels in itertools.product((*LEVELS, "+"), repeat=n)
    for end in ((), ("#",))
    if (levels or end) and "/".join((*levels, *end))
]


def rules(
    *given: Rule,
    user: str | None = "ann",
    client: str = "one",
    loopback: bool = False,
    unlisted: Literal["allow", "deny"] | None = None,
) -> ClientRules:
    return AccessList(AuthorizationSettings(rules=given, unlisted=unlisted)).of(user, client, loopback=loopback)


def allow(*topics: str, **more: object) -> Rule:
    return Rule(permission="allow", topics=topics, **more)  # type: ignore[arg-type]


def deny(*topics: str, **more: object) -> Rule:
    return Rule(permission="deny", topics=topics, **more)  # type: ignore[arg-type]


def may_subscribe(found: ClientRules, topic_filter: str) -> bool:
    return found.may_subscribe(TopicFilter(topic_filter))


def test_a_pattern_matches_and_covers_what_a_subscription_matches() -> None:
    """Wildcards mean the same in rules and in filters (MQTT 5, section 4.7); one that matches all topics covers.

    Of those, all of up to three levels are tried: enough to tell filters of two apart.
    """
    matched = {text: {topic for topic in TOPICS if TopicFilter(text).matches(topic)} for text in FILTERS}
    for text, mine in matched.items():
        pattern = TopicPattern(text, None, "")
        assert mine == {topic for topic in TOPICS if pattern.matches(topic)}, text
        for other, theirs in matched.items():
            if pattern.covers(TopicFilter(other)):
                assert theirs <= mine, (text, other)
            elif other not in ("#", "/#"):  # these would match a topic without levels, or an empty one, were there such
                assert not theirs <= mine, (text, other)


def test_nothing_is_allowed_without_a_rule_but_from_this_machine() -> None:
    """Whoever writes a rule has to allow this machine's clients what they need, too."""
    assert not rules().may_publish("a")
    assert not may_subscribe(rules(), "a")
    near = rules(loopback=True)
    assert near.everything
    assert near.may_publish("a")
    assert not rules(allow("b"), loopback=True).may_publish("a")


def test_what_is_unlisted_can_be_settled() -> None:
    """For all clients, wherever they are."""
    for unlisted in ("allow", "deny"):
        settled = AccessList(AuthorizationSettings(unlisted=unlisted))  # type: ignore[arg-type]
        for loopback in (True, False):
            assert settled.of(None, "one", loopback=loopback).may_publish("a") is (unlisted == "allow")


def test_the_first_rule_that_speaks_of_a_topic_counts() -> None:
    """Whether it allows or denies."""
    found = rules(deny("a/secret"), allow("a/#"), deny("a/b"))
    assert found.may_publish("a/b")
    assert not found.may_publish("a/secret")
    assert not found.may_publish("b")


def test_rules_are_for_actions_users_and_clients() -> None:
    """A rule that says none of them is for all."""
    given = (
        allow("out/#", action="publish"),
        allow("in/#", action="subscribe"),
        allow("u", users=("ann", "bob-*")),
        allow("c", clients=("one", "*-two")),
    )
    found = rules(*given)
    assert found.may_publish("out/x")
    assert not may_subscribe(found, "out/x")
    assert may_subscribe(found, "in/#")
    assert not found.may_publish("in/x")
    assert rules(*given, user="bob-7").may_publish("u")
    assert not rules(*given, user="bob").may_publish("u")
    assert not rules(*given, user=None).may_publish("u")
    assert rules(*given, client="is-two").may_publish("c")
    assert not rules(*given, client="one-").may_publish("c")
    assert rules(allow("x", users=("a.c",)), user="a.c").may_publish("x")
    assert not rules(allow("x", users=("a.c",)), user="abc").may_publish("x")


def test_anonymous_clients_are_meant_by_rules_for_all() -> None:
    """And by no rule that names a user or puts the name in a topic."""
    assert rules(allow("a"), user=None).may_publish("a")
    assert not rules(allow("a/%u"), user=None).may_publish("a/")
    assert not rules(allow("a", users=("",)), user=None).may_publish("a")


def test_names_stand_in_topics() -> None:
    """As a level, or as a part of one; a name that looks like a placeholder stays what it is."""
    found = rules(allow("u/%u/#", "c/x-%c", "both/%u-%c"), user="ann", client="one")
    assert found.may_publish("u/ann/t")
    assert not found.may_publish("u/bob/t")
    assert found.may_publish("c/x-one")
    assert found.may_publish("both/ann-one")
    assert rules(allow("u/%u"), user="%c", client="one").may_publish("u/%c")


@pytest.mark.parametrize("name", ["+", "#", "a/b", "a/#", "x+"])
def test_a_name_with_wildcards_or_slashes_gets_nothing_by_itself(name: str) -> None:
    """Else a client could choose an id with which others' topics are its own."""
    found = rules(allow("u/%u/#", "c/%c/#"), user=name, client=name)
    for topic_filter in ("u/#", "u/+/#", "c/#", "c/+/x", "u/a/b", "c/a/b", f"c/{name.split('/')[0]}/#"):
        if "/#/" not in topic_filter and "x+" not in topic_filter:
            assert not may_subscribe(found, topic_filter)
    assert not found.may_publish("u/a/b")
    assert not found.may_publish("c/a/b/t")


def test_a_name_that_begins_with_a_dollar_gets_no_special_topics() -> None:
    """It may stand within a topic, but not begin one."""
    found = rules(allow("%c/#", "%u/#", "c/%c/#"), user="$SYS", client="$SYS")
    assert not may_subscribe(found, "$SYS/#")
    assert not found.may_publish("$SYS/broker")
    assert may_subscribe(found, "c/$SYS/#")
    assert not rules(deny("%c/#"), allow("$SYS/#"), client="$SYS").may_publish("$SYS/broker")


def test_a_denial_holds_for_a_name_with_slashes() -> None:
    """It is looked for as it is written."""
    found = rules(deny("c/%c"), allow("#"), client="a/b")
    assert not found.may_publish("c/a/b")
    assert found.may_publish("c/a")


def test_a_filter_that_is_denied_in_part_is_granted_and_the_part_kept_back() -> None:
    """Denied is only a filter that lies wholly within a denied one."""
    found = rules(deny("a/secret/#"), allow("a/#"))
    assert may_subscribe(found, "a/#")
    assert not may_subscribe(found, "a/secret/x")
    assert not may_subscribe(found, "#")
    assert not found.reads_everything
    assert found.may_receive("a/public")
    assert not found.may_receive("a/secret/x")
    assert not found.may_receive("a/secret")


def test_messages_need_no_look_where_all_subscriptions_are_allowed() -> None:
    """A rule that denies publishing only changes nothing of that."""
    assert rules(allow("a/#"), deny("b", action="publish"), unlisted="allow").reads_everything
    assert not rules(allow("#")).reads_everything


def test_messages_of_topics_that_no_rule_speaks_of_are_as_all_that_is_unlisted() -> None:
    """Whatever filter once brought the client to them: it may have been another client's, or of earlier rules."""
    assert not rules(allow("public/#")).may_receive("secret/x")
    assert rules(deny("public/#"), unlisted="allow").may_receive("secret/x")


def test_topics_of_the_server_need_a_rule_of_their_own() -> None:
    """A wildcard doesn't match a first level that begins with a dollar sign."""
    assert not may_subscribe(rules(allow("#")), "$SYS/#")
    assert may_subscribe(rules(allow("$SYS/#")), "$SYS/broker/+")


def test_a_rule_with_a_bad_filter_is_refused() -> None:
    """When the server starts, with the rule's place."""
    with pytest.raises(SettingsError, match=r"authorization\.rules\[1\]\.topics: filter 'a#'"):
        rules(allow("a"), deny("a#"))
