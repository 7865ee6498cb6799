"""One shard of a database: an engine, its generations, and one order of writes.

Every write goes through `writer`. `generations` holds the generations' records and slabs, `reader` reads, `rewriter`
deletes and compacts, and `tally_tables` stores counts. `shard` composes them as `Shard`, which other packages use.
"""
