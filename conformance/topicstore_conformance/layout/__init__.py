"""`LayoutSuite`: tests of the contract `topicstore.contract.layout`, with one module for each kind of guarantee."""
