"""Store a broker's messages durably, with aiomqtt: a message of QoS 1 is acknowledged when it is on disk."""

import asyncio
import sys

import aiomqtt
import topicstore as ts

MOST = 1_000
"""The most messages that are stored together."""


async def waiting(messages: aiomqtt.client.MessagesIterator) -> list[aiomqtt.Message]:
    """Return the messages that have come, after waiting for the first: few at low load, many at high load."""
    batch = [await anext(messages)]
    while len(batch) < MOST and len(messages):
        batch.append(await anext(messages))
    return batch


def stored(message: aiomqtt.Message) -> ts.Message:
    """Return a message of the broker in the form in which it is stored."""
    return ts.Message(message.topic.value, bytes(message.payload), qos=message.qos, retain=message.retain)


async def bridge(db: ts.AsyncDatabase, host: str, port: int, client_id: str, topic_filter: str) -> None:
    """Store the broker's messages until the program is interrupted, or an error occurs."""
    client = aiomqtt.Client(host, port, identifier=client_id, clean_session=False)
    # aiomqtt has no manual acknowledgements yet (https://github.com/empicano/aiomqtt/issues/345), its paho client has.
    # This comes before connecting, because messages that wait in the session come at once.
    paho = client._client  # noqa: SLF001
    paho.manual_ack_set(True)
    async with client:
        await client.subscribe(topic_filter, qos=1)
        while True:
            batch = await waiting(client.messages)
            await db.store([stored(message) for message in batch])  # meanwhile the broker sends the next batch
            for message in batch:  # these are on disk by now
                paho.ack(message.mid, message.qos)


async def main(path: str, host: str, port: str, topic_filter: str) -> None:
    """Open the database and run the bridge."""
    async with ts.aopen(path, durability="sync") as db:
        await bridge(db, host, int(port), "topicstore-bridge", topic_filter)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
