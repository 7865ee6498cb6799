"""The server's commands, which the program ``topicstore`` finds by its entry-point group ``topicstore.commands``."""
