"""All shards of one open database, behind its hooks: storing, reading, counting, compacting and copying.

Nothing in this package depends on subscriptions, sessions, queues or retention; those use it, and register listeners.
"""
