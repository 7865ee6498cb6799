"""What there is under which path: a module for each resource."""
