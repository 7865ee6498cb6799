"""`BackendSuite`: the promises of `topicstore.engine` as tests, one module a kind of promise."""
