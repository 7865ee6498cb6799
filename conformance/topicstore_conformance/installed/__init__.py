"""The suites for installed plugins, which pytest runs with the plugin `topicstore_conformance.runner.plugin`."""
