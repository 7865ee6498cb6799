"""Faults in the replication protocol's decision functions, and the bounds within which the model checker finds each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import attrs
import msgspec
from topicstore.replication import owning, reading, taking_over
from topicstore.replication.heads import Head, Progress
from topicstore.replication.owning import Answer, Outcome, Stage
from topicstore.replication.reading import LocalWrite, Source
from topicstore.replication.taking_over import Step

from .decisions import Decisions, Moment
from .world import Scope

__all__ = ["FAULTS", "Fault"]


@attrs.frozen
class Fault:
    """A violated rule of replication: its description, the faulty decisions, and the scope that reveals them."""

    what: str
    broken: Callable[[Moment], Mapping[str, Callable[..., Any]]]
    scope: Scope = attrs.field(factory=Scope)

    def decisions(self) -> Decisions:
        """Return the decision functions of the replication protocol, some of which the fault replaces."""
        moment = Moment()
        return Decisions(moment=moment, **self.broken(moment))


def _fresh_id(own: Head) -> Head:
    return msgspec.structs.replace(own, id=own.id + b"'", checksum=own.checksum + b"'")


def _trusts_base(moment: Moment, epoch: int, progress: Progress) -> Step:
    return Step.READ if progress.next == moment.base else taking_over.after_reading(epoch, progress)


def _two_writes(progress: Progress, head: Head) -> list[LocalWrite]:
    (write,) = reading.apply(progress, head)
    return [LocalWrite(write.changes, write.first_position, progress), LocalWrite(False, 0, write.progress)]


def _by_the_clock(moment: Moment, progress: Progress, head: Head) -> list[LocalWrite]:
    (write,) = reading.apply(progress, head)
    return [msgspec.structs.replace(write, first_position=write.first_position + moment.clock)]


def _believes_taken(own: Head, answer: Answer, found: Head | None) -> Outcome:
    if answer is Answer.EXISTS and found is None:
        return Outcome.WRITTEN
    return owning.after_put(own, answer, found)


def _gives_way(own: Head, answer: Answer, found: Head | None) -> Outcome:
    if answer is Answer.EXISTS and found is not None and found.id != own.id:
        return Outcome.PASSED
    return owning.after_put(own, answer, found)


_TWICE = Scope(appends=2, lost=0)

FAULTS = {
    fault.what: fault
    for fault in (
        # The numbers are those of the rules in the docstring of `topicstore.replication`.
        Fault("1: fences are deleted", lambda _: {"may_delete": lambda index, cut, _: index < cut}),
        Fault(
            "2: the epoch of a base is not looked at", lambda moment: {"after_reading": partial(_trusts_base, moment)}
        ),
        Fault("3: nobody looks for cuts after fencing", lambda _: {"after_look": lambda *_: Step.OWN}),
        Fault("4: what was read below a cut counts", lambda _: {"where_to_read": lambda *_: Source.LOG}),
        Fault(
            "4: cuts are looked for before reading",
            lambda moment: {"where_to_read": lambda progress, _: reading.where_to_read(progress, moment.cut_before)},
            Scope(looks_first=True),
        ),
        Fault("5: what is sent again has another id", lambda _: {"again": _fresh_id}),
        Fault("there are no fences", lambda _: {"at_end": lambda: Step.OWN}),
        Fault("acknowledged when sent", lambda _: {"may_acknowledge": lambda stage: stage >= Stage.SENT}),
        Fault("the index is written after the changes", lambda _: {"apply": _two_writes}),
        Fault(
            "two PUTs are in flight",
            lambda _: {"may_put": lambda in_flight, queued: in_flight < 2 and queued > 0},
            _TWICE,
        ),
        Fault(
            "positions go on from a stale tail",
            lambda moment: {"tail": lambda _, pending: pending[-1] if pending else moment.first_tail},
        ),
        Fault(
            "the clock is asked when an entry is applied",
            lambda moment: {"apply": partial(_by_the_clock, moment)},
        ),
        Fault(
            "conditions are compared with what is applied only",
            lambda _: {"seen": lambda key, _, applied: applied(key)},
            _TWICE,
        ),
        Fault(
            "a base is named after the end of the log",
            lambda _: {"base_progress": lambda applied, end: msgspec.structs.replace(applied, next=end)},
        ),
        Fault(
            "entries are deleted before the cut is there",
            lambda moment: {"may_delete": lambda index, _, fences: index < moment.base and index not in fences},
        ),
        Fault(
            "an index that is said to be taken is believed to be one's own", lambda _: {"after_put": _believes_taken}
        ),
        Fault("a fence is passed by", lambda _: {"after_put": _gives_way}),
    )
}
