/* Ending a client's connection, and ending its session for good. */

import { confirmed, make } from '../elements.js';
import { ask } from '../server.js';

const path = (id) => `/sessions/${encodeURIComponent(id)}`;

const button = (name, id, question, yes, act, trouble) => make('button', {
  type: 'button',
  class: 'quiet',
  'aria-label': `${name} ${id}`,
  onclick: async () => {
    if (await confirmed(`${name} ${id}?`, question, yes)) await act().catch(trouble);
  },
}, name);

/** Make the button that ends a connection; none for a client that isn't connected. */
export const kickButton = ({ client_id: id, connected }, trouble, again) => (connected
  ? button('Kick', id, 'Its connection is ended. Its session stays, and it may connect again.', 'Kick it', async () => {
    await ask(`${path(id)}/kick`, {}, { method: 'POST' });
    await again();
  }, trouble) : '');

/** Make the button that ends a session. */
export const expireButton = ({ client_id: id }, trouble, again) => button('Expire', id,
  'Its session ends for good, with its subscriptions and the messages that wait for it. A connected client is disconnected.', 'Expire it', async () => {
    await ask(path(id), {}, { method: 'DELETE' });
    await again();
  }, trouble);
