"""Store a broker's messages durably, with aiomqtt: a QoS 1 message is acknowledged after it was fsynced."""

import asyncio
import sys

import aiomqtt
import topicstore as ts

MOST = 1_000
"""The maximum number of messages in a batch."""


async def waiting(messages: aiomqtt.client.MessagesIterator) -> list[aiomqtt.Message]:
    """Wait for a message, and return it with all that have arrived meanwhile: few at low load, many at high load."""
    batch = [await anext(messages)]
    while len(batch) < MOST and len(messages):
        batch.append(await anext(messages))
    return batch


def stored(message: aiomqtt.Message) -> ts.Message:
    """Return a broker's message as a `Message` to store."""
    return ts.Message(message.topic.value, bytes(message.payload), qos=message.qos, retain=message.retain)


async def bridge(db: ts.AsyncDatabase, host: str, port: int, client_id: str, topic_filter: str) -> None:
    """Store the broker's messages until the program is interrupted, or an error occurs."""
    client = aiomqtt.Client(host, port, identifier=client_id, clean_session=False)
    # aiomqtt has no manual acknowledgements (https://github.com/empicano/aiomqtt/issues/345), but its paho client has.
    # They are enabled before connecting, because the session's queued messages arrive at once.
    paho = client._client  # noqa: SLF001
    paho.manual_ack_set(True)
    async with client:
        await client.subscribe(topic_filter, qos=1)
        while True:
            batch = await waiting(client.messages)
            await db.store([stored(message) for message in batch])  # meanwhile the broker sends the next batch
            for message in batch:  # they are fsynced
                paho.ack(message.mid, message.qos)


async def main(path: str, host: str, port: str, topic_filter: str) -> None:
    """Open the database and run the bridge."""
    async with ts.aopen(path, durability="sync") as db:
        await bridge(db, host, int(port), "topicstore-bridge", topic_filter)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
