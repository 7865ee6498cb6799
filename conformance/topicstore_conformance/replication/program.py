"""Sites as functions: from the answers that the log store has given to a site, to the site's next call.

A site runs the program itself (`ShardLog`, `LogReader`, bases and truncation) over a store that stops at every call.
The program is deterministic, so a site's state is the list of the answers that it has received. To find the call that
follows them, the site runs from its beginning with these answers, and is abandoned at the first call that has none.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import attrs
import msgspec
from topicstore.contract.errors import CorruptionError, InvalidArgumentError, ShardMovedError
from topicstore.contract.log_store import LogStore, ObjectExistsError, ObjectNotFoundError, StorageUnavailableError
from topicstore.replication.bases import cut_log, read_part, write_base
from topicstore.replication.heads import BEGINNING
from topicstore.replication.log import Proposal, ShardLog
from topicstore.replication.objects import Base, Entry
from topicstore.replication.reading import LocalWrite
from topicstore.replication.taking_over import Step

__all__ = ["SHARD", "Call", "Copy", "Moment", "Refusal", "Site", "Verb", "follow", "own"]

SHARD = 0
"""The shard that all sites share."""


class Verb(enum.Enum):
    """A method of `LogStore`."""

    CREATE = enum.auto()
    GET = enum.auto()
    NAMES = enum.auto()
    DELETE = enum.auto()


class Refusal(enum.Enum):
    """An answer that a site receives as an error."""

    EXISTS = enum.auto()
    NOT_FOUND = enum.auto()
    SILENCE = enum.auto()


class Call(NamedTuple):
    """A call of the store that waits for its answer."""

    verb: Verb
    name: str
    data: bytes = b""
    """The contents of the object to create."""
    after: str = ""
    """The name after which names are listed."""

    def __str__(self) -> str:
        verb = "LIST" if self.verb is Verb.NAMES else self.verb.name
        return f"{verb} {self.name}" + (f" after {self.after}" if self.after else "")


Answer = bytes | tuple[str, ...] | Refusal | None
"""An object's contents, names, an error, or nothing."""


class _Abandoned(BaseException):
    """Ends a run of a site at a call without an answer; not an `Exception`, so that the program doesn't handle it."""


@attrs.frozen
class Moment:
    """A site at a call of the store."""

    call: Call | None
    """The call; None after the site's last one."""
    next: int
    """The index of the entry that the site reads next."""
    changes: tuple[bytes, ...]
    """The changes that are applied at the site."""
    acknowledged: frozenset[bytes]
    fault: str = ""
    """A description of an invariant that the site violated by itself, or an empty text."""


class Copy:
    """The shard's contents at a site: a list of changes."""

    def __init__(self, store: LogStore) -> None:
        self._store = store
        self.progress = BEGINNING
        self.changes: list[bytes] = []

    def write(self, entry: Entry, write: LocalWrite) -> None:
        """Apply an entry."""
        if write.changes:
            self.changes.extend(entry.changes)
        self.progress = write.progress

    def take_base(self, base: Base) -> None:
        """Replace the contents with those of a base: a snapshot, which has a single part in this model."""
        (part,) = base.parts
        self.changes = msgspec.msgpack.decode(read_part(self._store, part), type=list[bytes])
        self.progress = base.progress


class _ObservedCopy(Copy):
    """A copy that looks for acknowledged changes that aren't applied, before each change of its contents."""

    def __init__(self, store: LogStore, observe: Callable[[], object]) -> None:
        super().__init__(store)
        self._observe = observe

    def write(self, entry: Entry, write: LocalWrite) -> None:
        self._observe()
        super().write(entry, write)


