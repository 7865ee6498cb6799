"""Show the machines' temperatures of the last hour: ``python dashboard.py PORT READINGS``.

It connects late and without a persistent session: the server replays the last hour to it, and then sends live messages.
It ends after READINGS readings, and prints a summary.
"""

import sys

import paho.mqtt.client as mqtt
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

TOPIC = "plant/+/temperature"


def main() -> None:
    """Collect readings by machine, and print a summary of each."""
    port, wanted = map(int, sys.argv[1:])
    found: dict[str, list[float]] = {}

    def subscribe(client: mqtt.Client, *_: object) -> None:
        start = Properties(PacketTypes.SUBSCRIBE)
        start.UserProperty = ("topicstore-start", "-1h")
        client.subscribe(TOPIC, options=mqtt.SubscribeOptions(qos=1), properties=start)
        # In MQTT 3.1.1, which has no properties: client.subscribe(f"$replay/-1h/{TOPIC}", qos=1)

    def show(client: mqtt.Client, _data: object, message: mqtt.MQTTMessage) -> None:
        machine = message.topic.split("/")[1]
        found.setdefault(machine, []).append(float(message.payload))
        if sum(map(len, found.values())) == wanted:
            client.disconnect()

    client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2, protocol=mqtt.MQTTv5)
    client.on_connect = subscribe
    client.on_message = show
    client.connect("127.0.0.1", port)
    client.loop_forever()
    for machine, degrees in sorted(found.items()):
        last, highest = degrees[-1], max(degrees)
        print(f"{machine}: {len(degrees)} readings, last {last} °C, highest {highest} °C")


if __name__ == "__main__":
    main()
