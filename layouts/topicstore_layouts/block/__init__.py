"""The block layout: messages as columns, a compressed block a batch.

`format` is the stored form of a block, `codec` its compression, `matching` decides which
rows a filter wants, `slab` stores and reads, `layout` opens.
"""
