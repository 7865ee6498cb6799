"""How fast topicstore is, against the limits of the engines below it."""
