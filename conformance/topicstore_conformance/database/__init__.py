"""What whole databases must hold, on every pair of a backend and a layout."""
