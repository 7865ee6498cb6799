"""Figures of one thing at a time, with promised bounds: ``topicstore bench figures``."""
