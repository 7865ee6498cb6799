/* The view "Now": what comes in and goes out, and what is there. */

import { chart } from '../charts.js';
import { terminal } from '../clients.js';
import { fillFigures, fillTable, find, make } from '../elements.js';
import { agoText, count, counted, durationText, rate, short, size, sizeText } from '../format.js';
import { poll } from '../polling.js';
import { ask } from '../server.js';
import { stamp } from '../time.js';

const EVERY = 2;
const SLOWLY = 10;
const GENERATIONS = 12;
const SHARDS = 32;
const RECENT = 5;
/* The time that charts show, in milliseconds: as long as the server remembers. */
const SHOWN = 5 * 60 * 1000;
/* Positions in a microsecond. */
const STEPS = 2048;

/* The mean of the last few samples: one second alone jumps. */
const recent = (column) => {
  const last = column.slice(-RECENT);
  return last.length === 0 ? 0 : last.reduce((sum, one) => sum + one, 0) / last.length;
};

const failures = (info) => [
  ...info.shards.filter(({ failure }) => failure).map(({ number, failure }) => `Shard ${number} takes no writes: ${failure}`),
  ...[['Compaction', 'compaction_failure'], ['Counting', 'counting_failure'], ['Making messages visible', 'visibility_failure'],
    ['Removing expired retained messages', 'retained_failure'], ['Removing delivered messages', 'delivered_failure'],
    ['Reserving disk space', 'ballast_failure'], ['Retention', 'retention_failure']]
    .filter(([, name]) => info[name]).map(([what, name]) => `${what} failed: ${info[name]}`),
];

const box = (tag, full, attributes = {}) => {
  const made = make(tag, attributes);
  made.style.setProperty('--full', `${full > 0 ? Math.max(full * 100, 6) : 0}%`);
  return made;
};

const shares = ({ number }, shards, most) => {
  const held = shards.map((shard) => [shard.number, shard.slabs[number]?.streams ?? 0]);
  return make('span', { class: 'share', role: 'img', 'aria-label': held.map(([shard, streams]) => `shard ${shard}: ${count(streams)} streams`).join(', ') },
    held.map(([shard, streams]) => box('i', streams / most, { title: `Shard ${shard}: ${count(streams)} streams` })));
};

const showGenerations = ({ generations, shards }) => {
  const newest = generations.slice(-GENERATIONS).reverse();
  const few = shards.slice(0, SHARDS);
  const most = Math.max(1, ...few.flatMap(({ slabs }) => Object.values(slabs).map(({ streams }) => streams)));
  fillTable(find('generations'), [
    ['No.', ({ number, layout }) => [String(number), make('small', {}, layout)]],
    ['By shard', (generation) => shares(generation, few, most)],
    ['Messages', ({ messages, live_bytes: bytes }) => [short(messages), make('small', {}, sizeText(bytes))], 'number'],
    ['Written', ({ created, sealed }) => [stamp(created), make('small', {}, sealed === null ? 'until now' : `until ${stamp(sealed)}`)], 'nowrap'],
  ], newest);
  const older = generations.length - newest.length;
  find('older').textContent = [older && `${count(older)} older generations are not shown.`, shards.length > SHARDS && `The first ${SHARDS} shards are drawn.`].filter(Boolean).join(' ');
};

const showShards = ({ shards }) => {
  const most = Math.max(1, ...shards.map(({ disk_bytes: bytes }) => bytes));
  fillTable(find('shards'), [
    ['Shard', ({ number }) => String(number)],
    ['On disk', ({ disk_bytes: bytes }) => [sizeText(bytes), box('span', bytes / most, { class: 'bar' })]],
    ['Commits', ({ counters }) => [short(counters.batches), make('small', {}, counters.batches ? `${(counters.commit_seconds / counters.batches * 1000).toFixed(2)} ms each` : '')], 'number'],
    ['Newest message', ({ last_position: last }) => (last > 0 ? stamp(last / STEPS) : 'none'), 'nowrap'],
  ], shards.slice(0, SHARDS));
};

const showInfo = (info) => {
  find('database').textContent = info.path;
  const wrong = failures(info);
  find('failures').hidden = wrong.length === 0;
  find('failures').replaceChildren(...wrong.map((text) => make('li', {}, text)));
  showGenerations(info);
  showShards(info);
};

const showFigures = ({ totals, series }, { messages }) => {
  fillFigures(find('figures'), [
    ['In: published', rate(recent(series.publishes_received)), '/ s', 'in', `${count(totals.publishes_received)} in all`],
    ['Out: delivered', rate(recent(series.publishes_sent)), '/ s', 'out', `${count(totals.publishes_sent)} in all`],
    ['Stored', rate(recent(series.stored_messages)), '/ s', '', `${count(totals.stored_messages)} in all`],
    ['Read', rate(recent(series.read_messages)), '/ s', '', `${count(totals.read_messages)} in all`],
    ['Behind', short(totals.lag_messages), totals.lag_messages ? durationText(totals.lag_seconds) : '', totals.lag_messages ? 'late' : '', `counted ${agoText(totals.lag_age)}`],
    ['Clients', short(totals.clients), `of ${counted(totals.sessions, 'session')}`],
    ['Messages', short(messages)],
    ['On disk', ...size(totals.disk_bytes), '', totals.disk_free === null ? '' : `${sizeText(totals.disk_free)} free`],
  ]);
};

const showCharts = ({ series }) => {
  const x = series.at.map((time) => time / 1000);
  const last = x.at(-1) ?? Date.now();
  const options = { fromZero: true, range: [last - SHOWN, last] };
  chart(find('rates'), [
    { name: 'stored', x, y: series.stored_messages, colour: '--series-4' },
    { name: 'read', x, y: series.read_messages, colour: '--series-3' },
    { name: 'published', x, y: series.publishes_received, colour: '--in' },
    { name: 'delivered', x, y: series.publishes_sent, colour: '--out' },
  ], options);
  chart(find('lag'), [{ name: 'behind', x, y: series.lag_messages, colour: '--series-3' }], options);
};

/* How to publish the first message, as long as there is none. */
const showBeginning = async ({ messages }, signal) => {
  find('beginning').hidden = messages > 0;
  if (messages > 0) return;
  const [line, { items: rules }] = await Promise.all([terminal(signal), ask('/persistence', {}, { signal })]);
  const command = line('mosquitto_pub', "-q 1 -t hello/world -m 'Hello'");
  find('first-command').textContent = command ?? '';
  find('first-command').hidden = command === null;
  find('first-rule').hidden = rules.length > 0;
};

/** Show the view until the signal ends it. */
export const now = async (_, signal, trouble) => {
  let info = null;
  let asked = -Infinity;
  await poll(EVERY, async () => {
    if (performance.now() - asked > SLOWLY * 1000) {
      info = await ask('/info', {}, { signal });
      asked = performance.now();
      showInfo(info);
      await showBeginning(info, signal);
    }
    const figures = await ask('/figures', {}, { signal });
    showFigures(figures, info);
    showCharts(figures);
  }, signal, trouble);
};
