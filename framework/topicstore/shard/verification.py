"""Reading everything that a shard holds, and telling what is damaged."""

from __future__ import annotations

from collections.abc import Iterator

from topicstore.contract.errors import CorruptionError, NewerFormatError
from topicstore.contract.layout import Damage, Slab

from .commit_log import CommitLog
from .generations import Generations
from .records import GenerationRecord

__all__ = ["verify"]


def verify(log: CommitLog, generations: Generations) -> Iterator[Damage | int]:
    """Read everything; yield each damage, and numbers of good messages."""
    for sentence in log.engine.verify():
        yield Damage(place=f"shard {log.number}", reason=sentence)
    slabs = {record.number: slab for record, slab in generations.with_slabs()}
    for record in generations.listed():
        if record.number in slabs:
            yield from _verify_slab(log, generations, record, slabs[record.number])


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
