"""The access list: ordered rules, of which the first that matches a request decides."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from topicstore.contract.access import Action
from topicstore.contract.errors import InvalidFilterError
from topicstore.contract.topics import TopicFilter
from topicstore.server.settings import AuthorizationSettings, Rule, SettingsError

from .name_patterns import ClientIdPatterns, NamePattern
from .topic_patterns import TopicPattern

__all__ = ["AccessList", "ClientRules"]

_UNSAFE = frozenset("+#/")
"""Characters with which a client's name could widen a topic filter into which it is inserted."""


@attrs.frozen
class _ClientRule:
    """A rule that applies to one client, with the client's names inserted into its topic filters."""

    allow: bool
    actions: tuple[Action, ...]
    topics: tuple[TopicPattern, ...]


class ClientRules:
    """The rules of the access list that apply to one client. Immutable, so thread-safe."""

    __slots__ = ("_rules", "_unlisted", "everything", "reads_everything")

    def __init__(self, rules: Sequence[_ClientRule], *, unlisted: bool) -> None:
        self._rules, self._unlisted = tuple(rules), unlisted
        self.everything = unlisted and all(rule.allow for rule in rules)
        """Whether the client may do everything."""
        self.reads_everything = unlisted and all(rule.allow for rule in rules if "subscribe" in rule.actions)
        """Whether the client may receive every message."""

    def may_publish(self, topic: str) -> bool:
        """Return whether the client may publish to a topic."""
        for rule in self._rules:
            if "publish" in rule.actions and any(pattern.matches(topic) for pattern in rule.topics):
                return rule.allow
        return self._unlisted

    def may_subscribe(self, topic_filter: TopicFilter) -> bool:
        """Return whether the client may subscribe to a filter: the first rule that covers the whole filter decides.

        A rule that denies some topics of the filter doesn't deny the filter; `may_receive` withholds their messages.
        """
        for rule in self._rules:
            if "subscribe" in rule.actions and any(pattern.covers(topic_filter) for pattern in rule.topics):
                return rule.allow
        return self._unlisted

    def may_receive(self, topic: str) -> bool:
        """Return whether the client may receive messages of a topic, through any of its filters.

        If a rule allows a filter, some topic of the filter is always allowed.
        """
        for rule in self._rules:
            if "subscribe" in rule.actions and any(pattern.matches(topic) for pattern in rule.topics):
                return rule.allow
        return self._unlisted


class AccessList:
    """The rules of a server's settings."""

    def __init__(self, settings: AuthorizationSettings) -> None:
        """Check the rules' topics and client ids. Raises `SettingsError`."""
        self._settings = settings
        self._rules = [
            (rule, [NamePattern(text) for text in rule.users], _client_ids(rule, number), _checked(rule, number))
            for number, rule in enumerate(settings.rules)
        ]

    def of(self, user: str | None, client_id: str, *, loopback: bool) -> ClientRules:
        """Return the rules that apply to a client; ``user`` is None for an anonymous client."""
        rules = []
        for rule, users, clients, topics in self._rules:
            allow = rule.permission == "allow"
            if not _speaks_of(users, rule.users, user) or not clients.match(client_id, user, mistakable=not allow):
                continue
            usable = [text for text in topics if _usable(text, user, client_id, allow=allow)]
            if usable:
                patterns = tuple(TopicPattern(text, user, client_id) for text in usable)
                rules.append(_ClientRule(allow, _ACTIONS[rule.action], patterns))
        return ClientRules(rules, unlisted=self._unlisted(loopback=loopback))

    def _unlisted(self, *, loopback: bool) -> bool:
        if self._settings.unlisted is not None:
            return self._settings.unlisted == "allow"
        return loopback and not self._settings.rules and not self._settings.plugins


_ACTIONS: dict[str, tuple[Action, ...]] = {
    "publish": ("publish",),
    "subscribe": ("subscribe",),
    "both": ("publish", "subscribe"),
}


def _client_ids(rule: Rule, number: int) -> ClientIdPatterns:
    try:
        return ClientIdPatterns(rule.clients)
    except ValueError as bad:
        raise SettingsError(f"authorization.rules[{number}].clients: {bad}") from bad


def _speaks_of(names: Sequence[NamePattern], texts: Sequence[str], user: str | None) -> bool:
    return "*" in texts if user is None else any(name.matches(user) for name in names)


def _usable(text: str, user: str | None, client_id: str, *, allow: bool) -> bool:
    """Return whether a rule's topic filter can be used for a client whose names are inserted into it.

    Names with ``/``, ``+`` or ``#`` could match other clients' topics, and names with a leading ``$`` topics such as
    ``$SYS``. So a rule that allows is not used with such names.
    """
    if "%u" in text and not user:
        return False
    names = ((mark, name or "") for mark, name in (("%u", user), ("%c", client_id)) if mark in text)
    return not allow or not any(_widens(name, first=text.startswith(mark)) for mark, name in names)


def _widens(name: str, *, first: bool) -> bool:
    return not _UNSAFE.isdisjoint(name) or (first and name.startswith("$"))


def _checked(rule: Rule, number: int) -> tuple[str, ...]:
    for topic in rule.topics:
        try:
            TopicFilter(topic)
        except InvalidFilterError as bad:
            raise SettingsError(f"authorization.rules[{number}].topics: {bad}") from bad
    return rule.topics
