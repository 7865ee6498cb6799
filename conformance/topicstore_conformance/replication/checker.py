"""Explores all reachable states breadth-first, and reports the shortest path to one that violates an invariant."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import attrs
from topicstore.contract.errors import CorruptionError

from .decisions import Decisions
from .truth import Entry, Replica, Truth
from .world import Scope, State, World

__all__ = ["Finding", "Report", "check"]


@attrs.frozen
class Finding:
    """A violated invariant, and the steps that lead to it."""

    what: str
    trace: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join((f"{self.what}, after {len(self.trace)} steps:", *self.trace))


@attrs.frozen
class Report:
    """The result of an exploration."""

    states: int
    finding: Finding | None
    whole: bool
    """Whether all reachable states were explored without a finding."""


def check(scope: Scope, decisions: Decisions | None = None, *, most: int = 10_000_000) -> Report:
    """Explore all states of a scope, but at most about ``most``; stop at the first finding."""
    world = World(scope, decisions or Decisions())
    begin = world.begin()
    came: dict[State, tuple[State, str] | None] = {begin: None}
    waiting = deque([begin])
    truths: dict[tuple[Entry | None, ...], Truth] = {}
    while waiting and len(came) < most:
        state = waiting.popleft()
        try:
            for label, after in world.steps(state):
                if after in came:
                    continue
                came[after] = (state, label)
                truth = truths.get(after.first) or truths.setdefault(after.first, Truth.of(after.first))
                wrong = _wrong(after, truth)
                if wrong:
                    return Report(len(came), Finding(wrong, tuple(_way(came, after))), whole=False)
                waiting.append(after)
        except CorruptionError as error:
            told = f"a site takes a sound log for damaged: {error}"
            return Report(len(came), Finding(told, tuple(_way(came, state))), whole=False)
    return Report(len(came), None, whole=not waiting)


def _way(came: dict[State, tuple[State, str] | None], state: State) -> list[str]:
    way: list[str] = []
    while (step := came[state]) is not None:
        state, label = step
        way.append(label)
    return way[::-1]


def _wrong(state: State, truth: Truth) -> str:
    """Return a description of the invariant that a state violates, or an empty text if there is none."""
    if truth.fault:
        return truth.fault
    ids = {one for one, _ in truth.prefixes[-1].stored}
    lost = sorted(state.acknowledged - ids)
    if lost:
        return f"{b' '.join(lost).decode()} was acknowledged and is not in the log"
    for what, replica in _replicas(state):
        if not truth.holds(replica):
            return f"{what} holds {_show(replica)}, and the log {_show(truth.prefixes[-1])}"
    for index in range(state.cut, len(truth.prefixes) - 1):
        if state.slots[index] is not state.first[index]:
            return f"entry {index} lies at or above the cut and is not what was written there"
    return ""


def _replicas(state: State) -> Iterator[tuple[str, Replica]]:
    yield "the base", state.base
    if not state.follower.todo:
        yield "the follower", state.follower.replica
    for actor in state.actors:
        if actor.phase == "own":
            yield f"site {actor.site}", actor.replica


def _show(replica: Replica) -> str:
    stored = " ".join(f"{one.decode()}={position}" for one, position in replica.stored)
    return f"[{stored}] below {replica.progress.next}"
