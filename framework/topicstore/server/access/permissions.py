"""The permissions of one connection, by the access list: ordered rules, of which the first that matches decides.

Decisions are cached. ``+`` and ``#`` in a rule's topic filter match as in subscriptions (MQTT 5, section 4.7), so they
don't match a first level that begins with ``$``. Names inserted for ``%u`` and ``%c`` are literal, also if they contain
wildcards.

In the patterns of users and client ids, ``*`` stands for any text, and in client ids ``%u`` for the user's name. Names
are matched in linear time, because clients choose them: the texts between ``*`` are searched in order, each at its
first occurrence. A later occurrence can't match better, so there is no backtracking.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Sequence

import attrs

from topicstore.contract.access import Action, Question
from topicstore.contract.errors import InvalidFilterError
from topicstore.contract.topics import TopicFilter
from topicstore.runtime.bounded_cache import BoundedCache
from topicstore.server.config.model import AuthorizationSettings, Rule, SettingsError

from .threads import Batches

__all__ = ["AccessList", "ClientIdPatterns", "ClientRules", "NamePattern", "Permissions", "TopicPattern"]


_USER = "%u"


class TopicPattern:
    """A topic filter of a rule, with a client's names inserted."""

    __slots__ = ("_levels", "_open_ended")

    def __init__(self, text: str, user: str | None, client_id: str) -> None:
        """Replace ``%u`` and ``%c`` with names. ``text`` is a valid filter; without a user it has no ``%u``."""
        levels = text.split("/")
        self._open_ended = levels[-1] == "#"
        if self._open_ended:
            levels.pop()
        self._levels: list[str | None] = []
        for level in levels:
            if level == "+":
                self._levels.append(None)
            else:
                named = _with_names(level, user or "", client_id)
                self._levels += named.split("/")

    def matches(self, topic: str) -> bool:
        """Return whether a topic name matches."""
        mine, theirs = self._levels, topic.split("/")
        if len(theirs) != len(mine) and not (self._open_ended and len(theirs) > len(mine)):
            return False
        if theirs[0][:1] == "$" and (not mine or mine[0] is None):
            return False
        return all(a is None or a == b for a, b in zip(mine, theirs, strict=False))

    def covers(self, topic_filter: TopicFilter) -> bool:
        """Return whether this filter matches every topic that another filter matches."""
        theirs = topic_filter.levels
        their_end = theirs[-1] == "#"
        if their_end:
            theirs = theirs[:-1]
        mine = self._levels
        if self._open_ended:
            if len(theirs) < len(mine):
                return False
        elif their_end or len(theirs) != len(mine):
            return False
        if theirs and theirs[0][:1] == "$" and (not mine or mine[0] is None):
            return False
        # A literal wildcard in `mine` can only come from a client's name, and must not equal a wildcard in `theirs`.
        return all(a is None or (a == b and b != "+") for a, b in zip(mine, theirs, strict=False))


def _with_names(level: str, user: str, client_id: str) -> str:
    """Replace placeholders; placeholders within the inserted names are not replaced."""
    parts = level.split("%u")
    return user.join(part.replace("%c", client_id) for part in parts)


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


_REMEMBERED, _BYTES = 256, 256 << 10
"""Most cached decisions of each action, and most characters of their topics."""
_UNUSED = 256
"""Answers of plugins about messages that are kept until used: twice the number in one call."""
_TOPICS = 1_024
"""Most cached decisions about messages to the client."""

_UNASKED: BoundedCache[str, bool] = BoundedCache(0, 0)
"""Stands for the caches of a client that is never asked about."""

_log = logging.getLogger("topicstore.server.access")


