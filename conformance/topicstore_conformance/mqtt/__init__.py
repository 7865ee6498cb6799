"""What tests of an MQTT server need: packets as bytes, a client over a raw socket, and the server as a process."""
