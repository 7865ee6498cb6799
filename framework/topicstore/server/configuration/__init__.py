"""The settings as people and editors see them: those in force, a commented file of the defaults, a JSON Schema.

All are made of the classes of the settings, their defaults and their docstrings, so that they say what the code does.
"""
