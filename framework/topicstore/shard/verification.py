"""Reading everything that a shard holds, and reporting what is damaged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from topicstore.contract.checksums import strip_checksum
from topicstore.contract.engine import STATE
from topicstore.contract.errors import CorruptionError, InvalidArgumentError, NewerFormatError
from topicstore.contract.layout import Damage, Slab

from .commit_log import CommitLog
from .generations import Generations
from .records import GenerationRecord
from .state import OWN, RESERVED

__all__ = ["Decoders", "verify"]

Decoders = Mapping[bytes, Callable[[bytes, bytes], object]]
"""Functions that decode a key of the state and its value, or raise, by the prefix of the keys. No key has two of the
prefixes."""


def verify(log: CommitLog, generations: Generations, decoders: Decoders) -> Iterator[Damage | int]:
    """Read everything; yield each damaged place, and the numbers of good messages."""
    for sentence in log.engine.verify():
        yield Damage(place=f"shard {log.number}", reason=sentence)
    slabs = {record.number: slab for record, slab in generations.with_slabs()}
    for record in generations.listed():
        if record.number in slabs:
            yield from _verify_slab(log, generations, record, slabs[record.number])
    yield from _verify_state(log, decoders)


def _verify_state(log: CommitLog, decoders: Decoders) -> Iterator[Damage]:
    """Read the whole state, and decode the framework's values in it. The shard has read its own records already."""
    place = f"shard {log.number}, state"
    decoders = {RESERVED: strip_checksum, **decoders, OWN: strip_checksum}
    try:
        for chunk in log.engine.scan(STATE):
            for key, value in chunk:
                decode = next((decode for prefix, decode in decoders.items() if key.startswith(prefix)), None)
                if decode is not None:
                    try:
                        decode(key, value)
                    except (CorruptionError, NewerFormatError) as bad:
                        yield Damage(place=f"{place} {key!r}", reason=bad.reason)
                    except InvalidArgumentError as bad:  # its content is impossible
                        yield Damage(place=f"{place} {key!r}", reason=str(bad))
    except CorruptionError as bad:  # nothing after it can be read
        yield Damage(place=place, reason=str(bad))


def _verify_slab(
    log: CommitLog, generations: Generations, record: GenerationRecord, slab: Slab
) -> Iterator[Damage | int]:
    damages: list[Damage] = []
    place = f"shard {log.number}, generation {record.number}"
    counted, bound = 0, log.watermark
    whole = bound == log.tail.last_position  # otherwise the record counts messages that aren't visible yet
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
        return  # dropped or archived meanwhile: missing messages had been removed
    yield from damages
    unchanged = whole and record in generations.listed()  # otherwise the counts aren't comparable
    if unchanged and not damages and counted != record.messages:
        yield Damage(place=place, reason=f"holds {counted:,} messages where its record says {record.messages:,}")
