"""Files that messages come from and go to."""
