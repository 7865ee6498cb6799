"""Explores every interleaving of the calls of a few sites that run the program over one store.

A state consists of the store's objects, the first entry that was created at each index, and the answers that each site
got. Its steps are the answers to the call that each site waits for. A killed or paused site is one that takes no more
steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import attrs
from topicstore.contract.errors import CorruptionError
from topicstore.replication import names
from topicstore.replication.heads import BEGINNING
from topicstore.replication.log_reader import LogReader
from topicstore.replication.objects import decode_entry
from topicstore.replication.reading import apply
from topicstore.replication.taking_over import Step

from .checker import Finding, Report
from .memory_store import Objects
from .program import SHARD, Answer, Call, Copy, Moment, Refusal, Site, Verb

__all__ = ["Program", "explore"]

_LOG, _PARTS = names.entries(SHARD), names.parts(SHARD)


@attrs.frozen(kw_only=True)
class Program:
    """The sites of an exploration, and the faults of the network."""

    sites: Mapping[str, Callable[[Site], object]]
    """The work of each site, by its name."""
    lost: int = 0
    """The number of times that the answer to a creation may be lost, in all."""
    page: int = 1_000
    """The most names that one call lists."""


class _State(NamedTuple):
    objects: frozenset[tuple[str, bytes]]
    first: tuple[bytes, ...]
    """The entry that was created first at each index."""
    histories: tuple[int, ...]
    """For each site, the number of its history in `_Sites`."""
    lost: int


class _Sites:
    """The sites' moments by the answers that they have received. Each history is run once."""

    def __init__(self, program: Program) -> None:
        self._work = list(program.sites.items())
        self._answers: list[tuple[Answer, ...]] = []
        self._known: dict[tuple[int, int, Answer], int] = {}
        self.moments: list[Moment] = []

    def begin(self) -> tuple[int, ...]:
        return tuple(self._run(site, ()) for site in range(len(self._work)))

    def answered(self, site: int, history: int, answer: Answer) -> int:
        key = site, history, answer
        if key not in self._known:
            self._known[key] = self._run(site, (*self._answers[history], answer))
        return self._known[key]

    def _run(self, site: int, answers: tuple[Answer, ...]) -> int:
        self._answers.append(answers)
        name, work = self._work[site]
        self.moments.append(Site(name, answers).run(work))
        return len(self.moments) - 1


def explore(program: Program, *, most: int = 10_000_000) -> Report:
    """Explore all states of a program, but at most about ``most``; stop at the first finding."""
    sites = _Sites(program)
    truth = _Truth()
    labels = list(program.sites)
    begin = _State(frozenset(), (), sites.begin(), 0)
    came: dict[_State, tuple[_State, str] | None] = {begin: None}
    waiting = deque([begin])
    while waiting and len(came) < most:
        state = waiting.popleft()
        for site, label, after in _steps(state, sites, program):
            if after in came:
                continue
            came[after] = (state, f"site {labels[site]}: {label}")
            wrong = truth.wrong(after, [sites.moments[history] for history in after.histories], labels)
            if wrong:
                return Report(len(came), Finding(wrong, tuple(_way(came, after))), whole=False)
            waiting.append(after)
    return Report(len(came), None, whole=not waiting)


def _way(came: dict[_State, tuple[_State, str] | None], state: _State) -> list[str]:
    way: list[str] = []
    while (step := came[state]) is not None:
        state, label = step
        way.append(label)
    return way[::-1]


def _steps(state: _State, sites: _Sites, program: Program) -> Iterator[tuple[int, str, _State]]:
    calls = [sites.moments[history].call for history in state.histories]
    for site, call in enumerate(calls):
        if call is not None and call.verb is Verb.CREATE and call.name.startswith(f"{_PARTS}/"):
            calls = [*[None] * site, call]  # no other site knows the name yet, so other orders lead to the same states
            break
    for site, call in enumerate(calls):
        if call is None:
            continue
        for answer, objects, lost in _answers(state, call, program):
            history = sites.answered(site, state.histories[site], answer)
            histories = (*state.histories[:site], history, *state.histories[site + 1 :])
            label = f"{call}: {answer.name}" if isinstance(answer, Refusal) else str(call)
            yield site, label, _State(objects, _first(state.first, objects, call), histories, state.lost + lost)


