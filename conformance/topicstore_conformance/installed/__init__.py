"""The suites for installed plugins; `topicstore_conformance.runner.plugin` says how to run them."""
