"""General services that don't depend on messages: clocks, locks, closing, background tasks, warnings."""
