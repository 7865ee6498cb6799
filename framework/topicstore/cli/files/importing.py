"""The import of one source into an open database, resumable at every row."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Literal

import attrs

from topicstore import Database, ImportSourceError, InvalidMessageError, LateMessageError, TimestampAheadError
from topicstore.cli.terminal.exits import INTERRUPTED, Failure
from topicstore.cli.terminal.interrupts import Interrupts
from topicstore.contract.batch import MessageBatch
from topicstore.times import format_time, suspected_unit

from .progress import Progress
from .rows import BadRowError, Rows
from .source import Source

__all__ = ["Imported", "Transfer"]

_ADVICE = {
    LateMessageError: "; import files in order of time, each sorted by time. A database created with --late lift"
    " takes them in any order, but finds what came late by topic only: its place in time is where it came",
    TimestampAheadError: "; correct it, or import into a database that was created with a larger --max-skew",
}


@attrs.frozen(kw_only=True)
class Imported:
    """What came of one source. ``resumed`` and ``rows`` count rows of the source, ``messages`` what was stored now."""

    name: str
    format: str
    outcome: Literal["imported", "already imported", "limit reached"]
    resumed: int
    rows: int
    messages: int
    lifted: int
    seconds: float


@attrs.define(kw_only=True)
class Transfer:
    """How sources are imported; `run` imports one."""

    db: Database
    batch_size: int
    again: bool = False
    skip: int = 0
    limit: int | None = None
    """Messages to store before stopping, over all sources."""
    acknowledge: tuple[int, int] | None = None
    """File descriptors: the first is told, a number a line, how many rows of the source are safe; each number is
    answered by a byte on the second before the import goes on, so whoever is told can end it in the middle."""
    note: Callable[[str], None] = lambda _text: None
    """Told, as a sentence, what a person should look at."""
    observe: Callable[[Source, int], None] = lambda _source, _messages: None
    """Told the messages stored so far, after each batch."""
    _stored: int = 0
    _lifted: int = 0

    def run(self, source: Source) -> Imported:
        """Import a source, or what is left of it.

        Raises `ImportSourceError` naming the row that is bad, with all rows before it stored.
        """
        started = time.perf_counter()
        before, self._lifted = self._stored, 0
        progress = Progress(self.db, source, again=self.again, skip=self.skip)
        resumed = progress.start
        outcome: Literal["imported", "already imported", "limit reached"] = "already imported"
        if not progress.finished or source.named or self.again:
            outcome = self._guarded(source, progress)
        return Imported(
            name=source.name,
            format=source.format,
            outcome=outcome,
            resumed=resumed,
            rows=progress.start,
            messages=self._stored - before,
            lifted=self._lifted,
            seconds=time.perf_counter() - started,
        )

    def _guarded(self, source: Source, progress: Progress) -> Literal["imported", "limit reached"]:
        with Interrupts() as interrupts:
            try:
                return self._store_all(source, progress, interrupts)
            except BadRowError as bad:
                raise ImportSourceError(self._explain(source, bad)) from bad
            except KeyboardInterrupt:
                raise Failure(self._how_to_resume(source, progress), INTERRUPTED) from None

    def _store_all(
        self, source: Source, progress: Progress, interrupts: Interrupts
    ) -> Literal["imported", "limit reached"]:
        with contextlib.closing(source.read(progress.start, self.batch_size)) as batches:
            looked = False
            for rows in batches:
                if rows and not looked:
                    self._look_at_times(rows)
                    looked = True
                missing = progress.missing(rows)
                room = len(missing) if self.limit is None else self.limit - self._stored
                self._store(source, missing.head(room), progress, interrupts)
                if room < len(missing):
                    return "limit reached"
        with interrupts.held():
            progress.finish()
        return "imported"

    def _store(self, source: Source, rows: Rows, progress: Progress, interrupts: Interrupts) -> None:
        """Store rows; if some are bad, those before the first of them."""
        bad: BadRowError | None = None
        while True:
            try:
                with interrupts.held():
                    result = self.db.store(rows.messages, state=progress.state(rows))
                    progress.stored(rows)
                    self._stored += result.count
                    self._lifted += result.lifted
                break
            except InvalidMessageError as error:
                index = error.index if error.index is not None else _first_bad(rows)
                bad = BadRowError(rows.number(index), error.reason + _ADVICE.get(type(error), ""))
                bad.__cause__ = error
                rows = rows.head(index)
        if self.acknowledge is not None:
            report_to, answers = self.acknowledge
            os.write(report_to, b"%d\n" % progress.start)
            os.read(answers, 1)
        self.observe(source, self._stored)
        if bad is not None:
            raise bad

    def _look_at_times(self, rows: Rows) -> None:
        """Say so if the first time is hardly in microseconds."""
        first = rows.first_time()
        unit = None if first is None else suspected_unit(first)
        if first is not None and unit is not None:
            where = f"row {rows.number(0) + 1:,} lies in {format_time(first)[:4]}"
            self.note(f"{where}; are its times {unit}? They are taken as microseconds")

    @staticmethod
    def _explain(source: Source, bad: BadRowError) -> str:
        where = bad.told_of(source.name)
        if not bad.row:
            return where
        if source.corrected_goes_on and source.id is not None:
            return f"{where}. The rows before it are stored; the import of the corrected file goes on there"
        return f"{where}. The rows before it are stored; import the corrected rows with --skip {bad.row}"

    @staticmethod
    def _how_to_resume(source: Source, progress: Progress) -> str:
        where = f"interrupted; {progress.start:,} rows of {source.name} are stored"
        if source.id is None:
            return f"{where}; a stream goes on by itself if it has a --source name, else with --skip {progress.start}"
        return f"{where}; the same command goes on from there"


def _first_bad(rows: Rows) -> int:
    """Find the message for which a whole column was refused."""
    if not isinstance(rows.messages, list):
        for index in range(len(rows)):
            try:
                MessageBatch.from_arrow(rows.messages.slice(index, 1))
            except InvalidMessageError:
                return index
    return 0
