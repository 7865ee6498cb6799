"""A model checker of replication: it explores every interleaving of a few sites that use the program's decisions.

`checker` explores the states, `world` defines the steps from each state, and `truth` the invariants. `faults` has wrong
decisions, each of which the checker must find.

The model covers the decisions, and not the order of the calls around them. `interleavings` explores the program itself:
sites that run it over a store that stops at every call (`program`).
"""
