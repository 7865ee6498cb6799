"""Measures topicstore and other message stores side by side: ``topicstore bench``.

``workloads``   the messages to store and the requests to answer: TOML files, kinds of workloads as plugins
``contenders``  what is compared: layouts on backends, other stores, bare engines and files as limits
``harness``     a run: Spark makes the messages, and runs trials of workers, one process for each contender
``results``     the output of a run: one Parquet row for each value
``report``      the page that a person reads first
``comparing``   what changed between two runs
``recommend``   the layout for a user's own messages, by one trial: ``topicstore recommend``
``figures``     figures of one thing at a time, with promised bounds: ``topicstore bench figures``

`timing` measures time within one process; `installed` says what a command lacks.
"""
