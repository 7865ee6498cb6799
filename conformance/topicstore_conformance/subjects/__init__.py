"""The subjects of tests: plugins, pairs of them, and data sets of real messages."""
