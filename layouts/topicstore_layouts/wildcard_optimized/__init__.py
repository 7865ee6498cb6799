"""The wildcard_optimized layout: keys of bit fields, by which wildcard filters skip keys that can't match.

`keymapper` makes keys of bit fields and finds the next one that a filter accepts, `streams` determines
the fields of a stream's keys, `place` is a reader's place, `slab` stores and reads, and `layout` has the
options and opens slabs.
"""
