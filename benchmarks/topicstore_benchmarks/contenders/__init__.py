"""The contenders: topicstore, other message stores, and the limits of engines and files."""
