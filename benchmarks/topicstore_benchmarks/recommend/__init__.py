"""Recommending a layout, by one trial with a sample of the messages: ``topicstore recommend``."""
