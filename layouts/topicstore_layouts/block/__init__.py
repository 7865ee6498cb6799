"""The block layout: messages as columns, one compressed block per batch, and sorted segments of merged blocks.

`format` defines the stored form of a block and `frames` that of a part of a segment, with `packing`, `compression` and
`payloads`; `batch_blocks` and `segments` store blocks and segments. `writing` makes the blocks of a batch, `compaction`
merges blocks into segments by means of `sorted_rows`, `deletion` rewrites both, and `verification` decodes all of them.
`stream_ranges` and `matching` decide which streams, topics and rows a filter matches, and `reading` finds them;
`gathered_rows` puts the rows of a segment in order, `heads` reads messages without payloads for counts, `block_cache`
keeps decoded blocks, `topic_index` lists the blocks that have a topic. `slab` combines these modules, `layout` has the
options and opens slabs.
"""
