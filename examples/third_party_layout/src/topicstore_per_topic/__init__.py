"""A layout of topicstore with a stream for every topic."""
