"""The commands: each is in a module of its own name, or where `topicstore.cli.app` says."""
