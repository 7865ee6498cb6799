"""The model's states and steps: a few sites that want to own one shard, a follower, an object store, and a network.

A site that was named the owner takes over, appends and writes bases. A pause of any length is modelled by other sites'
steps before the site's next one. A restarted process is modelled as another site, which begins with the contents of
some replica. Answers are lost, PUTs arrive late or twice, and deletable entries are deleted at any moment.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import attrs
from topicstore.replication.heads import Head, Kind
from topicstore.replication.owning import Answer, Outcome, Stage
from topicstore.replication.reading import LocalWrite, Source
from topicstore.replication.taking_over import Step

from .decisions import Decisions
from .truth import EMPTY, Change, Entry, Replica

__all__ = ["Actor", "Scope", "State", "World"]

_KEY = b"last"
_SITES = "ABCDEFGH"


@attrs.frozen(kw_only=True)
class Scope:
    """The bounds of an exploration."""

    owners: int = 2
    slots: int = 4
    appends: int = 1
    """The number of changes that each owner makes."""
    lost: int = 1
    """The number of times that a PUT may get no answer."""
    late: int = 0
    """The total number of PUTs that may arrive late or a second time."""
    follower: bool = True
    releases: bool = False
    """Whether owners may release the shard voluntarily."""
    any_epoch: bool = False
    """Whether a site may be named with the epoch of another, as if cluster documents had been lost."""
    looks_first: bool = False
    """Whether the state includes the cut that the follower could have seen before its read."""
    scattered: bool = False
    """Whether entries are deleted one at a time, in any order, instead of together."""


class Flight(NamedTuple):
    """An in-flight PUT."""

    slot: int
    entry: Entry
    tries: int = 0
    met: bool = False
    """Whether the store has answered that the index is taken."""


class Actor(NamedTuple):
    """A site that is, was, or will be the owner of the shard."""

    phase: str = "idle"
    site: str = ""
    epoch: int = 0
    replica: Replica = EMPTY
    first_tail: int = 0
    queue: tuple[Change, ...] = ()
    flights: tuple[Flight, ...] = ()
    written: tuple[Entry, ...] = ()
    """Entries that are in the log and not applied to the site's replica yet."""
    made: int = 0


class Follower(NamedTuple):
    """A replica that only reads."""

    replica: Replica = EMPTY
    found: Entry | None = None
    """The entry that was read and not decided on yet."""
    cut_before: int = 0
    todo: tuple[tuple[LocalWrite, Entry], ...] = ()
    """The local writes still to be made."""


class State(NamedTuple):
    """A state of the model."""

    slots: tuple[Entry | None, ...]
    first: tuple[Entry | None, ...]
    """The entry that was created first at each index."""
    base: Replica
    cut: int
    named: int
    actors: tuple[Actor, ...]
    acknowledged: frozenset[bytes]
    follower: Follower
    late: tuple[Flight, ...]
    lates: int


STOPPED = Actor("stopped")


