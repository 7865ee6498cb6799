"""The import of one source into an open database; an interrupted import can be resumed at any row."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import attrs

from topicstore import Database, ImportSourceError, InvalidMessageError, LateMessageError, TimestampAheadError
from topicstore.cli.terminal.exits import INTERRUPTED, Failure
from topicstore.cli.terminal.interrupts import Interrupts
from topicstore.contract.batch import MessageBatch
from topicstore.contract.requests import StoreResult
from topicstore.pubsub.publish import store_retaining

from .progress import Progress
from .rows import BadRowError, Rows
from .source import Source

if TYPE_CHECKING:
    from topicstore.client.remote_database import RemoteDatabase
    from topicstore.client.remote_imports import RemoteStoreResult

__all__ = ["Imported", "Importer"]

_ADVICE = {
    LateMessageError: "; import files in order of time, each sorted by time, or into another database that is created"
    " with --timestamps commit or --late lift: those take them in any order, and --by timestamp finds what came late",
    TimestampAheadError: "; correct it, or import into a database that was created with a larger --max-skew",
}


@attrs.frozen(kw_only=True)
class Imported:
    """The result of importing one source.

    ``resumed`` is the number of the source's rows that earlier imports had finished; ``rows`` includes this import's.
    ``messages`` is the number of messages that the import stored, ``lifted`` the number of late ones among them.
    """

    name: str
    format: str
    outcome: Literal["imported", "already imported", "limit reached"]
    resumed: int
    rows: int
    messages: int
    retain_flags: int
    """The number of imported messages that have the retain flag."""
    lifted: int
    seconds: float


@attrs.define(kw_only=True)
class Importer:
    """An import with its settings; each call of `run` imports one source."""

    db: Database | RemoteDatabase
    batch_size: int
    again: bool = False
    skip: int = 0
    retain: bool = False
    """Whether messages with the retain flag also become the retained messages of their topics."""
    limit: int | None = None
    """The number of messages, over all sources, after which the import stops; None for no limit."""
    note: Callable[[str], None] = lambda _text: None
    """A function that is called with notes for the user, each a sentence."""
    observe: Callable[[Source, int], None] = lambda _source, _messages: None
    """A function that is called after each batch with the number of messages stored so far."""
    _stored: int = 0
    _lifted: int = 0
    _retain_flags: int = 0

    def run(self, source: Source) -> Imported:
        """Import a source, or the rest of it if a part was imported before.

        Raises `ImportSourceError`, which names the bad row, after all rows before it were stored.
        """
        started = time.perf_counter()
        before, self._lifted, self._retain_flags = self._stored, 0, 0
        progress = Progress(self.db, source, again=self.again, skip=self.skip, retain=self.retain)
        if progress.other:
            self.note(
                f"{source.name} does not begin with the rows that were imported under its --source name before: it is "
                "another, and read from its first row"
            )
        resumed = progress.start
        outcome: Literal["imported", "already imported", "limit reached"] = "already imported"
        if not progress.finished or source.named or self.again:
            try:
                outcome = self._guarded(source, progress)
            finally:
                self._note_rounded(source)
        return Imported(
            name=source.name,
            format=source.format,
            outcome=outcome,
            resumed=resumed,
            rows=progress.start,
            messages=self._stored - before,
            retain_flags=self._retain_flags,
            lifted=self._lifted,
            seconds=time.perf_counter() - started,
        )

    def _guarded(self, source: Source, progress: Progress) -> Literal["imported", "limit reached"]:
        with Interrupts() as interrupts:
            source.waiting = interrupts.let_through
            try:
                with interrupts.held() if source.live else contextlib.nullcontext():
                    return self._store_all(source, progress, interrupts)
            except BadRowError as bad:
                raise ImportSourceError(self._explain(source, bad)) from bad
            except KeyboardInterrupt:
                raise Failure(self._how_to_resume(source, progress), INTERRUPTED) from None

    def _store_all(
        self, source: Source, progress: Progress, interrupts: Interrupts
    ) -> Literal["imported", "limit reached"]:
        with contextlib.closing(source.read(progress.start, self.batch_size)) as batches:
            for rows in batches:
                missing = progress.missing(rows)
                room = len(missing) if self.limit is None else self.limit - self._stored
                self._store(source, missing.head(room), progress, interrupts)
                if room < len(missing):
                    return "limit reached"
        with interrupts.held():
            progress.finish()
        return "imported"

    def _store(self, source: Source, rows: Rows, progress: Progress, interrupts: Interrupts) -> None:
        """Store rows; if some are bad, store the rows before the first bad one, and raise its `BadRowError`."""
        bad: BadRowError | None = None
        while True:
            try:
                with interrupts.held():
                    result = self._stored_by(rows, progress)
                    progress.stored(rows)
                    self._stored += result.count
                    self._lifted += result.lifted
                    self._retain_flags += rows.retain_flags()
                break
            except InvalidMessageError as error:
                index = error.index if error.index is not None else _first_bad(rows)
                bad = BadRowError(rows.number(index), error.reason + _ADVICE.get(type(error), ""))
                bad.__cause__ = error
                rows = rows.head(index)
        self.observe(source, self._stored)
        if bad is not None:
            raise bad

    def _stored_by(self, rows: Rows, progress: Progress) -> StoreResult | RemoteStoreResult:
        if not self.retain:
            return self.db.store(rows.messages, state=progress.state(rows))
        # After a crash, the shard of a row's topic and the shard of its client id may have stored different rows.
        stored, retained = progress.lacking(rows, rows.client_ids()), progress.lacking(rows, rows.topics())
        if not isinstance(self.db, Database):
            return self.db.imports.store(rows.batch(), progress.state(rows), stored=stored, retained=retained)
        self.db.storage.check_may_write()
        return store_retaining(self.db.storage, rows.batch(), progress.state(rows), stored=stored, retained=retained)

    def _note_rounded(self, source: Source) -> None:
        if source.mapping.rounded:
            first = source.mapping.rounded.pop()
            self.note(
                f"times of {source.name} that are finer than microseconds, such as {first}, were rounded down; "
                "--time-unit says that it is meant"
            )

    @staticmethod
    def _explain(source: Source, bad: BadRowError) -> str:
        where = bad.described_in(source.name)
        if not bad.row:
            return where
        if source.resumes_corrected and source.id is not None:
            return f"{where}. The rows before it are stored; the import of the corrected file goes on there"
        return f"{where}. The rows before it are stored; import the corrected rows with --skip {bad.row}"

    @staticmethod
    def _how_to_resume(source: Source, progress: Progress) -> str:
        where = f"interrupted; {progress.start:,} rows of {source.name} are stored"
        if source.id is None:
            return f"{where}; a stream goes on by itself if it has a --source name, else with --skip {progress.start}"
        return f"{where}; the same command goes on from there"


def _first_bad(rows: Rows) -> int:
    """Return the index of the first invalid message, for an error about a whole column."""
    if not isinstance(rows.messages, list):
        for index in range(len(rows)):
            try:
                MessageBatch.from_arrow(rows.messages.slice(index, 1))
            except InvalidMessageError:
                return index
    return 0
