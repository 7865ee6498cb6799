"""Benchmarks that compare topicstore with other message stores: ``topicstore bench``.

``workloads``   the messages to store and the requests to answer: TOML files, and plugins for kinds of workloads
``contenders``  the stores that are compared: layouts on backends, other stores, bare engines and files as limits
``harness``     a run: Spark generates the messages and runs trials, each with a worker process for each contender
``results``     the output of a run: one Parquet row for each value
``report``      the HTML report of a run
``comparing``   the differences between two runs
``recommend``   the layout for a user's own messages, chosen by one trial: ``topicstore recommend``
``figures``     measurements of single features, with documented bounds: ``topicstore bench figures``

`timing` measures time within one process; `installed` reports missing dependencies of a command.
"""
