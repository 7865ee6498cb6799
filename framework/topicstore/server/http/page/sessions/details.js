/* One session: where its client is, what it subscribes to, what it has yet to get, and when it ends. */

import { fillFacts, fillTable, find, make } from '../elements.js';
import { count, durationText } from '../format.js';
import { ask } from '../server.js';
import { moment } from '../time.js';
import { expireButton, kickButton } from './ending.js';

/* What the next message waits for, in words. */
const WAITS = {
  nothing: 'nothing: all that there is was sent',
  acknowledgements: 'acknowledgements of the client: its window is full',
  delivery: 'its turn to be sent',
  resume: 'the client to read what was sent',
  permission: 'the decision whether the client may get it',
};
const RETAIN = ['when it subscribes', 'when it subscribes for the first time', 'never'];

/** Make what says how far a session or a subscription is behind. */
export const lagText = (lag) => {
  if (!lag || lag.messages === 0) return lag ? 'none' : '';
  return [`${lag.exact ? '' : 'about '}${count(lag.messages)}`, make('small', {}, durationText(lag.seconds))];
};

const second = (time) => moment(time).slice(0, 19);

const willText = ({ will_due: due, will_delay: delay }) => {
  if (due !== null) return `published ${second(due)}`;
  if (delay === null) return 'none';
  return delay === 0 ? 'published at once when the connection is lost' : `published ${durationText(delay)} after the connection is lost`;
};

const endText = ({ connected, expires, expiry_interval: interval }) => {
  if (expires !== null && !connected) return second(expires);
  if (interval === null) return 'never by itself';
  return interval === 0 ? 'with the connection' : `${durationText(interval)} after the connection ends`;
};

const options = ({ no_local: local, retain_as_published: published, retain_handling: handling, identifier }) => [
  local && 'not its own messages',
  published && 'retain flag as published',
  `retained messages ${RETAIN[handling]}`,
  identifier && `identifier ${identifier}`,
].filter(Boolean).join(', ');

const facts = (session) => {
  const { connection } = session;
  return [
    ['Client', connection ? `connected from ${connection.address ?? 'this process'}` : 'away'],
    ['Begun', second(session.created)],
    ['Session ends', endText(session)],
    ['Will', willText(session)],
    ['In flight', `${count(session.in_flight)}${connection ? ` of at most ${count(connection.receive_maximum)}` : ''}`
      + (session.awaiting_pubrel ? `; ${count(session.awaiting_pubrel)} that came wait for PUBREL` : '')],
    ['Behind', lagText(session.lag)],
    ...(connection ? [
      ['Waits for', WAITS[connection.waits_for] ?? connection.waits_for],
      ['Stuck since', connection.stuck_since === null ? 'it is not' : second(connection.stuck_since)],
      ['Dropped', `${count(connection.missed)} of QoS 0 that the client was too slow for; ${count(connection.refused)} that it may not get`],
    ] : []),
    ['Kept', session.in_memory ? 'in memory, until the connection ends' : 'on disk'],
  ];
};

/** Hide what is shown of a session. */
export const closeDetails = () => { find('session-detail').hidden = true; };

/** Show a session; `close` is called when a person has enough of it, and when it has ended. */
export const showDetails = async (id, may, signal, trouble, close) => {
  const part = find('session-detail');
  if (part.contains(document.activeElement) || find('confirm').open) return;  // no focus is taken away
  const session = await ask(`/sessions/${encodeURIComponent(id)}`, {}, { signal }).catch((failed) => {
    if (failed.status !== 404) throw failed;
    close();
    return null;
  });
  if (!session) return;
  const again = () => {
    document.activeElement?.blur();
    return showDetails(id, may, signal, trouble, close);
  };
  find('session-name').textContent = id || '(empty)';
  fillFacts(find('session-facts'), facts(session));
  fillTable(find('session-subscriptions'), [
    ['Filter', ({ filter }) => filter, 'topic'],
    ['QoS', ({ qos }) => String(qos), 'number'],
    ['Behind', ({ lag }) => lagText(lag), 'number'],
    ['Gets', options],
  ], session.subscriptions);
  find('session-subscriptions').hidden = session.subscriptions.length === 0;
  find('session-actions').replaceChildren(
    ...(may('write') ? [kickButton(session, trouble, again), expireButton(session, trouble, async () => close())] : []),
    make('button', { type: 'button', class: 'quiet', onclick: close }, 'Close'));
  part.hidden = false;
};
