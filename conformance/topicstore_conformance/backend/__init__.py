"""`BackendSuite`: the promises of `topicstore.contract.engine` as tests, one module a kind of promise."""
