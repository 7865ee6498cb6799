"""The module in which Spark finds the data source: it looks into every module whose name begins with ``pyspark_``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from topicstore.spark.source import TopicstoreSource as DefaultSource

__all__ = ["DefaultSource"]


if not TYPE_CHECKING:  # else type checkers would accept any name

    def __getattr__(name: str) -> Any:
        """Load the data source only when Spark asks for it, because `pyspark_topicstore.daemon` must not load it."""
        if name != "DefaultSource":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from topicstore.spark.source import TopicstoreSource

        return TopicstoreSource
