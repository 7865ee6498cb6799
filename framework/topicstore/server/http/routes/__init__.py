"""The route handlers, with a module for each resource."""
