"""Who is compared: topicstore, others that keep messages, and the limits of engines and files."""
