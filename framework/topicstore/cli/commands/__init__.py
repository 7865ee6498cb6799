"""The commands, one module each, called as the command."""
