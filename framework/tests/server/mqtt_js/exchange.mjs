// node exchange.mjs URL VERSION PREFIX: publishes with each QoS to PREFIX/QOS, to itself, and prints what comes as JSON.
import { once } from "node:events";
import mqtt from "mqtt";

const [url, version, prefix] = process.argv.slice(2);
const client = mqtt.connect(url, { protocolVersion: Number(version), clientId: `${prefix}-js`, reconnectPeriod: 0 });
client.on("error", (error) => {
  console.error(error);
  process.exit(1);
});
await once(client, "connect");
const [granted] = await client.subscribeAsync(`${prefix}/#`, { qos: 2 });
const found = [];
const all = new Promise((resolve) => {
  client.on("message", (topic, payload, packet) => {
    found.push([topic, payload.toString(), packet.qos]);
    if (found.length === 3) resolve();
  });
});
for (const qos of [0, 1, 2]) await client.publishAsync(`${prefix}/${qos}`, `é${qos}`, { qos });
await all;
await client.endAsync();
console.log(JSON.stringify({ granted: granted.qos, found }));
