"""The suites for what is installed: ``pytest --pyargs topicstore_conformance.installed --backend NAME``."""
