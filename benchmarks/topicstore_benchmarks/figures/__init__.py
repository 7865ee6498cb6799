"""Figures, which are measurements of single features with documented bounds: ``topicstore bench figures``."""
