/* The view "Sessions": all of them, those that are behind first, and one of them with everything that is known of it. */

import { addressOf, go } from '../address.js';
import { fillFigures, fillTable, find, make } from '../elements.js';
import { agoText, count, durationText } from '../format.js';
import { poll } from '../polling.js';
import { ask, rights } from '../server.js';
import { closeDetails, lagText, showDetails } from '../sessions/details.js';
import { kickButton } from '../sessions/ending.js';
import { stamp } from '../time.js';

const EVERY = 5;
const PAGE = 100;

const filtersOf = ({ subscriptions }) => [
  ...subscriptions.slice(0, 3).map(({ filter, qos }) => make('div', {}, make('span', { class: 'topic' }, filter), make('small', {}, `QoS ${qos}`))),
  subscriptions.length > 3 ? make('small', {}, `and ${count(subscriptions.length - 3)} more`) : null,
];

const state = ({ connected, expires, will_due: will }) => [
  connected ? 'connected' : 'away',
  make('small', {}, [!connected && expires !== null && `ends ${stamp(expires)}`, will !== null && 'a will waits'].filter(Boolean).join(', ')),
];

const show = (items, more, values, may, trouble, again) => {
  fillTable(find('session-table'), [
    ['Client', ({ client_id: id }) => make('a', { class: 'topic', href: addressOf('sessions', { ...values, client: id }) }, id)],
    ['State', state],
    ['Behind', ({ lag }) => lagText(lag), 'number'],
    ['In flight', ({ in_flight: flight, awaiting_pubrel: release }) => [count(flight), release ? make('small', {}, `${count(release)} for PUBREL`) : null], 'number'],
    ['Subscriptions', filtersOf],
    ...(may('write') ? [['', (session) => kickButton(session, trouble, again)]] : []),
  ], items);
  find('session-table').hidden = items.length === 0;
  find('no-sessions').hidden = items.length > 0;
  find('sessions-summary').textContent = items.length === 0 ? 'none' : `${more ? 'the first ' : ''}${count(items.length)}`;
  find('sessions-more').hidden = !more;
};

const showFigures = ({ totals }) => {
  fillFigures(find('session-figures'), [
    ['Sessions', count(totals.sessions)],
    ['Connected clients', count(totals.clients)],
    ['Behind', count(totals.lag_messages), totals.lag_messages ? durationText(totals.lag_seconds) : '', totals.lag_messages ? 'out' : '', `counted ${agoText(totals.lag_age)}`],
    ['In flight', count(totals.in_flight)],
  ]);
};

const form = find('session-form');

/* The requested number of sessions: first those that are behind, furthest first, then the others by client id. */
const read = async ({ sort, ...query }, limit, signal) => {
  const behind = sort === 'lag' ? (await ask('/sessions', { ...query, sort, limit }, { signal })).items : [];
  const known = new Set(behind.map(({ client_id: id }) => id));
  const page = await ask('/sessions', { ...query, limit }, { signal });
  const items = [...behind, ...page.items.filter(({ client_id: id }) => !known.has(id))];
  return [items.slice(0, limit), page.next !== null || items.length > limit];
};

/** Show the view until the signal ends it. */
export const sessions = async (values, signal, trouble) => {
  for (const field of form.elements) if (field.name) field.value = values[field.name] ?? field.dataset.default ?? '';
  const may = await rights(signal);
  let limit = PAGE;
  const look = async () => {
    const { search, connected, sort } = Object.fromEntries(new FormData(form));
    const query = { search: search.trim(), connected, lag: true, sort: sort || 'lag' };
    const [[items, more], figures] = await Promise.all([read(query, limit, signal), ask('/figures', {}, { signal })]);
    if (find('session-table').contains(document.activeElement) || find('confirm').open) return;  // no focus is taken away
    show(items, more, values, may, trouble, look);
    showFigures(figures);
  };
  find('sessions-more').onclick = () => {
    limit += PAGE;
    look().catch(trouble);
  };
  closeDetails();
  await poll(EVERY, async () => {
    if (values.client) await showDetails(values.client, may, signal, trouble, () => go('sessions', { ...values, client: '' }));
    await look();
  }, signal, trouble);
};

form.addEventListener('submit', (event) => {
  event.preventDefault();
  go('sessions', Object.fromEntries(new FormData(form)));
});
