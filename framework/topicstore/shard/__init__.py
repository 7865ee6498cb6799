"""One shard: one engine, its generations, and one order of writes.

Every write goes through `writer`. `generations` keeps the records and slabs, and `write_path`, `reader` and
`rewriter` each have one task. `shard` composes them; other packages use `Shard`.
"""