def _answers(state: _State, call: Call, program: Program) -> Iterator[tuple[Answer, frozenset[tuple[str, bytes]], int]]:
    """Yield each possible answer to a call, the objects after it, and the number of answers that were lost."""
    objects = dict(state.objects)
    if call.verb is Verb.NAMES:
        found = sorted(name for name in objects if name.startswith(f"{call.name}/") and name > call.after)
        yield tuple(found[: program.page]), state.objects, 0
    elif call.verb is Verb.GET:
        yield objects.get(call.name, Refusal.NOT_FOUND), state.objects, 0
    elif call.verb is Verb.DELETE:
        yield None, state.objects - {(call.name, objects.get(call.name, b""))}, 0
    else:
        taken = call.name in objects
        after = state.objects if taken else state.objects | {(call.name, call.data)}
        yield (Refusal.EXISTS if taken else None), after, 0
        if state.lost < program.lost and call.name.startswith(f"{_LOG}/"):
            yield Refusal.SILENCE, after, 1
            if not taken:
                yield Refusal.SILENCE, state.objects, 1
                yield Refusal.EXISTS, state.objects, 1


def _first(first: tuple[bytes, ...], objects: frozenset[tuple[str, bytes]], call: Call) -> tuple[bytes, ...]:
    created = call.verb is Verb.CREATE and call.name == names.entry(SHARD, len(first))
    return (*first, call.data) if created and (call.name, call.data) in objects else first


class _Truth:
    """The invariants of a state, computed from the log as it was first written, which sites can't see."""

    def __init__(self) -> None:
        self._prefixes: dict[tuple[bytes, ...], list[tuple[bytes, ...]]] = {}
        self._restored: dict[frozenset[tuple[str, bytes]], tuple[int, tuple[bytes, ...]] | str] = {}

    def wrong(self, state: _State, moments: list[Moment], labels: list[str]) -> str:
        """Return a description of the invariant that a state violates, or an empty text."""
        prefixes = self._prefixes.get(state.first)
        if prefixes is None:
            prefixes = self._prefixes[state.first] = _prefixes(state.first)
        if len(set(prefixes[-1])) < len(prefixes[-1]):
            return f"a change is in the log twice: {_show(prefixes[-1])}"
        acknowledged: set[bytes] = set()
        for label, moment in zip(labels, moments, strict=True):
            if moment.fault:
                return moment.fault
            if moment.next >= len(prefixes) or prefixes[moment.next] != moment.changes:
                return (
                    f"site {label} holds {_show(moment.changes)} below {moment.next}, and the log {_show(prefixes[-1])}"
                )
            acknowledged |= moment.acknowledged
        if state.objects not in self._restored:
            self._restored[state.objects] = _restored(state.objects)
        found = self._restored[state.objects]
        if isinstance(found, str):
            return f"a new site takes a sound log for damaged: {found}"
        end, changes = found
        if end >= len(prefixes) or prefixes[end] != changes:
            return f"a new site holds {_show(changes)} below {end}, and the log {_show(prefixes[-1])}"
        if lost := acknowledged.difference(changes):
            return f"{_show(tuple(sorted(lost)))} was acknowledged, and a new site does not have it"
        return ""


def _prefixes(first: tuple[bytes, ...]) -> list[tuple[bytes, ...]]:
    """Return the changes that each prefix of a log makes, from the empty prefix on."""
    progress = BEGINNING
    changes: tuple[bytes, ...] = ()
    found: list[tuple[bytes, ...]] = [()]
    for index, data in enumerate(first):
        entry = decode_entry(SHARD, index, data, "the log")
        for write in apply(progress, entry.head):
            progress = write.progress
            changes = (*changes, *entry.changes) if write.changes else changes
        found.append(changes)
    return found


def _restored(objects: frozenset[tuple[str, bytes]]) -> tuple[int, tuple[bytes, ...]] | str:
    """Return what a new site that reads these objects applies, or its error."""
    store = Objects(dict(objects))
    copy = Copy(store)
    reader = LogReader(store, SHARD, copy)
    try:
        while reader.read() is Step.READ:
            pass
    except CorruptionError as error:
        return str(error)
    return copy.progress.next, tuple(copy.changes)


def _show(changes: tuple[bytes, ...]) -> str:
    return "[" + " ".join(change.decode() for change in changes) + "]"
