"""The storage engines that come with topicstore: `memory`, and a package for each of the others.

A package's `backend` has the options and opens, its `engine` writes and reads, with `scans` or `tables`, and its
`errors` turns what the engine's library raises into topicstore's errors. Several of them share `calls`, `files`,
`keyspaces`, `options` and `write_ahead_logs`.
"""
