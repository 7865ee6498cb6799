"""Descriptions of future removals, with times and reasons, from settings and generations. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import attrs

from topicstore.contract.positions import span_text
from topicstore.contract.times import format_time
from topicstore.contract.topics import TopicFilter

from .retention_policy import GenerationAge, RetentionSettings, Rule, going, micros, must_rotate, rules

__all__ = ["Departure", "kept", "outlook", "reasons"]


@attrs.frozen(kw_only=True)
class Departure:
    """Messages that will be removed or will stay, with time and reason."""

    what: str
    """A generation, or the messages that a filter matches."""
    when: int | None
    """The wall clock's time, in microseconds since the epoch, after which a run removes them; None: unknown."""
    why: str
    """The reason, as a sentence."""
    generation: int | None = None
    messages: int | None = None
    """The number of messages: of a generation all, of a filter those that a run removes now; None: not counted."""
    live_bytes: int | None = None
    due: bool = False
    """Whether the next run may remove them, or some of them."""


def kept(settings: RetentionSettings, stored: Sequence[str]) -> tuple[str, ...]:
    """Return sentences that say which published messages are stored, by which rules, and for how long.

    ``stored``: the persistence rules, as text.
    """
    unless = "only if a session waits for it, or if its publisher requests it"
    if "#" in stored:
        which = "all published messages are stored"
    elif stored:
        which = f"messages published to {', '.join(stored)} are stored; any other message {unless}"
    else:
        which = f"no rule stores messages: a message is stored {unless}"
    if settings.delivered is None:
        waiting = "messages that are stored only for sessions are kept like all others"
    else:
        age = span_text(micros(settings.delivered))
        waiting = (
            f"messages that only sessions need are removed once no session needs them, at the earliest after {age}"
        )
    ages = [_kept_for("all other stored messages", settings.max_age)]
    ages += [_kept_by(settings, name, length) for name, length in settings.filters.items()]
    if settings.archive_to is not None:
        ages.append(f"removed messages are archived to {settings.archive_to}")
    if settings.drops_bytes is not None:
        ages.append(f"above {settings.drops_bytes:,} bytes, the oldest messages are removed earlier")
    elif settings.max_bytes is not None:
        ages.append(f"above {settings.max_bytes:,} bytes, new messages are refused")
    return which, waiting, "; ".join(ages)


def _kept_by(settings: RetentionSettings, name: str, length: float | None) -> str:
    """Return how long a filter keeps its messages, which another one may keep longer."""
    for other, longer in settings.filters.items():
        if length is not None and (longer is None or longer > length) and TopicFilter(other).covers(TopicFilter(name)):
            return f"messages that match {name} are kept as long as those that match {other}"
    return _kept_for(f"messages that match {name}", length)


def _kept_for(which: str, length: float | None) -> str:
    return f"{which} are kept " + ("for ever" if length is None else f"for {span_text(micros(length))}")


def outlook(
    settings: RetentionSettings,
    generations: Sequence[GenerationAge],
    now: int,
    newest: int,
    held_back: int = 0,
    expired: Mapping[str, int] | None = None,
) -> list[Departure]:
    """Return the departures of the generations, oldest first, and then those by filter.

    ``now``: the wall clock's time; ``held_back``: the microseconds by which ``now`` has jumped ahead; ``newest``: the
    time of the newest message; ``expired``: the number of messages that a run deletes now, by the name of the rule;
    None: they weren't counted.
    """
    passed = now - held_back
    due, found = set[int](), [_of_generation(settings, one, held_back) for one in generations[:-1]]
    if generations:
        due = {one.number for one in going(settings, generations, passed, newest)}
        found.append(_of_current(settings, generations[-1], now, goes=generations[-1].number in due))
    found = [attrs.evolve(one, due=one.generation in due) for one in found]
    first = min((one.created for one in generations if one.messages and not one.archived), default=now)
    counts = expired or {}
    return [*found, *(_of_rule(rule, passed, first, counts.get(rule.name)) for rule in rules(settings))]


def _of_generation(settings: RetentionSettings, one: GenerationAge, held_back: int) -> Departure:
    age, when = settings.whole_age, None
    if one.archived:
        why = "it lies in an export, and stays until it is dropped"
    elif age is not None:
        when = one.ended + age + 1 + held_back
        goes = "goes" if settings.archive_to is None else "is archived"
        why = f"it {goes} as a whole when its newest message is older than {span_text(age)}"
    elif settings.filters and settings.max_age is not None:
        kept = ", ".join(name for name, length in settings.filters.items() if length is None)
        why = f"what matches {kept} stays for ever; it goes when nothing of that is left in it"
    elif settings.filters:
        why = "what no filter matches stays for ever; it goes when nothing is left in it"
    else:
        why = "there is no max_age"
    if settings.drops_bytes is not None and not one.archived:
        why += f"; earlier where more than {settings.drops_bytes:,} bytes are stored, the oldest first"
    return Departure(
        what=f"generation {one.number}",
        when=when,
        why=why,
        generation=one.number,
        messages=one.messages,
        live_bytes=one.live_bytes,
    )


def _of_current(settings: RetentionSettings, one: GenerationAge, now: int, *, goes: bool) -> Departure:
    every = settings.rotation
    if not one.messages:
        why = "it is the current one, and empty"
    elif must_rotate(settings, one, now):
        why = f"it is the current one, and the next run begins another{', and removes it' if goes else ''}"
    elif every is not None:
        begins = format_time(_whole_second(one.created + every))
        why = f"it is the current one: another begins at {begins}, when it is {span_text(every)} old"
    elif settings.drops_bytes is not None:
        why = "it is the current one: another begins when it is an eighth of max_bytes"
    else:
        why = "it is the current one, and nothing begins another but add_generation"
    return Departure(
        what=f"generation {one.number}",
        when=None,
        why=why,
        generation=one.number,
        messages=one.messages,
        live_bytes=one.live_bytes,
    )


def _of_rule(rule: Rule, now: int, first: int, count: int | None) -> Departure:
    """Return the departure of the messages of a rule: ``count``, or if that is None, of messages from ``first`` on."""
    what = "what no filter matches" if rule.matches is None else f"what matches {rule.matches}"
    but = f", but for what matches {', '.join(rule.spare)}" if rule.matches is not None and rule.spare else ""
    before = format_time(_whole_second(max(now - rule.age, 0)))
    why = f"a run deletes what is older than {span_text(rule.age)}, so now from before {before}{but}"
    due = now - rule.age > first if count is None else count > 0
    return Departure(what=what, when=None, why=why, messages=count, due=due)


def reasons(
    settings: RetentionSettings, generations: Sequence[GenerationAge], now: int, held_back: int
) -> Iterator[str]:
    """Yield the reasons why the stored messages were not removed, as sentences."""
    if not settings.limited:
        full = " but the bytes above which messages are refused" if settings.max_bytes is not None else ""
        yield f"no limit is set{full}, so nothing goes"
        return
    if not any(one.messages for one in generations):
        yield "there are no messages"
        return
    if held_back:
        yield f"the clock is {span_text(held_back)} ahead of the time that has passed, which doesn't count yet"
    for one in outlook(settings, generations, now, now, held_back):
        if one.generation is None:
            yield f"{one.what}: {one.why}"
        elif one.messages:
            at = "" if one.when is None else f", from {format_time(_whole_second(one.when + 999_999))} on"
            yield f"{one.what}: {one.why}{at}"


def _whole_second(time: int) -> int:
    return time // 10**6 * 10**6
