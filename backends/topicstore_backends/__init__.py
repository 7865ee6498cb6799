"""The storage engines that come with topicstore: `memory`, and a package for each of the others.

A package's `backend` has the options and opens shards, and its `engine` writes and reads, with `scans` or `tables`.
Its `errors` translates the errors of the engine's library into topicstore's. Several packages share `calls`,
`files`, `keyspaces`, `options` and `write_ahead_logs`.
"""
