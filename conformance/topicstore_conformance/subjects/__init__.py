"""The subjects of tests: plugins, pairs of them, and real messages to store."""
