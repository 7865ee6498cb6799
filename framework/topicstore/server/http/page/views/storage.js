/* The view "Storage": which messages are stored, what goes when, and the generations in which they are. */

import { confirmed, fillFacts, fillTable, find, make } from '../elements.js';
import { count, counted, durationText, sizeText } from '../format.js';
import { ask, rights } from '../server.js';
import { inZone, moment } from '../time.js';

const GENERATIONS = 100;
const form = find('rule-form');

const shownTime = (time) => (time === null ? '' : moment(time).slice(0, 19));

const removeButton = (rule, trouble, again) => make('button', {
  type: 'button',
  class: 'quiet',
  'aria-label': `Remove the rule ${rule.topic_filter}`,
  onclick: async () => {
    if (!await confirmed(`Remove the rule ${rule.topic_filter}?`, 'Messages that it has stored stay. New ones are stored only if another rule or a session asks for them.', 'Remove it')) return;
    await ask('/persistence', rule, { method: 'DELETE' }).then(again).catch(trouble);
  },
}, 'Remove');

const showKept = ({ kept }) => {
  find('kept').replaceChildren(...kept.map((text) => make('li', {}, `${text[0].toUpperCase()}${text.slice(1)}.`)));
};

const showRules = (items, may, trouble, again) => {
  fillTable(find('rules'), [
    ['Topics', ({ topic_filter: filter }) => filter, 'topic'],
    ['Published by', ({ client_id: id }) => id ?? 'any client'],
    ['QoS', ({ least_qos: qos }) => (qos ? `${qos} or more` : 'any'), 'nowrap'],
    ...(may('admin') ? [['', (rule) => removeButton(rule, trouble, again)]] : []),
  ], items);
  find('rules').hidden = items.length === 0;
  find('no-rules').hidden = items.length > 0;
  form.hidden = !may('admin');
  form.onsubmit = async (event) => {
    event.preventDefault();
    const { topic_filter: filter, client_id: id, least_qos: qos } = Object.fromEntries(new FormData(form));
    const json = { topic_filter: filter.trim() || '#', client_id: id.trim() || null, least_qos: Number(qos) };
    await ask('/persistence', {}, { method: 'POST', json }).then(again).catch(trouble);
  };
};

const age = (seconds) => (seconds === null ? 'for ever' : durationText(seconds));

const showRetention = (found) => {
  const filters = Object.entries(found.filters);
  fillFacts(find('limits'), [
    ['Messages are kept', age(found.max_age)],
    ...filters.map(([filter, length]) => [make('span', { class: 'topic' }, filter), age(length)]),
    ['Only for sessions', found.delivered === null ? 'as long as all else' : `${durationText(found.delivered)} at least, until no session needs it`],
    ['A generation begins', found.rotate_every === null ? 'only when retention or a person asks for one' : `every ${durationText(found.rotate_every)}`],
    ['Most bytes', found.max_bytes === null ? 'no limit' : `${sizeText(found.max_bytes)}; then ${found.when_full === 'drop' ? 'the oldest go' : 'new ones are refused'}`],
    ['Stored now', `${sizeText(found.live_bytes)} in ${counted(found.generations, 'generation')}`],
    ...(found.archive_to === null ? [] : [['Archived to', found.archive_to]]),
    ...(found.failure === null ? [] : [['The last run failed', found.failure]]),
  ]);
  fillTable(find('outlook'), [
    ['What', ({ what }) => what],
    ['Goes', ({ when }) => shownTime(when) || '–', 'nowrap'],
    ['Messages', ({ messages, live_bytes: bytes }) => (messages === null ? '' : [count(messages), make('small', {}, sizeText(bytes ?? 0))]), 'number'],
    ['Why', ({ why }) => inZone(why), 'wide'],
  ], found.outlook.slice(0, GENERATIONS));
};

const showGenerations = (items) => {
  const newest = items.slice(-GENERATIONS).reverse();
  fillTable(find('all-generations'), [
    ['No.', ({ number }) => String(number)],
    ['Layout', ({ layout }) => layout],
    ['Messages', ({ messages }) => count(messages), 'number'],
    ['Size', ({ live_bytes: bytes }) => sizeText(bytes), 'number'],
    ['Begun', ({ created }) => shownTime(created), 'nowrap'],
    ['Ended', ({ sealed }) => shownTime(sealed) || 'it is written now', 'nowrap'],
    ['Archived', ({ archived }) => archived ?? ''],
  ], newest);
  find('generations-summary').textContent = items.length > newest.length ? `the newest ${count(newest.length)} of ${count(items.length)}` : 'newest first';
};

/** Show the view until the signal ends it. */
export const storage = async (_, signal, trouble) => {
  const may = await rights(signal);
  const rules = async () => {
    trouble(null);
    const [{ items }, info] = await Promise.all([ask('/persistence', {}, { signal }), ask('/info', {}, { signal })]);
    showKept(info);
    showRules(items, may, trouble, rules);
  };
  await Promise.all([
    rules(),
    ask('/retention', {}, { signal }).then(showRetention),
    ask('/generations', {}, { signal }).then(({ items }) => showGenerations(items)),
  ]);
};
