"""The contenders, which are the compared stores: topicstore, other message stores, and bare engines and files."""
