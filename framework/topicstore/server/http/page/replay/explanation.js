/* What a replay reads and skips to find its messages. It runs the beginning of the replay, so only who opens it asks for it. */

import { fillFacts, fillTable, find } from '../elements.js';
import { count, durationText, rate, sizeText } from '../format.js';
import { ask } from '../server.js';

const MOST = 50;
/* The messages of which it is shown: the whole replay may take minutes. */
const SAMPLE = 10_000;

const show = (found) => {
  fillFacts(find('explained'), [
    ['Messages', `${found.ended ? '' : 'the first '}${count(found.messages)}, ${sizeText(found.payload_bytes)} of payloads`],
    ['Time', `${durationText(found.seconds)}, of which planning ${durationText(found.planning_seconds)}`],
    ['Rate', `${rate(found.rate)} messages a second`],
    ...(found.zones === null ? [] : [['Zones', `${count(found.zones)} of ${count(found.all_zones)} may hold some of them`]]),
    ['Left out', `${count(found.unread.length)} parts of generations, because nothing in them can match`],
  ]);
  fillTable(find('explained-slabs'), [
    ['Shard', ({ shard }) => shard],
    ['Generation', ({ generation, layout }) => `${generation}, ${layout}`],
    ['Streams', ({ matching, streams }) => `${count(matching)} of ${count(streams)}`, 'number'],
    ['Seeks', ({ reads }) => count(reads.seeks), 'number'],
    ['Visited', ({ reads }) => count(reads.visited), 'number'],
    ['Skipped', ({ reads }) => count(reads.skipped), 'number'],
    ['Messages', ({ reads }) => count(reads.rows), 'number'],
    ['Time', ({ seconds }) => durationText(seconds), 'number'],
  ], found.slabs.slice(0, MOST));
};

/** Ask when the part is open, and whenever it is opened. */
export const offerExplanation = (query, signal, trouble) => {
  const part = find('explain');
  const explain = async () => {
    if (!part.open) return;
    find('explain-note').textContent = 'The replay runs …';
    try {
      show(await ask('/messages/explain', { ...query, limit: SAMPLE }, { signal }));
    } catch (failed) {
      trouble(failed);
    }
    find('explain-note').textContent = '';
  };
  part.addEventListener('toggle', explain, { signal });
  explain();
};
