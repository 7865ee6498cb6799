"""Tools for tests of an MQTT server: a codec, clients, and the server as a process or embedded."""
