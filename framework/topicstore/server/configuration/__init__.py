"""Representations of the settings: the settings in force, a commented default file, and a JSON Schema.

All are generated from the settings' classes, defaults and docstrings.
"""
