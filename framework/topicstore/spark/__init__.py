"""The store as a table and a stream of Apache Spark.

::

    from topicstore import spark as tspark

    spark = tspark.session()
    speeds = spark.read.format("topicstore").option("filter", "fleet/+/+/speed").load("data")
    speeds.write.format("topicstore").option("shards", 4).mode("append").save("copy")

Needs ``pip install "topicstore[spark]"``. `topicstore.spark.source` documents the options and guarantees. Spark finds
the data source ``topicstore`` automatically if the package is installed. Otherwise, as with workers that have another
Python path, call `register`.
"""

from __future__ import annotations

from topicstore.contract.errors import BackendUnavailableError

try:
    import pyspark as _pyspark  # noqa: F401 - to say what is missing, and how to get it
except ModuleNotFoundError as missing:
    raise BackendUnavailableError('topicstore.spark needs pyspark: pip install "topicstore[spark]"') from missing

from .session import register, session
from .source import TopicstoreSource
from .tiering import export

__all__ = ["TopicstoreSource", "export", "register", "session"]
