"""The log stores that come with topicstore: a directory, and object stores through obstore."""
