"""One shard: one engine, its generations, and one order of writes.

Every write goes through `commit_log`. `generations` has the records and slabs on it, and `write_path`, `epochs`,
`reads`, `rewriting` and `verification` each do one thing with them. `shard` composes them; others take it from there.
"""
