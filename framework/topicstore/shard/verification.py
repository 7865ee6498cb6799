"""Reading everything that a shard holds, and telling what is damaged."""

from __future__ import annotations

from collections.abc import Iterator

from topicstore.contract.checksums import strip_checksum
from topicstore.contract.engine import STATE
from topicstore.contract.errors import CorruptionError, NewerFormatError
from topicstore.contract.layout import Damage, Slab

from .commit_log import CommitLog
from .generations import Generations
from .records import GenerationRecord
from .state import OWN, RESERVED

__all__ = ["verify"]


def verify(log: CommitLog, generations: Generations) -> Iterator[Damage | int]:
    """Read everything; yield each damage, and numbers of good messages."""
    for sentence in log.engine.verify():
        yield Damage(place=f"shard {log.number}", reason=sentence)
    slabs = {record.number: slab for record, slab in generations.with_slabs()}
    for record in generations.listed():
        if record.number in slabs:
            yield from _verify_slab(log, generations, record, slabs[record.number])
    yield from _verify_state(log)


def _verify_state(log: CommitLog) -> Iterator[Damage]:
    """Read the whole state; what the framework keeps there has checksums of its own."""
    place = f"shard {log.number}, state"
    try:
        for chunk in log.engine.scan(STATE):
            for key, value in chunk:
                if key.startswith((RESERVED, OWN)):
                    try:
                        strip_checksum(key, value)
                    except CorruptionError as bad:
                        yield Damage(place=f"{place} {key!r}", reason=bad.reason)
    except CorruptionError as bad:  # nothing behind it can be read
        yield Damage(place=place, reason=str(bad))


def _verify_slab(
    log: CommitLog, generations: Generations, record: GenerationRecord, slab: Slab
) -> Iterator[Damage | int]:
    damages: list[Damage] = []
    place = f"shard {log.number}, generation {record.number}"
    counted, bound = 0, log.watermark
    whole = bound == log.tail.last_position  # else the record counts messages not yet to be seen
    try:
        for found in slab.verify(bound):
            if isinstance(found, Damage):
                damages.append(found)
            else:
                counted += found
                yield found
    except (CorruptionError, NewerFormatError) as bad:  # nothing of the slab can be read after it
        damages.append(Damage(place=place, reason=str(bad)))
    if generations.slabs.get(record.number) is not slab:
        return  # dropped or archived meanwhile: what was missing had been removed
    yield from damages
    unchanged = whole and record in generations.listed()  # else the count was of something else
    if unchanged and not damages and counted != record.messages:
        yield Damage(place=place, reason=f"holds {counted:,} messages where its record says {record.messages:,}")
