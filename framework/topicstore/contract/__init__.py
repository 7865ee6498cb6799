"""The contracts that plugins implement, of engines, layouts and hooks, and the types that pass through them.

A backend implements `topicstore.contract.engine`, a layout `topicstore.contract.layout`, a wrapper the hooks of
`topicstore.contract.hookspecs`. They import from this package and from nowhere else in topicstore, and nothing in it
imports any other part of topicstore. This module imports none of its submodules, so that importing one of them loads
only what that one needs.
"""
