"""What plugins implement and import: the contracts of engines, layouts and hooks, and the types that pass through them.

A backend implements `topicstore.contract.engine`, a layout `topicstore.contract.layout`, a wrapper the hooks of
`topicstore.contract.hookspecs`. They import from here and from nowhere else of topicstore, and nothing here imports
anything else of it. This module imports none of its parts, so that each costs only what it needs itself.
"""
