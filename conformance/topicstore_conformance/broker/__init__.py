"""The suite of MQTT brokers, of any vendor: `BrokerSuite` and its tests."""
