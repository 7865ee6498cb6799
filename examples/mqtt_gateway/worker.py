"""One of several inspectors, who share the work: ``python worker.py PORT NAME``. Ends with Ctrl-C or SIGTERM.

Each request goes to one of them. It is acknowledged when it is done, so one that an inspector didn't finish goes on to
another when its session ends, or to itself when it comes back.
"""

import signal
import sys

import paho.mqtt.client as mqtt

REQUESTS = "$share/inspectors/plant/+/inspect"


def main() -> None:
    """Inspect machines until the program is told to end."""
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
