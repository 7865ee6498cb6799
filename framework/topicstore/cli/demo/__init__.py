"""``topicstore demo``, its messages and its proof."""
