"""Simulated machines that report their temperature: ``python devices.py PORT MACHINES READINGS``.

A reading above 80 degrees is followed by a request for an inspection.
"""

import random
import sys

import paho.mqtt.client as mqtt

HOT = 80.0


def readings(machines: int, count: int) -> list[tuple[str, float]]:
    """Return ``count`` readings of each machine, in turns, as (name, degrees Celsius)."""
    chance = random.Random(16)  # noqa: S311 - the same readings in every run
    return [(f"press-{n % machines:02}", round(chance.gauss(65, 10), 1)) for n in range(machines * count)]


def main() -> None:
    """Publish all readings, and return when the server has acknowledged them."""
    port, machines, count = map(int, sys.argv[1:])
    client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2, "plant-simulator", protocol=mqtt.MQTTv5)
    client.connect("127.0.0.1", port)
    client.loop_start()
    waiting = []
    hot = 0
    for machine, degrees in readings(machines, count):
        waiting.append(client.publish(f"plant/{machine}/temperature", str(degrees), qos=1))
        if degrees > HOT:
            hot += 1
            waiting.append(client.publish(f"plant/{machine}/inspect", str(degrees), qos=1))
    for message in waiting:
        message.wait_for_publish()  # the server has committed it
    client.disconnect()
    client.loop_stop()
    print(f"{machines * count} readings of {machines} machines, {hot} of them too hot")


if __name__ == "__main__":
    main()
