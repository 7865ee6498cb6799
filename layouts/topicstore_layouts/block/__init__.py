"""The block layout: messages as columns, a compressed block a batch, and sorted segments of what was merged.

`format` is the stored form of a block, `compression` and `payloads` belong to it; `batch_blocks` and `segments`
say where blocks and segments lie. `writing` makes blocks of a batch, `compaction` segments of blocks, `deletion`
writes them again, and `verification` decodes them all. `stream_ranges` and `matching` say which streams, topics and
rows a filter wants, and `reading` finds them; `gathered_rows` puts those of a segment in order, `block_cache` keeps
blocks decoded. `slab` joins these, `layout` opens.
"""
