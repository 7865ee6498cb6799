"""The suite for plugins that transform messages on their way into a database and out of it."""
