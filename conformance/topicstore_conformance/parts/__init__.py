"""The suite for the parts of a database: publishing, sessions, subscriptions, queues, retention and archives."""
