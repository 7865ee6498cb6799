"""The server's commands, which the program ``topicstore`` loads by the entry-point group ``topicstore.commands``."""
