"""The cluster's documents in the log store: reading the current document, and creating the next.

Documents are numbered from 1; the document with the highest number is the current one. A site's copy may be outdated
at any moment, which costs time only (`topicstore.replication.transitions`).
"""

from __future__ import annotations

from collections.abc import Callable

from topicstore.contract.log_store import LogStore, ObjectExistsError, ObjectNotFoundError, StorageUnavailableError

from . import names
from .objects import CLUSTER_DOCUMENTS, ClusterDocument
from .owning import Answer
from .transitions import Named, after_create

__all__ = ["Documents"]


class Documents:
    """The cluster documents of one log store. Thread-safe.

    ``pause`` is called with the number of tries before a creation without an answer is repeated. It waits, or raises
    an error to give up; the document may then have been created or not.
    """

    def __init__(self, store: LogStore, pause: Callable[[int], object]) -> None:
        self._store = store
        self._pause = pause

    def newest(self) -> tuple[int, ClusterDocument | None]:
        """Return the number of the current document, and the document; 0 and None if there is none.

        Raises `CorruptionError`, `NewerFormatError` and `StorageUnavailableError`.
        """
        while True:
            number = self._highest()
            if not number:
                return 0, None
            try:
                return number, self._get(number)
            except ObjectNotFoundError:  # the document was deleted meanwhile, because a higher one exists
                continue

    def newer(self, known: int) -> tuple[int, ClusterDocument] | None:
        """Return the current document with its number if that is above ``known``. Raises the errors of `newest`."""
        if self._highest() <= known:
            return None
        number, document = self.newest()
        return None if document is None else (number, document)

    def change(
        self, make: Callable[[int, ClusterDocument | None], ClusterDocument | None]
    ) -> tuple[int, ClusterDocument | None]:
        """Create the next document; return the number of the current document, and the document.

        ``make`` receives the next number and the current document. It returns the next document, with a new random id,
        or None to change nothing. It is called again whenever another site has created that document first. Raises the
        errors of `newest`.
        """
        while True:
            number, document = self.newest()
            following = make(number + 1, document)
            if following is None:
                return number, document
            if self._create(number + 1, following) is Named.COUNTS:
                return number + 1, following

    def forget(self, keep: int) -> None:
        """Delete all documents except the ``keep`` (at least one) with the highest numbers."""
        found = self._numbers()
        for number in found[: -max(1, keep)]:
            self._store.delete(names.cluster_document(number))

    def _create(self, number: int, document: ClusterDocument) -> Named:
        data = CLUSTER_DOCUMENTS.encode(names.cluster_document(number), document)
        tries = 0
        while True:
            answer, found = self._send(number, data)
            highest = None if answer is Answer.NONE else self._highest()
            came = after_create(number, document.id, answer, found, highest)
            if came is not Named.AGAIN:
                return came
            tries += 1
            self._pause(tries)

    def _send(self, number: int, data: bytes) -> tuple[Answer, bytes | None]:
        try:
            self._store.create(names.cluster_document(number), data)
        except ObjectExistsError:
            try:
                return Answer.EXISTS, self._get(number).id
            except ObjectNotFoundError:
                return Answer.EXISTS, None
        except StorageUnavailableError:
            return Answer.NONE, None
        return Answer.CREATED, None

    def _get(self, number: int) -> ClusterDocument:
        name = names.cluster_document(number)
        return CLUSTER_DOCUMENTS.decode(name, self._store.get(name), self._store.place)

    def _highest(self) -> int:
        return max(self._numbers(), default=0)

    def _numbers(self) -> list[int]:
        return [names.number_of(name) for chunk in self._store.names(names.CLUSTER) for name in chunk]
