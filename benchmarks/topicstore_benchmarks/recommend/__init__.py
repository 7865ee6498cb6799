"""Recommends a layout by one trial with a sample of the user's messages: ``topicstore recommend``."""
