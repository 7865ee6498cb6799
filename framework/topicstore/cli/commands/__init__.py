"""The commands: each is in a module of its own name."""
