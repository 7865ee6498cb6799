"""The skipstream layout: one value a message, and an index entry for each level that varies.

`entries` says which index entries a topic has and which a filter asks for, `postings` reads them
and leaps from one list to the other, `slab` stores and reads, `verification` compares index and messages,
`layout` has the options and opens.
"""
