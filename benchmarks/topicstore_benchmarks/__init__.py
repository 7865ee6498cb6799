"""How fast topicstore is, beside what else keeps messages: ``topicstore bench``.

``workloads``   what is stored and asked for: TOML files, kinds of workloads as plugins
``contenders``  who is compared: layouts on backends, other stores, bare engines and files as limits
``harness``     a run: Spark makes the messages, and runs groups of cells, a process for each contender
``results``     what a run gives: a Parquet row a value
``report``      the page that a person reads first
``comparing``   what changed between two runs
``figures``     figures of one thing at a time, with bounds that we hold ourselves to: ``topicstore bench figures``

`timing` is how time is taken within one process, `memory` how much it took at most.
"""
