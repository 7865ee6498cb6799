/* The view "Publish": one message from the page, and what became of it. */

import { addressOf } from '../address.js';
import { find, make } from '../elements.js';
import { ask, rights } from '../server.js';

const form = find('publish-form');

const outcome = ({ stored, retained }) => [
  stored ? 'stored' : 'passed on to those that are subscribed now, and not stored, because no rule and no durable session needs it',
  retained ? 'it is its topic\'s retained message now' : '',
].filter(Boolean).join('; ');

const send = async (trouble) => {
  const { topic, payload, qos } = Object.fromEntries(new FormData(form));
  const { retain, store } = form.elements;
  const json = { topic, payload, qos: Number(qos), retain: retain.checked };
  try {
    const done = await ask('/messages', { store: store.checked ? 'true' : '' }, { method: 'POST', json });
    find('published').replaceChildren(`Published on ${topic}: ${outcome(done)}. `,
      done.stored ? make('a', { href: addressOf('replay', { filter: topic }) }, 'See it')
        : 'To keep such messages, add a rule in the view Storage, or tick "Store it in any case".');
    trouble(null);
  } catch (failed) {
    find('published').textContent = '';
    trouble(failed);
  }
};

/** Show the view until the signal ends it. */
export const publish = async (values, signal, trouble) => {
  if (values.topic) form.elements.topic.value = values.topic;
  const may = await rights(signal);
  const allowed = may('write');
  for (const field of form.elements) field.disabled = !allowed;
  find('publish-scope').hidden = allowed;
  form.onsubmit = (event) => {
    event.preventDefault();
    send(trouble);
  };
};

/* What is stored in any case changes no retained message. */
form.elements.retain.addEventListener('change', ({ target }) => {
  if (target.checked) form.elements.store.checked = false;
});
form.elements.store.addEventListener('change', ({ target }) => {
  if (target.checked) form.elements.retain.checked = false;
});
