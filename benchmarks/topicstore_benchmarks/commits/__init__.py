"""Two commits of topicstore measured in turns: ``topicstore bench compare-commits``."""
