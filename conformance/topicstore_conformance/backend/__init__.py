"""`BackendSuite`: tests of the contract `topicstore.contract.engine`, with one module for each kind of guarantee."""
