"""Figures of one thing at a time, against bounds that we hold ourselves to: ``topicstore bench figures``."""
