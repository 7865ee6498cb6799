"""The user interface of commands: options, tables, progress bars, interruptions and exit codes."""
