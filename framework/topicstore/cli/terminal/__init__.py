"""The parts of commands that face a person: options, tables, interruptions, and how a run ends."""
