"""Messages in the bodies of requests and responses, by media type."""
