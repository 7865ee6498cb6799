"""The contract of log stores: object stores that hold the replicated log of a database shared by several sites.

Sites agree on the log through one atomic operation, the creation of an object only if its name is free: the site
that creates the object of the next entry has appended that entry. Every log store must guarantee:

* `LogStore.create` of one name succeeds for exactly one caller among all threads, processes and machines. The object
  is then complete and durable until it is deleted. Objects are immutable.
* `LogStore.get` and `LogStore.names` are strongly consistent: they see each object that was created before the call,
  and none that was deleted before the call. A cache, or a replica that lags behind, would break the log.
* After an error other than `ObjectExistsError` and `ObjectNotFoundError`, it is unknown whether the call took effect.
* Wherever `StorageUnavailableError` is raised, a store that can distinguish a refusal from a missing answer raises its
  subclass `LogStoreRefusedError`: the same call will fail until permissions, credentials or the address are changed.

A plugin returns a `topicstore.contract.plugin_specs.LogStoreSpec` that names the implementing class from
the hook ``topicstore_logs``. `topicstore_conformance.log_store.LogStoreSuite` tests the class.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from .errors import InvalidArgumentError, RecoverableError, TopicstoreError, UnrecoverableError
from .options import NoOptions

__all__ = [
    "MAX_NAME",
    "LogStore",
    "LogStoreRefusedError",
    "NotConditionalError",
    "ObjectExistsError",
    "ObjectNotFoundError",
    "StorageUnavailableError",
    "check_name",
]

MAX_NAME = 512
"""The maximum length of the name of an object, in characters."""
_NAME = re.compile(r"[A-Za-z0-9_=-][A-Za-z0-9._=-]*(?:/[A-Za-z0-9_=-][A-Za-z0-9._=-]*)*")


class ObjectExistsError(TopicstoreError):
    """The name is taken, so nothing was created. An earlier attempt of the caller may have created the object."""

    def __init__(self, name: str, store: str) -> None:
        super().__init__(f"{store}: there is an object {name} already")
        self.name = name


class ObjectNotFoundError(TopicstoreError):
    """No object has that name: it was not created yet, or was deleted."""

    def __init__(self, name: str, store: str) -> None:
        super().__init__(f"{store}: there is no object {name}")
        self.name = name


class StorageUnavailableError(RecoverableError):
    """The store didn't answer conclusively; the call may have taken effect, or may still do so.

    The message names the likely cause: the network, the address, the credentials or the disk. Retry the same call.
    """


class LogStoreRefusedError(StorageUnavailableError):
    """The store refuses the call: no permission, a wrong key, no such bucket. The message has the store's own words.

    Opening a store that refuses fails. A site that has the store open repeats the call, because an administrator may
    correct permissions meanwhile.
    """


class NotConditionalError(UnrecoverableError):
    """The store overwrites an object whose name is taken, so sites could overwrite each other's log entries.

    Nothing was written except a probe. Use a store that supports conditional writes (``If-None-Match: *``).
    """


class LogStore(ABC):
    """A store of immutable, named objects. All methods are thread-safe."""

    Options: ClassVar[type[Any]] = NoOptions
    """A frozen attrs class of the store's options."""

    @classmethod
    @abstractmethod
    def open(cls, url: str, options: Mapping[str, Any]) -> LogStore:
        """Return the store at a URL; ``options`` are values of `Options`, by name.

        Raises `InvalidArgumentError` for an invalid URL, `InvalidOptionError`, and `StorageUnavailableError`.
        """

    @property
    @abstractmethod
    def place(self) -> str:
        """The URL of the store without credentials, for use in messages."""

    @abstractmethod
    def create(self, name: str, data: bytes) -> None:
        """Create an object, complete and durable when the call returns.

        Raises `ObjectExistsError` if the name is taken, and `StorageUnavailableError`, after which it is unknown
        whether the object was created.
        """

    @abstractmethod
    def get(self, name: str) -> bytes:
        """Return the contents of an object. Raises `ObjectNotFoundError` and `StorageUnavailableError`."""

    @abstractmethod
    def names(self, prefix: str, after: str = "") -> Iterator[list[str]]:
        """Yield the names that begin with ``prefix`` and a slash, in ascending order, in non-empty lists.

        With ``after``, a whole name, only greater names are yielded. Objects created or deleted during the iteration
        may or may not be included. Raises `StorageUnavailableError`, also between lists.
        """

    @abstractmethod
    def delete(self, name: str) -> None:
        """Delete an object if it exists. Raises `StorageUnavailableError`."""

    def close(self) -> None:
        """Release connections and other resources. Stored objects are not affected."""
        return


def check_name(name: str) -> str:
    """Return ``name``, or raise `InvalidArgumentError` if some stores could not keep an object of that name."""
    if len(name) > MAX_NAME or not _NAME.fullmatch(name):
        raise InvalidArgumentError(
            f"the name of an object is made of letters, digits and ._=-, with slashes between parts that don't begin "
            f"with a dot, and of at most {MAX_NAME} characters, not {name!r}"
        )
    return name
