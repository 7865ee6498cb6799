"""One of several inspectors with a shared subscription: ``python worker.py PORT NAME``. Ends on Ctrl-C or SIGTERM.

Each request is delivered to one inspector, which acknowledges it after the inspection. An unfinished request is
redelivered to the same inspector when it reconnects, or to another one when its session ends.
"""

import signal
import sys

import paho.mqtt.client as mqtt

REQUESTS = "$share/inspectors/plant/+/inspect"


def main() -> None:
    """Inspect machines until SIGINT or SIGTERM."""
    port, name = int(sys.argv[1]), sys.argv[2]

    def inspect(client: mqtt.Client, _data: object, message: mqtt.MQTTMessage) -> None:
        machine = message.topic.split("/")[1]
        print(f"{name} inspects {machine} at {message.payload.decode()} °C", flush=True)
        client.ack(message.mid, message.qos)

    client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2, name, clean_session=False, manual_ack=True)
    client.on_connect = lambda client, *_: client.subscribe(REQUESTS, qos=1)
    client.on_subscribe = lambda *_: print(f"{name} is ready", flush=True)
    client.on_message = inspect
    signal.signal(signal.SIGTERM, lambda *_: client.disconnect())
    signal.signal(signal.SIGINT, lambda *_: client.disconnect())
    client.connect("127.0.0.1", port)
    client.loop_forever()


if __name__ == "__main__":
    main()
