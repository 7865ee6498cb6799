"""The storage engines that come with topicstore, one module each."""
