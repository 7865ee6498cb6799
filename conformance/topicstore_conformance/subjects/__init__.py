"""What is tested: plugins, pairs of them, what they can, and how hard they are tried."""