class World:
    """The transition relation of the model, with the program's decisions or faulty ones."""

    def __init__(self, scope: Scope, decisions: Decisions) -> None:
        self.scope = scope
        self.decide = decisions

    def begin(self) -> State:
        """Return the initial state."""
        nothing: tuple[Entry | None, ...] = (None,) * self.scope.slots
        actors = (Actor(),) * self.scope.owners
        return State(nothing, nothing, EMPTY, 0, 0, actors, frozenset(), Follower(), (), 0)

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        """Yield each possible next step as (description, state after it)."""
        if self.scope.follower:
            yield from self._follow(state)
        yield from self._store(state)
        started = False
        for number, actor in enumerate(state.actors):
            if actor.phase == "stopped" or (actor.phase == "idle" and started):
                continue
            started = started or actor.phase == "idle"
            for label, after, new in self._act(state, actor):
                actors = (*after.actors[:number], new, *after.actors[number + 1 :])
                yield f"site {_SITES[number]}: {label}", after._replace(actors=actors)

    # --- the store and the network ---

    def _store(self, state: State) -> Iterator[tuple[str, State]]:
        for flight in state.late:
            if state.slots[flight.slot] is None:
                slots, first = _created(state, flight.slot, flight.entry)
                rest = tuple(one for one in state.late if one is not flight)
                yield (
                    f"a late PUT of {_name(flight.entry)} arrives",
                    state._replace(slots=slots, first=first, late=rest),
                )
        if state.cut < state.base.progress.next:
            yield f"cut at {state.base.progress.next}", state._replace(cut=state.base.progress.next)
        self.decide.moment.base = state.base.progress.next
        # A base lists the fences of the log as it was first written.
        fences = {one.head.index for one in state.first if one is not None and one.head.kind is Kind.FENCE}
        gone = [
            index
            for index, entry in enumerate(state.slots)
            if entry is not None and self.decide.may_delete(index, state.cut, fences)
        ]
        for some in [[index] for index in gone] if self.scope.scattered else [gone] if gone else []:
            slots = tuple(None if index in some else entry for index, entry in enumerate(state.slots))
            yield f"entries {some} are deleted", state._replace(slots=slots)

    # --- the follower ---

    def _follow(self, state: State) -> Iterator[tuple[str, State]]:
        follower = state.follower
        replica = follower.replica
        if follower.todo:
            (write, entry), *rest = follower.todo
            after = self._follower(state, _stored(replica, write, entry), tuple(rest))
            yield f"the follower writes {_name(entry)}", state._replace(follower=after)
            yield "the follower crashes", state._replace(follower=self._follower(state, replica))
        elif follower.found is not None:
            self.decide.moment.cut_before = follower.cut_before
            if self.decide.where_to_read(replica.progress, state.cut) is Source.BASE:
                yield "the follower begins at the base", state._replace(follower=self._follower(state, state.base))
            else:
                self.decide.moment.clock = 7
                writes = self.decide.apply(replica.progress, follower.found.head)
                todo = tuple((write, follower.found) for write in writes)
                yield (
                    f"the follower takes {_name(follower.found)}",
                    state._replace(follower=Follower(replica, todo=todo)),
                )
        elif replica.progress.next < self.scope.slots and (found := state.slots[replica.progress.next]) is not None:
            after = follower._replace(found=found)
            yield f"the follower reads {_name(found)}", state._replace(follower=after)
        elif state.cut > replica.progress.next:
            yield "the follower begins at the base", state._replace(follower=self._follower(state, state.base))

    def _follower(self, state: State, replica: Replica, todo: tuple[tuple[LocalWrite, Entry], ...] = ()) -> Follower:
        return Follower(replica, None, state.cut if self.scope.looks_first else 0, todo)

    # --- owners ---

    def _act(self, state: State, actor: Actor) -> Iterator[tuple[str, State, Actor]]:
        if actor.phase == "idle":
            yield from self._named(state, _SITES[sum(one.phase != "idle" for one in state.actors)])
        elif actor.phase == "read":
            yield from self._read(state, actor)
        elif actor.phase == "look":
            yield self._look(state, actor)
        elif actor.phase == "own":
            yield from self._own(state, actor)
        for number, flight in enumerate(actor.flights):
            yield from self._fly(state, actor, number, flight)

    def _named(self, state: State, site: str) -> Iterator[tuple[str, State, Actor]]:
        epochs = {state.named + 1}
        if self.scope.any_epoch and state.named:
            epochs.add(state.named)
        for epoch in sorted(epochs):
            after = state._replace(named=max(state.named, epoch))
            for replica in {EMPTY, state.base, state.follower.replica}:
                # A started process may have the contents of any replica.
                what = f"named the owner for epoch {epoch}, and has what lies below {replica.progress.next}"
                yield what, after, self._begun(site, epoch, replica)

    def _begun(self, site: str, epoch: int, replica: Replica) -> Actor:
        if self.decide.after_reading(epoch, replica.progress) is Step.STOP:
            return STOPPED
        return Actor("read", site, epoch, replica, replica.progress.last_position)

    def _read(self, state: State, actor: Actor) -> Iterator[tuple[str, State, Actor]]:
        index = actor.replica.progress.next
        if actor.flights or index >= self.scope.slots:
            return
        found = state.slots[index]
        self.decide.moment.cut_before = state.cut
        if self.decide.where_to_read(actor.replica.progress, state.cut) is Source.BASE and found is not None:
            yield "begins at the base", state, self._begun(actor.site, actor.epoch, state.base)
        elif found is None:
            if self.decide.at_end() is Step.OWN:
                yield "owns without a fence", state, actor._replace(phase="own")
                return
            fence = self._entry(
                actor, Kind.FENCE, index, actor.replica.progress.before, b"f%b" % actor.site.encode(), ()
            )
            yield f"finds nothing at {index}", state, actor._replace(flights=(Flight(index, fence),))
        else:
            replica = self._applied(actor, found)
            stops = self.decide.after_reading(actor.epoch, replica.progress) is Step.STOP
            yield f"reads {_name(found)}", state, STOPPED if stops else actor._replace(replica=replica)

    def _look(self, state: State, actor: Actor) -> tuple[str, State, Actor]:
        fence = actor.written[0]
        if self.decide.after_look(fence.head, state.cut) is Step.BASE:
            return "finds a cut above its fence", state, self._begun(actor.site, actor.epoch, state.base)
        owner = actor._replace(phase="own", written=(), replica=self._applied(actor, fence))
        return "owns", state, owner

    def _own(self, state: State, actor: Actor) -> Iterator[tuple[str, State, Actor]]:
        pending = [change for entry in actor.written for change in entry.changes]
        pending += [change for flight in actor.flights for change in flight.entry.changes]
        pending += actor.queue
        if actor.made < self.scope.appends:
            change = self._prepared(actor, pending)
            grown = actor._replace(queue=(*actor.queue, change), made=actor.made + 1)
            yield f"queues {change.id.decode()} at {change.position}", state, grown
        chain = [*actor.written, *(flight.entry for flight in actor.flights)]
        index = chain[-1].head.index + 1 if chain else actor.replica.progress.next
        before = chain[-1].head.checksum if chain else actor.replica.progress.before
        if index < self.scope.slots:
            yield from self._send(state, actor, index, before)
        if actor.written:
            applied = actor.replica
            for entry in actor.written:
                applied = self._applied(actor._replace(replica=applied), entry)
            done = {change.id for entry in actor.written for change in entry.changes}
            told = state.acknowledged | done if self.decide.may_acknowledge(Stage.APPLIED) else state.acknowledged
            gone = any(entry.head.kind is Kind.RELEASED for entry in actor.written)
            after = STOPPED if gone else actor._replace(replica=applied, written=())
            yield "applies and acknowledges", state._replace(acknowledged=told), after
        progress = self.decide.base_progress(actor.replica.progress, index if not actor.flights else index - 1)
        if progress.next > state.base.progress.next:
            base = Replica.of(progress, actor.replica.stored)
            yield f"writes a base at {progress.next}", state._replace(base=base), actor

    def _prepared(self, actor: Actor, pending: list[Change]) -> Change:
        self.decide.moment.first_tail = actor.first_tail
        position = 1 + self.decide.tail(actor.replica.progress.last_position, [one.position for one in pending])
        stored = actor.replica.stored
        expects = self.decide.seen(
            _KEY, [{_KEY: one.id} for one in pending], lambda _: stored[-1][0] if stored else None
        )
        return Change(b"%b%d" % (actor.site.encode(), actor.made + 1), position, expects)

    def _send(self, state: State, actor: Actor, index: int, before: bytes) -> Iterator[tuple[str, State, Actor]]:
        flights, queued = len(actor.flights), len(actor.queue)
        if self.decide.may_put(flights, queued):
            entry = self._entry(actor, Kind.CHANGES, index, before, actor.queue[0].id, actor.queue)
            sent = actor._replace(queue=(), flights=(*actor.flights, Flight(index, entry)))
            told = state.acknowledged
            if self.decide.may_acknowledge(Stage.SENT):
                told |= {change.id for change in entry.changes}
            yield f"sends {_name(entry)}", state._replace(acknowledged=told), sent
        if self.scope.releases and self.decide.may_release(flights, queued) and not actor.written:
            entry = self._entry(actor, Kind.RELEASED, index, before, b"r%b" % actor.site.encode(), ())
            yield (
                f"sends {_name(entry)}",
                state,
                actor._replace(flights=(Flight(index, entry),), made=self.scope.appends),
            )

    # --- a PUT ---

    def _fly(self, state: State, actor: Actor, number: int, flight: Flight) -> Iterator[tuple[str, State, Actor]]:
        name = _name(flight.entry)
        found = state.slots[flight.slot]
        if flight.met:
            head = found.head if found is not None else None
            outcome = self.decide.after_put(flight.entry.head, Answer.EXISTS, head)
            what = f"finds {_name(found)}" if found is not None else "finds nothing"
            yield f"{what}: {outcome.name}", state, self._after(actor, number, outcome, found)
            return
        after = state
        if found is None:
            slots, first = _created(state, flight.slot, flight.entry)
            after = state._replace(slots=slots, first=first)
            outcome = self.decide.after_put(flight.entry.head, Answer.CREATED, None)
            yield f"has created {name}", after, self._after(actor, number, outcome, None)
        else:
            yield f"hears that {flight.slot} is taken", state, _with(actor, number, flight._replace(met=True))
        if flight.tries < self.scope.lost and found is None:
            met = flight._replace(met=True, tries=flight.tries + 1)
            yield f"hears that {flight.slot} is taken, which it is not", state, _with(actor, number, met)
        if flight.tries < self.scope.lost:
            for what, reached in {"was done": after, "was not done": state}.items():
                outcome = self.decide.after_put(flight.entry.head, Answer.NONE, None)
                new = self._after(actor, number, outcome, None, tries=flight.tries + 1)
                yield f"no answer to {name}, which {what}", reached, new
                if reached.lates < self.scope.late:
                    late = (*reached.late, flight._replace(tries=0))
                    yield (
                        f"no answer to {name}, which {what} and is still on its way",
                        reached._replace(late=late, lates=reached.lates + 1),
                        new,
                    )

    def _after(self, actor: Actor, number: int, outcome: Outcome, found: Entry | None, *, tries: int = 0) -> Actor:
        """Return a site after the outcome of one of its PUTs."""
        flight = actor.flights[number]
        if outcome is Outcome.AGAIN:
            entry = Entry.of(self.decide.again(flight.entry.head), flight.entry.changes)
            return _with(actor, number, Flight(flight.slot, entry, tries or flight.tries))
        rest = (*actor.flights[:number], *actor.flights[number + 1 :])
        if actor.phase == "read":
            step = self.decide.after_fence(outcome)
            if step is Step.LOOK:
                return actor._replace(phase="look", flights=(), written=(flight.entry,))
            # The site reads the entry at that index.
            return STOPPED if step is Step.STOP else actor._replace(flights=())
        if outcome is Outcome.FENCED:
            return STOPPED
        if outcome is Outcome.WRITTEN:
            return actor._replace(flights=rest, written=(*actor.written, flight.entry))
        assert found is not None
        passed = actor._replace(written=(*actor.written, found))
        entry, index = flight.entry, found.head.index + 1
        if index >= self.scope.slots:
            return STOPPED  # beyond the part of the log that is explored
        moved = self._entry(actor, entry.head.kind, index, found.head.checksum, entry.head.id, entry.changes)
        return _with(passed, number, Flight(index, moved))

    # --- entries ---

    def _entry(
        self, actor: Actor, kind: Kind, index: int, before: bytes, id_: bytes, changes: tuple[Change, ...]
    ) -> Entry:
        head = Head(
            index=index,
            kind=kind,
            epoch=actor.epoch,
            id=id_,
            site="",
            before=before,
            checksum=b"%b@%d" % (id_, index),
            first_position=changes[0].position if changes else 0,
            last_position=changes[-1].position if changes else 0,
        )
        return Entry.of(head, changes)

    def _applied(self, actor: Actor, entry: Entry) -> Replica:
        replica = actor.replica
        self.decide.moment.clock = actor.epoch
        for write in self.decide.apply(replica.progress, entry.head):
            replica = _stored(replica, write, entry)
        return replica


def _stored(replica: Replica, write: LocalWrite, entry: Entry) -> Replica:
    if not write.changes:
        return Replica.of(write.progress, replica.stored)
    shift = write.first_position - entry.head.first_position
    new = tuple((change.id, change.position + shift) for change in entry.changes)
    return Replica.of(write.progress, replica.stored + new)


def _created(state: State, slot: int, entry: Entry) -> tuple[tuple[Entry | None, ...], tuple[Entry | None, ...]]:
    slots = (*state.slots[:slot], entry, *state.slots[slot + 1 :])
    if state.first[slot] is not None:
        return slots, state.first
    return slots, (*state.first[:slot], entry, *state.first[slot + 1 :])


def _with(actor: Actor, number: int, flight: Flight) -> Actor:
    return actor._replace(flights=(*actor.flights[:number], flight, *actor.flights[number + 1 :]))


def _name(entry: Entry) -> str:
    return f"{entry.head.kind.name.lower()} {entry.head.id.decode()} at {entry.head.index}"
