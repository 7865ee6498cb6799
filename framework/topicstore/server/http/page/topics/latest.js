/* The last value of each topic that is shown, and its age; one topic's last message as a whole. */

import { addressOf } from '../address.js';
import { find, make } from '../elements.js';
import { agoText } from '../format.js';
import { onPayloadForm } from '../payloads/form.js';
import { jsonOf, previewOf, shownPayload } from '../payloads/payloads.js';
import { ask } from '../server.js';
import { moment } from '../time.js';

/* The largest number of topics whose values one request fetches. */
const MOST = 100;

let shown = new Map();
let chosen = null;

const seconds = (time) => (Date.now() * 1000 - time) / 1e6;

const show = (entry) => {
  entry.value.textContent = entry.row ? previewOf(entry.row) : '';
  entry.age.textContent = agoText(seconds(entry.last));
  entry.age.title = moment(entry.last);
};

/** Make what stands beside a level of topics: the age of its newest message, and the value of the topic that ends there. */
export const shownTopic = ({ path, last, ends }) => {
  const [value, age] = [make('span', { class: 'value' }), make('time', { class: 'age' })];
  const entry = { value, age, last, ends, row: null };
  shown.set(path, entry);
  show(entry);
  return make('span', { class: 'last' }, value, age);
};

/** Forget the topics that were shown. */
export const forgetTopics = () => {
  shown = new Map();
  chosen = null;
  find('topic-message').hidden = true;
};

const showChosen = () => {
  if (!chosen) return;
  find('topic-name').textContent = chosen.topic;
  find('topic-when').textContent = `${agoText(seconds(chosen.timestamp))}, ${moment(chosen.timestamp)}; `
    + [chosen.client_id && `from ${chosen.client_id}`, `QoS ${chosen.qos}`, chosen.retain && 'retained'].filter(Boolean).join(', ');
  find('topic-payload').replaceChildren(shownPayload(chosen, jsonOf(chosen)));
  find('topic-replay').href = addressOf('replay', { filter: chosen.topic });
  find('topic-publish').href = addressOf('publish', { topic: chosen.topic });
  find('topic-message').hidden = false;
};

/** Show the last message of a topic. */
export const chooseTopic = async (topic, signal) => {
  const { items } = await ask('/latest', { topic }, { signal });
  chosen = items[0] ?? null;
  showChosen();
};

/** Ask for the values of the topics that can be seen, and show how old they are now. */
export const refreshTopics = async (signal) => {
  const seen = [...shown].filter(([, { age }]) => age.checkVisibility());
  const wanted = seen.filter(([, { ends }]) => ends).map(([topic]) => topic);
  for (let at = 0; at < wanted.length; at += MOST) {
    const { items } = await ask('/latest', { topic: wanted.slice(at, at + MOST), limit: MOST }, { signal });
    for (const row of items) {
      const entry = shown.get(row.topic);
      if (entry) Object.assign(entry, { row, last: Math.max(entry.last, row.timestamp) });
    }
  }
  seen.forEach(([, entry]) => show(entry));
  if (chosen && wanted.includes(chosen.topic)) {
    chosen = shown.get(chosen.topic).row ?? chosen;
    showChosen();
  }
};

onPayloadForm(showChosen);