class Permissions:
    """The permissions of one client while it is connected."""

    __slots__ = (
        "_answered",
        "_plugins",
        "_publish",
        "_received",
        "_rules",
        "_subscribe",
        "_unanswered",
        "client_id",
        "reads_everything",
        "unrestricted",
        "user",
    )

    def __init__(
        self, user: str | None, client_id: str, rules: ClientRules, plugins: Batches[Question, bool | None] | None
    ) -> None:
        self.user, self.client_id, self._rules, self._plugins = user, client_id, rules, plugins
        self.unrestricted = plugins is None and rules.everything
        """Whether the client may do everything, so that no checks are needed."""
        self.reads_everything = plugins is None and rules.reads_everything
        """Whether the client may receive every message."""
        self._publish = self._subscribe = self._received = _UNASKED
        if not self.unrestricted:
            self._publish, self._subscribe = BoundedCache(_REMEMBERED, _BYTES), BoundedCache(_REMEMBERED, _BYTES)
        if not self.reads_everything:
            self._received = BoundedCache(_TOPICS, _BYTES)
        """By topic, whether the client may receive its messages. Thread-safe."""
        self._unanswered: set[str] | None = None
        """The topics about which plugins failed to answer; None if there are none."""
        self._answered: dict[str, bool] = {}
        """Answers of plugins about messages, until all answers for one delivery are there: `_received` may evict them.
        There are at most `_UNUSED`, plus those of one call."""

    def decided(self, action: Action, topic: str) -> bool | None:
        """Return whether the client may publish to a topic or subscribe to a filter; None if plugins must be asked.

        Never blocks. An invalid filter is not allowed.
        """
        if self.unrestricted:
            return True
        known = self._publish if action == "publish" else self._subscribe
        found = known.get(topic)
        if found is None and self._plugins is None:
            found = self._listed(action, topic)
            known.keep(topic, found)
        if found is None and action == "publish" and self._unanswered and topic in self._unanswered:
            self._unanswered.discard(topic)
            return False
        return found

    async def decide(self, action: Action, topics: Sequence[str]) -> list[bool | None]:
        """Return for each topic whether the action is allowed, after asking plugins if necessary.

        If a plugin fails, that is logged, and the answer is None, which allows nothing and is not cached. For
        publishes, only the next `decided` of the topic is False.
        """
        found = {topic: self.decided(action, topic) for topic in topics}
        asked = [topic for topic, decision in found.items() if decision is None]
        if asked and self._plugins is not None:
            questions = [
                Question(user=self.user, client_id=self.client_id, action=action, topic=topic) for topic in asked
            ]
            known = self._publish if action == "publish" else self._subscribe
            try:
                answers = await self._plugins.ask(questions)
            except Exception:  # noqa: BLE001 - a plugin may raise anything; it is logged, and nothing is allowed
                _log.exception("the client %r is refused because a plugin failed to say what it may do", self.client_id)
                if action == "publish":
                    self._unanswered = set(asked)
                return [found[topic] for topic in topics]
            for topic, answer in zip(asked, answers, strict=True):
                found[topic] = self._listed(action, topic) if answer is None else answer
                known.keep(topic, found[topic] is True)
        return [found[topic] for topic in topics]

    def received(self, topics: Sequence[str]) -> list[bool | None]:
        """Return for each topic whether the client may receive its messages; None if plugins must be asked.

        Never blocks. May be called in any thread, but not in several at the same time.
        """
        if self.reads_everything:
            return [True] * len(topics)
        found = list(map(self._received.get, topics))
        if None in found:
            for row, topic in enumerate(topics):
                if found[row] is not None:
                    continue
                if self._plugins is None:
                    found[row] = self._received.keep(topic, self._rules.may_receive(topic))
                else:
                    found[row] = self._answered.get(topic)
        if self._answered and None not in found:
            self._answered = {}
        return found

    async def ask_received(self, topics: Sequence[str]) -> None:
        """Ask plugins about topics for which `received` returned None.

        Plugins decide about a subscription to exactly that topic. Raises their exceptions, and `TooManyWaitingError`.
        """
        if self._plugins is not None:
            answers = await self._plugins.ask(
                [Question(user=self.user, client_id=self.client_id, action="subscribe", topic=one) for one in topics]
            )
            found = {
                topic: self._received.keep(topic, self._rules.may_receive(topic) if answer is None else answer is True)
                for topic, answer in zip(topics, answers, strict=True)
            }
            before = self._answered if len(self._answered) <= _UNUSED else {}
            self._answered = before | found  # one delivery may need the answers of several calls

    def _listed(self, action: Action, topic: str) -> bool:
        if action == "publish":
            return self._rules.may_publish(topic)
        try:
            return self._rules.may_subscribe(TopicFilter(topic))
        except InvalidFilterError:
            return False


class NamePattern:
    """A pattern in which only ``*`` is special."""

    __slots__ = ("_parts",)

    def __init__(self, text: str) -> None:
        self._parts = tuple(text.split("*"))

    def matches(self, name: str) -> bool:
        """Return whether the whole name matches."""
        return _match(self._parts, name)


class ClientIdPatterns:
    """Patterns of client ids, in which ``%u`` can bind a client id to a user.

    A client id is bound to at most one user. Therefore ``*`` may not follow ``%u``. Patterns with ``%u`` also don't
    apply to users whose names contain the character after ``%u`` in a pattern: with ``%u-*`` the client id ``ann-b-1``
    would belong to both ``ann`` and ``ann-b``. A ``*`` in a user's name has no special meaning.
    """

    __slots__ = ("_delimiters", "_free", "_named")

    def __init__(self, texts: Sequence[str]) -> None:
        """Parse patterns. Raises ValueError if a client id could be bound to two users."""
        named = [text.split(_USER) for text in texts if _USER in text]
        for before, after, *more in named:
            text = _USER.join((before, after, *more))
            if more or "*" in before or after.startswith("*"):
                raise ValueError(f"{text!r} has more than one '%u', or '*' before it or right behind it")
        _check_apart({before for before, *_ in named})
        self._free = tuple(NamePattern(text) for text in texts if _USER not in text)
        self._named = tuple((before, tuple(after.split("*"))) for before, after in named)
        self._delimiters = frozenset(after[:1] for _, after in named) - {""}

    def match(self, client_id: str, user: str | None, *, mistakable: bool = False) -> bool:
        """Return whether a client id is allowed to a user, or matches a pattern without ``%u``.

        ``user`` is None for an anonymous client. ``mistakable``: also match users whose names make the client id
        ambiguous, as rules that deny must.
        """
        if any(pattern.matches(client_id) for pattern in self._free):
            return True
        if not user or not (mistakable or self._delimiters.isdisjoint(user)):
            return False
        return any(_match((before + user + first, *rest), client_id) for before, (first, *rest) in self._named)


def _check_apart(beginnings: Iterable[str]) -> None:
    """Raise ValueError if a text before ``%u`` is a prefix of another one."""
    for one, following in itertools.pairwise(sorted(beginnings)):
        if following.startswith(one):
            raise ValueError(f"'{one}%u' and '{following}%u' can mean two users by the same client id")


def _match(parts: Sequence[str], name: str) -> bool:
    """Return whether a name consists of the parts in order, with any text between two parts."""
    first, *between = parts
    if not between:
        return name == first
    last = between.pop()
    at, end = len(first), len(name) - len(last)
    if at > end or not name.startswith(first) or not name.endswith(last):
        return False
    for part in between:
        found = name.find(part, at, end)
        if found < 0:
            return False
        at = found + len(part)
    return True
