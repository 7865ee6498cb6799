"""By which Spark finds the data source: it looks into every module whose name begins with ``pyspark_``."""

from topicstore.spark.source import TopicstoreSource as DefaultSource

__all__ = ["DefaultSource"]
