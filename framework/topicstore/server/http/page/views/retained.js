/* The view "Retained": the message of each topic that a new subscriber gets at once. */

import { addressOf, go } from '../address.js';
import { confirmed, fillTable, find, make } from '../elements.js';
import { agoText, count } from '../format.js';
import { onPayloadForm } from '../payloads/form.js';
import { jsonOf, shownPayload } from '../payloads/payloads.js';
import { ask, rights } from '../server.js';
import { moment } from '../time.js';

const PAGE = 100;
const form = find('retained-form');
let redraw = () => {};

const clearButton = (topic, trouble, again) => make('button', {
  type: 'button',
  class: 'quiet',
  'aria-label': `Clear ${topic}`,
  onclick: async () => {
    if (!await confirmed(`Clear ${topic}?`, 'Its retained message goes for good. Clients that subscribe from now on get none.', 'Clear it')) return;
    await ask('/retained', { topic }, { method: 'DELETE' }).then(again).catch(trouble);
  },
}, 'Clear');

const show = (items, more, may, trouble, again) => {
  const now = Date.now() * 1000;
  fillTable(find('retained-table'), [
    ['Topic', ({ topic }) => make('a', { class: 'topic', href: addressOf('replay', { filter: topic }) }, topic)],
    ['Payload', (row) => shownPayload(row, jsonOf(row)), 'wide'],
    ['Published', ({ timestamp }) => [agoText((now - timestamp) / 1e6), make('small', {}, moment(timestamp).slice(0, 19))], 'nowrap'],
    ['QoS', ({ qos }) => String(qos), 'number'],
    ...(may('write') ? [['', ({ topic }) => clearButton(topic, trouble, again)]] : []),
  ], items);
  find('retained-table').hidden = items.length === 0;
  find('retained-nothing').hidden = items.length > 0;
  find('retained-summary').textContent = items.length === 0 ? 'none' : `${more ? 'the first ' : ''}${count(items.length)}, by topic`;
  find('retained-more').hidden = !more;
};

/** Show the view until the signal ends it. */
export const retained = async (values, signal, trouble) => {
  form.elements.filter.value = values.filter ?? '';
  const filter = form.elements.filter.value.trim() || '#';
  const may = await rights(signal);
  let items = [];
  const look = async (after) => {
    const page = await ask('/retained', { filter, after, limit: PAGE }, { signal });
    items = after ? [...items, ...page.items] : page.items;
    redraw = () => show(items, page.next !== null, may, trouble, () => look());
    redraw();
    find('retained-more').onclick = () => look(page.next).catch(trouble);
  };
  await look();
};

onPayloadForm(() => redraw());

form.addEventListener('submit', (event) => {
  event.preventDefault();
  go('retained', Object.fromEntries(new FormData(form)));
});
