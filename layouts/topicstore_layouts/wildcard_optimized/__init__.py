"""The wildcard_optimized layout: bit-field keys that wildcard filters leap through.

`keymapper` makes keys of bit fields and finds the next one that a filter lets through, `streams`
says which fields a stream's keys have, `place` where a reader is, `slab` stores and reads,
`layout` has the options and opens.
"""
