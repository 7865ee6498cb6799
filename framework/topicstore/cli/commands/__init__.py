"""The commands, each in a module that is named like the command."""
