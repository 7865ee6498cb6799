"""`LayoutSuite`: the promises of `topicstore.contract.layout` as tests, with one module for each kind of promise."""
