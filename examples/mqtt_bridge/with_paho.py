"""Store a broker's messages durably, with paho-mqtt: a QoS 1 message is acknowledged after it was fsynced."""

import queue
import sys

import paho.mqtt.client as mqtt
import topicstore as ts

MOST = 1_000
"""The maximum number of messages in a batch."""


def waiting(received: "queue.SimpleQueue[mqtt.MQTTMessage]") -> list[mqtt.MQTTMessage]:
    """Wait for a message, and return it with all that have arrived meanwhile: few at low load, many at high load."""
    batch = [received.get()]
    while len(batch) < MOST and not received.empty():
        batch.append(received.get())
    return batch


def bridge(db: ts.Database, host: str, port: int, client_id: str, topic_filter: str) -> None:
    """Store the broker's messages until the program is interrupted, or an error occurs."""
    received: queue.SimpleQueue[mqtt.MQTTMessage] = queue.SimpleQueue()
    client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2, client_id, clean_session=False, manual_ack=True)
    client.on_connect = lambda *_: client.subscribe(topic_filter, qos=1)  # also after a lost connection
    client.on_message = lambda _client, _data, message: received.put(message)
    client.connect(host, port)
    client.loop_start()  # paho's own thread; it reconnects by itself
    try:
        while True:
            batch = waiting(received)
            db.store([ts.Message(one.topic, one.payload, qos=one.qos, retain=one.retain) for one in batch])
            for one in batch:  # they are fsynced
                client.ack(one.mid, one.qos)
    finally:
        client.disconnect()
        client.loop_stop()


if __name__ == "__main__":
    path, host, port, topic_filter = sys.argv[1:]
    with ts.open(path, durability="sync") as db:
        bridge(db, host, int(port), "topicstore-bridge", topic_filter)
