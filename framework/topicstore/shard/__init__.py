"""One shard: one engine, its generations, and one order of writes.

Every write goes through `commit_log`. `generations` keeps the records and slabs, and `write_path`, `epochs`,
`reads`, `rewriting` and `verification` each have one task. `shard` composes them; other packages use `Shard`.
"""
