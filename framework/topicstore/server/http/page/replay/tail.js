/* Messages as they are stored. The stream is read by hand, because EventSource sends no token. */

import { parts, request } from '../server.js';

const AGAIN = 2000;
const TOGETHER = 250;

const eventOf = (text) => Object.fromEntries(text.split('\n').map((line) => {
  const at = line.indexOf(':');
  return [line.slice(0, at), line.slice(at + 1).trimStart()];
}));

const pause = (milliseconds, signal) => new Promise((resolve) => {
  const timer = setTimeout(resolve, milliseconds);
  signal.addEventListener('abort', () => { clearTimeout(timer); resolve(); }, { once: true });
});

/** Call `show` with the matching messages, a few times a second, until the signal ends it. A connection that broke is
 * made again, and goes on after the last message that came; `trouble` is told, with null when it is well again. */
export const tail = async (filter, signal, show, trouble) => {
  let last = null;
  let waiting = [];
  const timer = setInterval(() => { if (waiting.length) show(waiting.splice(0)); }, TOGETHER);
  signal.addEventListener('abort', () => clearInterval(timer), { once: true });
  while (!signal.aborted) {
    try {
      const more = last === null ? {} : { 'Last-Event-ID': last };
      const response = await request('/messages/tail', { query: { filter }, accept: 'text/event-stream', signal, more });
      trouble(null);
      for await (const text of parts(response, '\n\n')) {
        const event = eventOf(text);
        if (event.id) last = event.id;
        if (event.event === 'problem') throw new Error(JSON.parse(event.data).detail);
        if (event.data && !event.event) waiting.push(JSON.parse(event.data));
        if (waiting.length > 5000) waiting = waiting.slice(-1000);
      }
    } catch (failed) {
      if (signal.aborted) return;
      trouble(failed);
    }
    await pause(AGAIN, signal);
  }
};
