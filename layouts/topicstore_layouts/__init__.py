"""The layouts that come with topicstore, one module or package each."""
