"""A model checker of replication: every interleaving of a few sites, driving the decisions that the program makes.

`checker` walks them, `world` says what may happen in each state, `truth` what must hold in all of them, and `faults`
has decisions that are wrong, each of which the checker must find.
"""
