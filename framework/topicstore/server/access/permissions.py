"""What one connection may do; what was decided is kept as long as it lasts."""

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
"""Decisions that a connection keeps of each action."""
_UNUSED = 256
"""Answers of plugins about messages that are kept until they are used: twice what is asked for at a time."""
_TOPICS = 1_024
"""Decisions that a connection keeps of what the client may be sent."""

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
        """Whether nothing has to be asked."""
        self.reads_everything = plugins is None and rules.reads_everything
        """Whether every message may go to the client."""
        self._received: BoundedCache[str, bool] = BoundedCache(_TOPICS, _BYTES)
        """By topic, whether its messages may go to the client. Used in any thread."""
        self._answered: dict[str, bool] = {}
        """Answers of plugins about messages, until all that belong together are there: `_received` may not keep them.
        There are at most `_UNUSED`, and those of one call more."""

    def decided(self, action: Action, topic: str) -> bool | None:
        """Return whether the client may publish to a topic or subscribe to a filter; None if plugins must be asked.

        Never waits. A filter that is none is not allowed.
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
        """Return `decided` for each topic, after asking plugins where that says None.

        If a plugin fails, that is logged, and the answer is still None: nothing is allowed by it. It is not kept, but
        for a topic to publish to, the next `decided` says no.
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
        """Return for each topic whether its messages may go to the client; None if plugins must be asked.

        Never waits. May be called in any thread, though in one at a time.
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
        """Ask plugins what `received` says None of. Raises what they raise, and `TooManyWaitingError`.

        They are asked as about a subscription of just that topic.
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
            self._answered = before | found  # messages that are sent together may need the answers of several calls

    def _listed(self, action: Action, topic: str) -> bool:
        if action == "publish":
            return self._rules.may_publish(topic)
        try:
            return self._rules.may_subscribe(TopicFilter(topic))
        except InvalidFilterError:
            return False
