"""The permissions of one connection, with a cache of decisions."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from topicstore.contract.access import Action, Question
from topicstore.contract.errors import InvalidFilterError
from topicstore.contract.topics import TopicFilter
from topicstore.runtime.bounded_cache import BoundedCache

from .access_list import ClientRules
from .batches import Batches

__all__ = ["Permissions"]

_REMEMBERED, _BYTES = 256, 256 << 10
"""Most cached decisions of each action, and most characters of their topics."""
_UNUSED = 256
"""Answers of plugins about messages that are kept until used: twice the number in one call."""
_TOPICS = 1_024
"""Most cached decisions about messages to the client."""

_log = logging.getLogger("topicstore.server.access")


class Permissions:
    """The permissions of one client while it is connected."""

    __slots__ = (
        "_answered",
        "_client_id",
        "_plugins",
        "_publish",
        "_received",
        "_rules",
        "_subscribe",
        "_unanswered",
        "_user",
        "reads_everything",
        "unrestricted",
    )

    def __init__(
        self, user: str | None, client_id: str, rules: ClientRules, plugins: Batches[Question, bool | None] | None
    ) -> None:
        self._user, self._client_id, self._rules, self._plugins = user, client_id, rules, plugins
        self._publish: BoundedCache[str, bool] = BoundedCache(_REMEMBERED, _BYTES)
        self._subscribe: BoundedCache[str, bool] = BoundedCache(_REMEMBERED, _BYTES)
        self._unanswered: set[str] = set()
        self.unrestricted = plugins is None and rules.everything
        """Whether the client may do everything, so that no checks are needed."""
        self.reads_everything = plugins is None and rules.reads_everything
        """Whether the client may receive every message."""
        self._received: BoundedCache[str, bool] = BoundedCache(_TOPICS, _BYTES)
        """By topic, whether the client may receive its messages. Thread-safe."""
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
        if found is None and action == "publish" and topic in self._unanswered:
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
                Question(user=self._user, client_id=self._client_id, action=action, topic=topic) for topic in asked
            ]
            known = self._publish if action == "publish" else self._subscribe
            try:
                answers = await self._plugins.ask(questions)
            except Exception:  # noqa: BLE001 - a plugin may raise anything; it is logged, and nothing is allowed
                _log.exception(
                    "the client %r is refused because a plugin failed to say what it may do", self._client_id
                )
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

        Plugins are asked about a subscription to exactly that topic. Raises what they raise, and `TooManyWaitingError`.
        """
        if self._plugins is not None:
            answers = await self._plugins.ask(
                [Question(user=self._user, client_id=self._client_id, action="subscribe", topic=one) for one in topics]
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
