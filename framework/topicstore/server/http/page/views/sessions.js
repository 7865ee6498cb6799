/* The view "Sessions": who is behind, what is in flight, and ending a connection. */

import { go } from '../address.js';
import { confirmed, fillFigures, fillTable, find, make } from '../elements.js';
import { count, durationText, stamp } from '../format.js';
import { poll } from '../polling.js';
import { ask } from '../server.js';

const EVERY = 5;
const PAGE = 100;

const lagText = (lag) => {
  if (!lag || lag.messages === 0) return lag ? 'none' : '';
  return [`${lag.exact ? '' : 'about '}${count(lag.messages)}`, make('small', {}, durationText(lag.seconds))];
};

const filtersOf = ({ subscriptions }) => [
  ...subscriptions.slice(0, 3).map(({ filter, qos }) => make('div', {}, make('span', { class: 'topic' }, filter), make('small', {}, `QoS ${qos}`))),
  subscriptions.length > 3 ? make('small', {}, `and ${count(subscriptions.length - 3)} more`) : null,
];

const state = ({ connected, expires, will_due: will }) => [
  connected ? 'connected' : 'away',
  make('small', {}, [!connected && expires !== null && `ends ${stamp(expires)}`, will !== null && 'a will waits'].filter(Boolean).join(', ')),
];

const kickButton = ({ client_id: id, connected }, trouble, again) => (connected ? make('button', {
  type: 'button',
  class: 'quiet',
  'aria-label': `Kick ${id}`,
  onclick: async () => {
    if (!await confirmed(`Kick ${id}?`, 'Its connection is ended. Its session stays, and it may connect again.', 'Kick it')) return;
    try {
      await ask(`/sessions/${encodeURIComponent(id)}/kick`, {}, { method: 'POST' });
      await again();
    } catch (failed) {
      trouble(failed);
    }
  },
}, 'Kick') : '');

const show = ({ items, next }, sorted, trouble, again) => {
  fillTable(find('session-table'), [
    ['Client', ({ client_id: id }) => make('span', { class: 'topic' }, id)],
    ['State', state],
    ['Behind', ({ lag }) => lagText(lag), 'number'],
    ['In flight', ({ in_flight: flight, awaiting_pubrel: release }) => [count(flight), release ? make('small', {}, `${count(release)} for PUBREL`) : null], 'number'],
    ['Subscriptions', filtersOf],
    ['', (session) => kickButton(session, trouble, again)],
  ], items);
  find('sessions-summary').textContent = items.length === 0 ? 'none'
    : `${next ? `the first ${count(items.length)}` : count(items.length)}, ${sorted ? 'those that are behind, the furthest first' : 'by client id'}`;
};

const showFigures = (items) => {
  const behind = items.filter(({ lag }) => lag?.messages);
  fillFigures(find('session-figures'), [
    ['Shown', count(items.length)],
    ['Connected', count(items.filter(({ connected }) => connected).length)],
    ['Behind', count(behind.length), '', behind.length ? 'out' : ''],
    ['Longest behind', durationText(Math.max(0, ...behind.map(({ lag }) => lag.seconds)))],
    ['In flight', count(items.reduce((sum, { in_flight: flight }) => sum + flight, 0))],
  ]);
};

const form = find('session-form');

/** Show the view until the signal ends it. */
export const sessions = async (values, signal, trouble) => {
  for (const field of form.elements) if (field.name) field.value = values[field.name] ?? field.dataset.default ?? '';
  const look = async () => {
    const { search, connected, sort } = Object.fromEntries(new FormData(form));
    const query = { search: search.trim(), connected, lag: true, limit: PAGE };
    const behind = sort === 'lag' ? await ask('/sessions', { ...query, sort }, { signal }) : null;
    const sorted = behind !== null && behind.items.length > 0;
    const page = sorted ? behind : await ask('/sessions', query, { signal });
    if (find('session-table').contains(document.activeElement) || find('confirm').open) return;  // no focus is taken away
    show(page, sorted, trouble, look);
    showFigures(page.items);
  };
  await poll(EVERY, look, signal, trouble);
};

form.addEventListener('submit', (event) => {
  event.preventDefault();
  go('sessions', Object.fromEntries(new FormData(form)));
});
