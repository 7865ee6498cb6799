"""All shards of one open database, behind its hooks: stored, read, counted, compacted and copied.

Nothing here knows subscriptions, sessions, queues or retention: those stand above, and listen.
"""
