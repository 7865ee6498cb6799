"""Encoding and decoding of MQTT 5 and MQTT 3.1.1: frames, packets and reason codes, without I/O."""
