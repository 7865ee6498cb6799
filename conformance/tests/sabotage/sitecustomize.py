"""Imported by each Python process that begins: those that a test starts open the databases of its saboteur, too."""

import os

if name := os.environ.get("SABOTEUR"):
    import sabotage_databases

    sabotage_databases.take_over(name)
