"""Services of a process that know no messages: clocks, locks, closing, background tasks, warnings."""
