"""`LayoutSuite`: the promises of `topicstore.layout` as tests, one module a kind of promise."""
