"""What all commands share towards a person: options, tables, interruptions, and how a run ends."""
