"""Tests of power failures, and of damage to an engine's files."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import msgspec
import pytest
import topicstore as ts
from topicstore import Message
from topicstore.contract.errors import EngineError
from topicstore.plugins import load_target, registry

from topicstore_conformance.conditions.capabilities import requires
from topicstore_conformance.conditions.directories import quick_directory
from topicstore_conformance.conditions.tries import MODE, tries
from topicstore_conformance.database.fixtures import Fixtures
from topicstore_conformance.faults.crash import MARKER, messages_of
from topicstore_conformance.faults.power import Recording, record, why_no_tracing
from topicstore_conformance.subjects.pairs import Pair

__all__ = ["PowerLoss"]

BATCHES = 80
CHILD = f"""
import json, os, sys
import topicstore as ts
from topicstore_conformance.database.power import batch_of
path, durability, ending, arguments = sys.argv[1:]
db = ts.open(path, durability=durability, auto_compact=False, **json.loads(arguments))
for number in range({BATCHES}):
    db.store(batch_of(number), state={{0: [ts.StateWrite({MARKER!r}, b"%d" % number)]}})
    db.state(0).write([ts.StateWrite(b"step", b"%d" % number)])
    if durability == "sync":
        os.write(1, b"synced %d\\n" % number)
    elif number % 37 == 36:
        db.storage.flush()
        os.write(1, b"synced %d\\n" % number)
if ending == "killed":
    os._exit(0)
db.close()
os.write(1, b"synced {BATCHES - 1}\\n")
"""


def batch_of(number: int) -> list[Message]:
    """Return the messages of a batch, which are large enough that 80 batches fill several write-ahead logs."""
    return [*messages_of(number), Message("fill", random.Random(number).randbytes(3_000), "filler")]


def small_buffers(backend: str) -> dict[str, Any]:
    """Return the options that make an engine begin a new log after a few batches, if it has such options."""
    known = {field.name for field in attrs.fields(load_target(registry().backend(backend)).Options)}
    return {name: 64 << 10 for name in ("write_buffer_bytes", "log_bytes") if name in known}


def arguments_of(pair: Pair) -> dict[str, Any]:
    """Return the arguments with which the child opens its database."""
    options = {pair.layout: pair.small(), pair.backend: small_buffers(pair.backend)}
    return {"backend": pair.backend, "layout": pair.layout, "options": options}


def command_of(pair: Pair, path: Path, durability: str, ending: str) -> list[str]:
    """Return the command of a child that stores batches, and then closes the database or exits without closing."""
    arguments = msgspec.json.encode(arguments_of(pair)).decode()
    return [sys.executable, "-c", CHILD, str(path), durability, ending, arguments]


def check_whole(db: ts.Database, least: int) -> int:
    """Check that a database holds a prefix of the batches, each whole and with its state; return their number.

    ``least``: the least number of batches.
    """
    marker, step = db.state(0).get(MARKER), db.state(0).get(b"step")
    batches = 0 if marker is None else int(marker) + 1
    assert batches >= least
    assert (0 if step is None else int(step) + 1) in (batches, max(batches - 1, least))
    expected = Counter((message.topic, message.payload) for number in range(batches) for message in batch_of(number))
    got = Counter((message.topic, message.payload) for message in db.replay("#"))
    assert not expected - got, f"of {batches} batches {(expected - got).total()} messages are missing"
    assert not got - expected
    report = db.verify()
    assert (got.total(), []) == (report.messages, report.damages)
    return batches


def recorded(pair: Pair, durability: str, directory: Path) -> Recording:
    """Return a recording of the changes that a child made to files while it created and filled a database ``db``."""
    reason = why_no_tracing()
    if reason is not None:
        pytest.skip(reason)
    place = directory / "recorded"
    place.mkdir()
    return record(command_of(pair, place / "db", durability, "closed"), place, directory)


def opened(path: Path, **how: Any) -> ts.Database:
    """Open a database, and ignore the warning that readable data had to be truncated."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "shard .* was cut", RuntimeWarning)
        return ts.open(path, **how)


