"""The skipstream layout: one value per message, and an index entry for each level that varies.

`entries` determines the index entries of topics and filters, `postings` reads and intersects lists of
entries, `slab` stores and reads, `verification` compares index and messages, and `layout` has the options
and opens slabs.
"""
