"""LMDB as an engine of topicstore."""
