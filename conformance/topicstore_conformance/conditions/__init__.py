"""Under which conditions a test runs: what its subject can, what is installed, and how hard is tried."""
