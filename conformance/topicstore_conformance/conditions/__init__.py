"""Conditions of a test: what its subject can do, what is installed, and how many tries are made."""
