"""`BackendSuite`: the promises of `topicstore.contract.engine` as tests, with one module for each kind of promise."""