def seen_by_a_reader(path: Path, least: int) -> int | None:
    """Return the number of batches that a read-only opening sees, or None if the database was not created yet."""
    try:
        db = ts.open(path, mode="r")
    except ts.DatabaseNotFoundError:
        assert not least
        return None
    with db:
        return check_whole(db, least)


def told(path: Path) -> bool:
    """Return whether the database holds all batches, or reports by an error or by `verify` that data is missing.

    The database is opened twice: first read-only, then to write.
    """
    for mode in ("r", "r+"):
        try:
            with opened(path, mode=mode) as db:
                if not db.verify().damages:
                    check_whole(db, BATCHES)
        except EngineError:
            continue
        except AssertionError:
            return False
    return True


def damaged(original: Path, draw: random.Random) -> Iterator[bytes | None]:
    """Yield damaged contents of a file: truncated, zeroed from an offset on, with a flipped bit; None for no file."""
    content = original.read_bytes()
    yield None
    if not content:
        return
    for number, at in enumerate((0, len(content) // 2, draw.randrange(len(content)))):
        if MODE != "quick" or number != 1:
            yield content[:at]
        if MODE != "quick" or number == 1:
            yield content[:at] + bytes(len(content) - at)
    for _ in range(tries(1, 40)):
        at = draw.randrange(len(content))
        yield content[:at] + bytes([content[at] ^ 1 << draw.randrange(8)]) + content[at + 1 :]


class PowerLoss(Fixtures):
    """Tests that fsynced data is never lost without an error, and that recovery leaves no gaps."""

    @requires("persistent")
    @pytest.mark.parametrize("durability", ["commit", "sync"])
    def test_power_failure(self, pair: Pair, durability: str) -> None:
        """After a power failure a database opens with all fsynced batches and a prefix of the later ones."""
        with quick_directory() as scratch:
            recording = recorded(pair, durability, Path(scratch))
            moments, worst = recording.moments()
            chances = (moments, worst, moments[-3:], worst)  # the last three failures are after the close
            for number in range(tries(8, 100, pair.capabilities)):
                # Pairs with the same backend fail after different system calls.
                draw = random.Random(f"{pair} {number}")
                upto = draw.choice(chances[number % len(chances)])
                image = Path(scratch, f"image-{number}")
                recording.image(upto, draw, image)
                synced = max((int(word.split()[1]) + 1 for word in recording.words(upto)), default=0)
                seen = seen_by_a_reader(image / "db", synced)
                how = {**arguments_of(pair), "durability": durability, "auto_compact": False}
                with opened(image / "db", **how) as db:
                    batches = check_whole(db, synced)
                    assert seen in (None, batches)
                    db.store([Message("again", b"", "filler")])
                with ts.open(image / "db") as db:
                    assert 1 == len(list(db.replay("again")))
                    assert batches == sum(1 for _ in db.replay("fill"))
                shutil.rmtree(image)

    @requires("persistent", "checksums")
    @pytest.mark.parametrize("ending", ["closed", "killed"])
    def test_synced_writes_do_not_vanish(self, pair: Pair, ending: str) -> None:
        """If a file of the engine is removed, truncated, zeroed or has a flipped bit, lost fsynced data is reported."""
        draw = random.Random(ending)
        with quick_directory() as scratch:
            place = Path(scratch, "db")
            subprocess.run(command_of(pair, place, "sync", ending), check=True, stdout=subprocess.DEVNULL)
            silent = []
            for original in sorted(path for path in place.glob("shard-*/*") if path.suffix not in (".ldb", ".sst")):
                for number, content in enumerate(damaged(original, draw)):
                    copy = Path(scratch, "copy")
                    shutil.copytree(place, copy)
                    file = copy / original.relative_to(place)
                    file.unlink() if content is None else file.write_bytes(content)
                    if not told(copy):
                        silent.append(f"{original.name}, {number}")
                    shutil.rmtree(copy)
            assert not silent
