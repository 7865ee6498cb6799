"""Conditions of a test: the capabilities that it needs, the installed software, and the number of examples."""
