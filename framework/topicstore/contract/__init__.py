"""The contracts of engines, layouts and hooks that plugins implement, and the types that these contracts use.

A backend implements `topicstore.contract.engine`, a layout `topicstore.contract.layout`, a wrapper the hooks of
`topicstore.contract.hookspecs`. Plugins import from topicstore only this package, which imports no other part of
topicstore. This module imports none of its submodules, so that importing a submodule loads only its own dependencies.
"""
