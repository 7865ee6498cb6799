"""MQTT's bytes: frames, packets and reason codes of MQTT 5 and MQTT 3.1.1. Nothing here opens a socket or waits."""
