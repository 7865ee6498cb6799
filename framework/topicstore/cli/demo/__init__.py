"""The command ``topicstore demo``, its messages, and the check of its result."""
