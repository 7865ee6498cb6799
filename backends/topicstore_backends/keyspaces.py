"""A mapping by keyspace name that refuses keyspaces unknown to the engine."""

from __future__ import annotations

from typing import NoReturn, TypeVar

from topicstore.contract.errors import InvalidArgumentError

__all__ = ["ByKeyspace"]

T = TypeVar("T")


class ByKeyspace(dict[str, T]):
    """A dict by keyspace name that raises `InvalidArgumentError` for keyspaces the engine was opened without."""

    def __missing__(self, name: str) -> NoReturn:
        raise InvalidArgumentError(f"the engine was opened without keyspace {name!r}")
