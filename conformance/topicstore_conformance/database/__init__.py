"""Promises about whole databases, on every pair of a backend and a layout."""