class Site(LogStore):
    """A site with one shard, and its log store, which replays the recorded answers and stops at the next call."""

    def __init__(self, name: str, answers: tuple[Answer, ...]) -> None:
        self.name = name
        self.copy = _ObservedCopy(self, self._observe)
        numbers = itertools.count()
        self._identity: Callable[[int], str] = lambda _: f"{name}{next(numbers)}"

        def identity(size: int) -> bytes:
            return self._identity(size).encode()

        self.log = ShardLog(self, SHARD, self.copy, name, lambda _: None, identity=identity, threads=False)
        self._stopped_at: Moment | None = None
        self._answers = iter(answers)
        self._proposals: list[Proposal] = []
        self._later: list[bytes] = []
        self._fault = ""

    def run(self, work: Callable[[Site], object]) -> Moment:
        """Do the work up to the first call without an answer; return the site at this call."""
        try:
            work(self)
        except _Abandoned:
            pass
        except CorruptionError as error:
            self._fault = self._fault or f"site {self.name} takes a sound log for damaged: {error}"
        return self._stopped_at or self._moment(None)

    # --- what a site does ---

    def store(self, *changes: bytes) -> None:
        """Propose changes, each while the PUT of the previous one is in flight, and apply them."""
        self._later = list(changes)
        self._propose()
        self.log.write_queued()

    def truncate(self) -> None:
        """Write a base of the applied changes, and truncate the log up to it."""
        at = self.copy.progress
        parts = [msgspec.msgpack.encode(self.copy.changes)]
        write_base(self, SHARD, self.name, at, at.next, parts, identity=self._identity)
        cut_log(self, SHARD, self.name, at.next)

    def _propose(self) -> None:
        if self._later and self.log.owned:
            self._proposals.append(self.log.propose(self._later.pop(0)))

    # --- the store ---

    @classmethod
    def open(cls, url: str, options: Mapping[str, Any]) -> LogStore:
        """Raise `InvalidArgumentError`: this store is made by a site, and not opened by a URL."""
        raise InvalidArgumentError(f"a site of the checker has no URL, and so not {url!r} with {dict(options)}")

    @property
    def place(self) -> str:
        """The URL that errors name."""
        return "memory:///"

    def create(self, name: str, data: bytes) -> None:
        """Record the creation of an object; raise the error that is the known answer to this call."""
        if self._proposals:
            self._propose()
        answer = self._ask(Call(Verb.CREATE, name, data))
        if answer is Refusal.EXISTS:
            raise ObjectExistsError(name, self.place)
        if answer is Refusal.SILENCE:
            raise StorageUnavailableError("no answer")

    def get(self, name: str) -> bytes:
        """Return an object's contents from the known answers, or raise `ObjectNotFoundError` if the answer says so."""
        answer = self._ask(Call(Verb.GET, name))
        if answer is Refusal.NOT_FOUND:
            raise ObjectNotFoundError(name, self.place)
        assert isinstance(answer, bytes)
        return answer

    def names(self, prefix: str, after: str = "") -> Iterator[list[str]]:
        """Yield names, each page by a call of its own."""
        while True:
            page = self._ask(Call(Verb.NAMES, prefix, after=after))
            assert isinstance(page, tuple)
            if not page:
                return
            yield list(page)
            after = page[-1]

    def delete(self, name: str) -> None:
        """Delete an object."""
        self._ask(Call(Verb.DELETE, name))

    def _ask(self, call: Call) -> Answer:
        self._observe()
        for answer in self._answers:
            return answer
        if self._stopped_at is None:
            self._stopped_at = self._moment(call)
        raise _Abandoned

    # --- what is observed ---

    def _acknowledged(self) -> Iterator[bytes]:
        for proposal in self._proposals:
            try:
                proposal.wait(0)
            except (StorageUnavailableError, ShardMovedError, _Abandoned):
                continue
            except CorruptionError as error:
                self._fault = self._fault or f"site {self.name} takes a sound log for damaged: {error}"
                continue
            yield proposal.change

    def _observe(self) -> None:
        for change in self._acknowledged():
            if change not in self.copy.changes and not self._fault:
                self._fault = f"{change.decode()} was acknowledged at site {self.name}, where it is not applied"

    def _moment(self, call: Call | None) -> Moment:
        copy = self.copy
        acknowledged = frozenset(self._acknowledged())
        return Moment(call, copy.progress.next, tuple(copy.changes), acknowledged, self._fault)


def own(epoch: int, *changes: bytes, truncates: bool = False) -> Callable[[Site], object]:
    """Return the work of a site that takes over, stores changes, and may then truncate the log."""

    def work(site: Site) -> None:
        if site.log.take_over(epoch):
            site.store(*changes)
            if truncates:
                site.truncate()

    return work


def follow(site: Site) -> None:
    """Read the log to its end."""
    while site.log.reader.read() is Step.READ:
        pass
