"""MQTT clients: connections, a module for each kind of packet, and the thread that serves the store's requests."""
