"""What runs the suites against plugins and pairs, and tells what became of them."""
