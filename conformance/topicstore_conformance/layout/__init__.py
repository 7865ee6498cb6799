"""`LayoutSuite`: the promises of `topicstore.contract.layout` as tests, one module a kind of promise."""
