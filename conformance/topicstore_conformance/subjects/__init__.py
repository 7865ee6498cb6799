"""What is tested: plugins, pairs of them, and real messages to store."""
