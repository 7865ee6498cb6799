"""What a process needs besides messages: clocks, locks, closing, background tasks, warnings."""
