"""The shards of one open database, accessed through its hooks: storing, reading, counting, compacting and copying.

This package doesn't depend on subscriptions, sessions, queues or retention, which use it and register listeners.
"""
