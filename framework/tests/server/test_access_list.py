"""The access list: permissions of each rule, and client-chosen names in topics, which must not widen them."""

from __future__ import annotations

import itertools
from typing import Literal

import pytest
from topicstore.contract.topics import TopicFilter
from topicstore.server.access.permissions import AccessList, ClientRules, TopicPattern
from topicstore.server.config.model import AuthorizationSettings, Rule, SettingsError

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
    """Wildcards in rules match topics as wildcards in filters do (MQTT 5, section 4.7).

    A pattern covers a filter exactly if it matches all topics of the filter. All filters of up to two levels are tried
    with all topics of up to three.
    """
    matched = {text: {topic for topic in TOPICS if TopicFilter(text).matches(topic)} for text in FILTERS}
    for text, mine in matched.items():
        pattern = TopicPattern(text, None, "")
        assert mine == {topic for topic in TOPICS if pattern.matches(topic)}, text
        for other, theirs in matched.items():
            if pattern.covers(TopicFilter(other)):
                assert theirs <= mine, (text, other)
            elif other not in ("#", "/#"):  # these filters would match an empty topic, which doesn't exist
                assert not theirs <= mine, (text, other)


def test_nothing_is_allowed_without_a_rule_but_from_this_machine() -> None:
    """Without access rules, only clients on this machine may do everything.

    As soon as there is a rule, these clients need permission, too.
    """
    assert not rules().may_publish("a")
    assert not may_subscribe(rules(), "a")
    near = rules(loopback=True)
    assert near.everything
    assert near.may_publish("a")
    assert not rules(allow("b"), loopback=True).may_publish("a")


def test_what_is_unlisted_can_be_settled() -> None:
    """The setting ``unlisted`` decides about actions that no rule mentions, for clients on any machine."""
    for unlisted in ("allow", "deny"):
        settled = AccessList(AuthorizationSettings(unlisted=unlisted))  # type: ignore[arg-type]
        for loopback in (True, False):
            assert settled.of(None, "one", loopback=loopback).may_publish("a") is (unlisted == "allow")


def test_the_first_rule_that_speaks_of_a_topic_counts() -> None:
    """The first rule that matches a topic decides, whether it allows or denies."""
    found = rules(deny("a/secret"), allow("a/#"), deny("a/b"))
    assert found.may_publish("a/b")
    assert not found.may_publish("a/secret")
    assert not found.may_publish("b")


def test_rules_are_for_actions_users_and_clients() -> None:
    """A rule may be limited to actions, users and client ids; without limits it is for all."""
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
    """A rule without users applies to anonymous clients; a rule that names users, or has %u in a topic, doesn't."""
    assert rules(allow("a"), user=None).may_publish("a")
    assert not rules(allow("a/%u"), user=None).may_publish("a/")
    assert not rules(allow("a", users=("",)), user=None).may_publish("a")


def test_names_stand_in_topics() -> None:
    """User names and client ids are substituted in topics as a whole level or a part of one.

    A name that looks like a placeholder is not substituted again.
    """
    found = rules(allow("u/%u/#", "c/x-%c", "both/%u-%c"), user="ann", client="one")
    assert found.may_publish("u/ann/t")
    assert not found.may_publish("u/bob/t")
    assert found.may_publish("c/x-one")
    assert found.may_publish("both/ann-one")
    assert rules(allow("u/%u"), user="%c", client="one").may_publish("u/%c")


@pytest.mark.parametrize("name", ["+", "#", "a/b", "a/#", "x+"])
def test_a_name_with_wildcards_or_slashes_gets_nothing_by_itself(name: str) -> None:
    """A name with wildcards or slashes gets no permission by substitution.

    Otherwise a client could choose an id that covers the topics of others.
    """
    found = rules(allow("u/%u/#", "c/%c/#"), user=name, client=name)
    for topic_filter in ("u/#", "u/+/#", "c/#", "c/+/x", "u/a/b", "c/a/b", f"c/{name.split('/')[0]}/#"):
        if "/#/" not in topic_filter and "x+" not in topic_filter:
            assert not may_subscribe(found, topic_filter)
    assert not found.may_publish("u/a/b")
    assert not found.may_publish("c/a/b/t")


def test_a_name_that_begins_with_a_dollar_gets_no_special_topics() -> None:
    """A name that begins with a dollar sign may be substituted within a topic, but not at its beginning."""
    found = rules(allow("%c/#", "%u/#", "c/%c/#"), user="$SYS", client="$SYS")
    assert not may_subscribe(found, "$SYS/#")
    assert not found.may_publish("$SYS/broker")
    assert may_subscribe(found, "c/$SYS/#")
    assert not rules(deny("%c/#"), allow("$SYS/#"), client="$SYS").may_publish("$SYS/broker")


def test_a_denial_holds_for_a_name_with_slashes() -> None:
    """A denying rule also applies to names with slashes, substituted as they are."""
    found = rules(deny("c/%c"), allow("#"), client="a/b")
    assert not found.may_publish("c/a/b")
    assert found.may_publish("c/a")


def test_a_filter_that_is_denied_in_part_is_granted_and_the_part_kept_back() -> None:
    """A filter that is denied only in part is granted, and the denied messages are not sent.

    A filter that is wholly within a denied one is refused.
    """
    found = rules(deny("a/secret/#"), allow("a/#"))
    assert may_subscribe(found, "a/#")
    assert not may_subscribe(found, "a/secret/x")
    assert not may_subscribe(found, "#")
    assert not found.reads_everything
    assert found.may_receive("a/public")
    assert not found.may_receive("a/secret/x")
    assert not found.may_receive("a/secret")


def test_messages_need_no_look_where_all_subscriptions_are_allowed() -> None:
    """Deliveries aren't checked if the rules allow every subscription; rules for publishing have no influence."""
    assert rules(allow("a/#"), deny("b", action="publish"), unlisted="allow").reads_everything
    assert not rules(allow("#")).reads_everything


def test_messages_of_topics_that_no_rule_speaks_of_are_as_all_that_is_unlisted() -> None:
    """Whether a message may be received depends on its topic alone, not on the filter that matched it.

    Topics without a rule follow the setting ``unlisted``.
    """
    assert not rules(allow("public/#")).may_receive("secret/x")
    assert rules(deny("public/#"), unlisted="allow").may_receive("secret/x")


def test_topics_of_the_server_need_a_rule_of_their_own() -> None:
    """Topics of the server need a rule of their own, because a wildcard doesn't match a leading dollar sign."""
    assert not may_subscribe(rules(allow("#")), "$SYS/#")
    assert may_subscribe(rules(allow("$SYS/#")), "$SYS/broker/+")


def test_a_rule_with_a_bad_filter_is_refused() -> None:
    """A rule with an invalid filter is an error at start that names the rule."""
    with pytest.raises(SettingsError, match=r"authorization\.rules\[1\]\.topics: filter 'a#'"):
        rules(allow("a"), deny("a#"))
