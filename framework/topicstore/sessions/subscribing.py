"""Making, changing, ending and resuming the subscriptions of a session. All of it under the dispatcher's lock."""

from __future__ import annotations

from topicstore.contract.errors import InvalidArgumentError
from topicstore.contract.positions import time_of
from topicstore.contract.state import StateWrite
from topicstore.contract.topics import TopicFilter
from topicstore.shard.state import FrameworkWrite

from .context import SessionContext
from .live_session import LiveSession
from .model import Start, SubscribeOptions, SubscriptionStatus, places_of
from .records import Era
from .shared.filters import is_shared
from .shared.source import SharedSource
from .sources import FeedSource, RetainedSource

__all__ = ["resume", "status_of", "subscribe", "unsubscribe"]


def subscribe(
    context: SessionContext, session: LiveSession, topic_filter: TopicFilter, options: SubscribeOptions, start: Start
) -> bool:
    """Subscribe, or change the options of a subscription; return whether there was one."""
    context.dispatcher.listen_locked()  # what came before is for those who were there, by the options there were
    known = session.sources.get(topic_filter.text)
    if is_shared(topic_filter.text):
        _share(context, session, topic_filter.text, options, start)
    elif isinstance(known, FeedSource):
        _change(context, session, known, options, start)
    else:
        _add(context, session, topic_filter, options, start)
    return known is not None


def unsubscribe(context: SessionContext, session: LiveSession, topic_filter: str) -> bool:
    """End a subscription; return whether there was one."""
    source = session.sources.get(topic_filter)
    if source is None:
        return False
    number, keys = source.number, session.keys
    kinds = (keys.subscription, keys.place, keys.retained, keys.leases)
    if isinstance(source, SharedSource):
        source.group.save()  # its places, before they are removed here
    _commit(context, session, [FrameworkWrite(key(number), None) for key in kinds])
    session.sources.pop(topic_filter)
    for gone in (source, session.retained.pop(number, None)):
        if gone is not None:
            session.forget(gone)
            gone.close()
    if isinstance(source, SharedSource):
        context.groups.leave(source.group, session.client_id)
    if source.limited or isinstance(source, SharedSource):
        context.filters.remove_locked(topic_filter)
    return True


def _add(
    context: SessionContext, session: LiveSession, topic_filter: TopicFilter, options: SubscribeOptions, start: Start
) -> None:
    source = _source(context, session, session.numbers, topic_filter, (Era(options),))
    try:
        source.start(places_of(start, context.dispatcher.hub.watermarks()))
        _store(context, session, source, retained=options.retain_handling < 2)
    except BaseException:
        session.forget(source)
        source.close()
        raise
    session.numbers += 1
    session.sources[topic_filter.text] = source
    if source.limited:
        context.filters.add_locked(topic_filter.text)


def _change(
    context: SessionContext, session: LiveSession, source: FeedSource, options: SubscribeOptions, start: Start
) -> None:
    eras, was_limited = source.eras, source.limited
    marks = context.dispatcher.hub.watermarks()
    if start is not None:
        source.restart(options, places_of(start, marks))
    elif options != source.options:
        source.change(options, marks)
    try:
        _store(context, session, source, retained=options.retain_handling == 0)
    except BaseException:
        source.undo(eras)
        raise
    if source.limited and not was_limited:
        context.filters.add_locked(source.topic_filter.text)
    elif was_limited and not source.limited:
        context.filters.remove_locked(source.topic_filter.text)


def _share(context: SessionContext, session: LiveSession, text: str, options: SubscribeOptions, start: Start) -> None:
    """Join a shared subscription, or change this member's options."""
    if options.no_local:
        raise InvalidArgumentError("a shared subscription can't have no_local [MQTT-3.8.3-4]")
    known = session.sources.get(text)
    if isinstance(known, SharedSource):
        before = known.options
        known.change(options)
        try:
            _commit(context, session, known.everything())
        except BaseException:
            known.change(before)
            raise
        return
    groups, places = context.groups, places_of(start, context.dispatcher.hub.watermarks())
    source = groups.join(session.keys, session.numbers, text, options, places, session.wake)
    try:
        _commit(context, session, source.everything())
    except BaseException:
        groups.leave(source.group, session.client_id)
        raise
    session.numbers += 1
    session.sources[text] = source
    context.filters.add_locked(text)
    source.group.attach(source)


def _store(context: SessionContext, session: LiveSession, source: FeedSource, *, retained: bool) -> None:
    """Commit a subscription, and that its retained messages are to be sent."""
    messages = context.retained(source.topic_filter.text) if retained else []
    now = context.dispatcher.clock()
    sending = RetainedSource(session.keys, source.number, source.topic_filter, source.options, messages, now)
    _commit(context, session, [*source.everything(), *sending.everything()])
    source.settled()
    if messages:
        session.forget(session.retained.get(source.number, sending))
        session.retained[source.number] = sending
        session.wake(sending)


def resume(context: SessionContext, session: LiveSession) -> None:
    """Take up the stored subscriptions, once, when the session is opened."""
    states, marks = context.states, context.dispatcher.hub.watermarks()
    places, sent = states.places(session.client_id), states.retained(session.client_id)
    for number, record in states.subscriptions(session.client_id):
        session.numbers = number + 1
        text, options = record.topic_filter, record.eras[-1].options
        if is_shared(text):
            shared = context.groups.join(session.keys, number, text, options, marks, session.wake)
            session.sources[text] = shared
            shared.group.attach(shared)
            continue
        source = _source(context, session, number, TopicFilter(text), record.eras)
        source.start(places.get(number, marks) if source.limited else marks)
        source.settled()
        session.sources[text] = source
        if number in sent:
            messages, now = context.retained(text), context.dispatcher.clock()
            sending = RetainedSource(
                session.keys, number, source.topic_filter, options, messages, now, behind=sent[number]
            )
            session.retained[number] = sending
            session.wake(sending)
            session.touched()  # perhaps nothing is left to send, which is to be stored
    session.ask()


def _source(
    context: SessionContext, session: LiveSession, number: int, topic_filter: TopicFilter, eras: tuple[Era, ...]
) -> FeedSource:
    return FeedSource(context.dispatcher, session.keys, number, topic_filter, eras, session.wake)


def _commit(context: SessionContext, session: LiveSession, writes: list[StateWrite]) -> None:
    context.commits.write(session, [session.guard, *writes])


def status_of(source: FeedSource | SharedSource, marks: list[int]) -> SubscriptionStatus:
    """Return how far a subscription has come; ``marks``: the shards' highest visible positions."""
    places = source.places
    behind = max((time_of(marks[shard]) - time_of(places[shard]) for shard in source.unread()), default=0)
    return SubscriptionStatus(
        topic_filter=source.topic_filter.text,
        options=source.options,
        places=tuple(places),
        behind=max(behind, 0) / 1e6,
        dropped=source.dropped,
    )
